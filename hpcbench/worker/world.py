"""The ranks as one world: met, told apart, joined in a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import strategy
from hpcbench.worker.closing import Closing
from hpcbench.worker.device import shared_devices
from hpcbench.worker.gpu import device_uuid
from hpcbench.worker.link import Link
from hpcbench.worker.rendezvous import absent_after, join, name_interfaces
from hpcbench.worker.stop import PeerEnded
from hpcbench.worker.stores import HashStore, PrefixStore, Store, another, seconds
from hpcbench.worker.strategies.base import Place


def enter_world(closing: Closing, device: torch.device) -> Place:
    """Meet the other ranks and make the default process group; ``closing`` can then talk to them.

    A lone rank gets a group only where its strategy asks for one.
    """
    spec, info, wait_s = closing.task.spec, closing.info, closing.header.wait_s
    place = Place(info.rank, info.world_size, device, wait_s=wait_s)
    if info.world_size == 1:
        if strategy(spec.strategy).own_degree is not None:
            name_interfaces("lo", named_by_profile=False, single_node=True)
            _init_group(HashStore(), place, wait_s)
        return place
    launch = f"{closing.task.run_id}/{closing.attempt.number}"
    store = join(info, closing.header, closing.attempt.rendezvous_path, launch, spec.nodes == 1)
    closing.link = Link(store, info.rank, info.world_size)
    stop = closing.stop
    closing.link.watch(
        told=lambda: stop.request(PeerEnded("another rank gave up")),
        lost=lambda: stop.request(PeerEnded("rank 0's process has ended")),
    )
    if device.type == "cuda":
        _refuse_shared_devices(store, place, wait_s)
    # A connection of its own: while a collective is set up, the other one must stay free for the stop thread.
    _init_group(PrefixStore("group", another(store)), place, wait_s)
    return place


def _init_group(store: Store, place: Place, wait_s: float) -> None:
    dist.init_process_group(
        "nccl" if place.device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=seconds(wait_s),
    )


def _refuse_shared_devices(store: Store, place: Place, wait_s: float) -> None:
    store.set(f"device/{place.rank}", device_uuid(place.device))
    if place.rank != 0:
        return
    keys = [f"device/{rank}" for rank in range(place.world_size)]
    absent = absent_after(store, keys, wait_s)
    shared = [] if absent else shared_devices([store.get(key).decode() for key in keys])
    if shared:
        listed = "; ".join(", ".join(str(rank) for rank in ranks) for ranks in shared)
        raise WorkerError(
            f"ranks share a GPU: {listed}",
            hint="give every rank its own: srun --gpus-per-task=1, or no CUDA_VISIBLE_DEVICES of one device for all",
        )


def barrier(place: Place) -> None:
    """Wait for all ranks of the default group; nothing to wait for where there is none."""
    if dist.is_initialized():
        dist.barrier(device_ids=[place.device.index] if place.device.type == "cuda" else None)


def any_rank(place: Place, flag: bool) -> bool:
    """Whether any rank of the default group says so; the same answer on all of them, which wait for each other."""
    if not dist.is_initialized():
        return flag
    said = torch.tensor(int(flag), dtype=torch.int32, device=place.device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return bool(said.item())
