"""World of a run's ranks: the device of each, its control channel and the default process group."""

from __future__ import annotations

import gc
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hpcbench.config.run_spec import RunSpec, TaskFileHeader
from hpcbench.errors import WorkerError
from hpcbench.strategies.catalog import get_strategy
from hpcbench.worker.distributed import process_groups
from hpcbench.worker.distributed.point_to_point import stage_messages
from hpcbench.worker.distributed.rank_environment import VISIBLE_DEVICES, RankInfo, describe_visible_devices
from hpcbench.worker.distributed.rendezvous import ControlChannel, join_store, set_interface_variables, wait_for_keys
from hpcbench.worker.measure.gpu import device_uuid, is_hip
from hpcbench.worker.shutdown import PeerEnded, StopController

_NCCL_SHARES_DEVICES = (2, 30)
"""First version of NCCL that has the variable NCCL_MULTI_RANK_GPU_ENABLE."""


def choose_device(kind: str, info: RankInfo, ranks_per_device: int = 1) -> torch.device:
    """Return the device of this rank: the cpu, or among the visible GPUs the one of its local rank.

    A rank that sees a single GPU was assigned it by the launcher. Ranks that share devices take them in turn.

    Args:
        kind: the cluster profile's device, ``cpu`` or ``cuda``.
        info: this rank.
        ranks_per_device: how many ranks may share a device.

    Raises:
        WorkerError: fewer GPUs are visible than ranks need.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = describe_visible_devices(os.environ)
    if count == 0:
        raise WorkerError(
            f"the profile's device is cuda, but torch {torch.__version__} sees no GPU on {socket.gethostname()} "
            f"({visible})",
            hint="does the job ask for GPUs, and is this torch built for CUDA or ROCm?",
        )
    if 1 < count * ranks_per_device < info.local_world_size:
        raise WorkerError(
            f"{info.local_world_size} ranks on {socket.gethostname()} see {count} GPUs ({visible})",
            hint=f"ranks per GPU: {ranks_per_device}; let tasks_per_node be at most the GPUs of a node times that",
        )
    device = torch.device("cuda", info.local_rank % count)
    torch.cuda.set_device(device)
    return device


def ranks_sharing_devices(uuids: list[str]) -> list[list[int]]:
    """Return the groups of ranks with the same GPU; ``uuids`` is indexed by rank."""
    by_uuid: dict[str, list[int]] = {}
    for rank, uuid in enumerate(uuids):
        by_uuid.setdefault(uuid, []).append(rank)
    return [ranks for ranks in by_uuid.values() if len(ranks) > 1]


def open_control_channel(
    info: RankInfo, header: TaskFileHeader, rendezvous_path: Path, launch: str, single_node: bool, stop: StopController
) -> ControlChannel | None:
    """Meet the other ranks of ``launch`` and stop this one when another rank ends; ``None`` for a lone rank."""
    if info.world_size == 1:
        return None
    store = join_store(info, header, rendezvous_path, launch, single_node)
    channel = ControlChannel(store, info.rank, info.world_size)
    channel.watch_peers(
        on_abort=lambda: stop.stop_after_grace(PeerEnded("another rank gave up")),
        on_lost=lambda: stop.stop_after_grace(PeerEnded("rank 0's process has ended")),
    )
    return channel


def join_world(
    spec: RunSpec, info: RankInfo, device: torch.device, channel: ControlChannel | None, wait_s: float,
    ranks_per_device: int = 1,
) -> process_groups.RankContext:  # fmt: skip
    """Create the default process group; a lone rank gets one only where its strategy needs one.

    Ranks that share a device communicate over gloo with staged messages, unless NCCL takes them (from 2.30 on).

    Raises:
        WorkerError: two ranks have the same GPU, and ``ranks_per_device`` is 1.
    """
    shares_device = ranks_per_device > 1
    takes_gloo = device.type != "cuda" or (shares_device and channel is not None and not _nccl_shares_devices())
    stage_messages(shares_device and takes_gloo)
    context = process_groups.RankContext(info.rank, info.world_size, device, wait_s=wait_s, shares_device=shares_device)
    store: process_groups.Store
    if channel is not None:
        if device.type == "cuda" and not shares_device:
            _refuse_shared_devices(channel.store, context, wait_s)
        # A separate connection: while a collective is set up, the channel's must stay free for the stop thread.
        store = process_groups.PrefixStore("group", process_groups.clone_connection(channel.store))
    elif get_strategy(spec.strategy).own_degree is not None:
        set_interface_variables("lo", named_by_profile=False, single_node=True)
        store = process_groups.HashStore()
    else:
        return context
    dist.init_process_group(
        "gloo" if takes_gloo else "nccl",
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=process_groups.to_timedelta(wait_s),
    )
    return context


def _nccl_shares_devices() -> bool:
    """Whether NCCL takes several ranks of one GPU; it is asked to, as it does not by itself. RCCL is not asked."""
    if is_hip() or not dist.is_nccl_available() or torch.cuda.nccl.version() < _NCCL_SHARES_DEVICES:  # type: ignore[no-untyped-call]
        return False
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return True


def leave_world() -> None:
    """Undo ``join_world`` in a process that has more runs to come: only what libraries keep is left of this one."""
    # Models go before their group. If DDP's reducer drops the last reference to a group of gloo, it holds Python's
    # lock, and the group waits for a thread that needs the lock (pytorch/pytorch#190489).
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    process_groups.clear_group_cache()
    stage_messages(False)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _refuse_shared_devices(store: process_groups.Store, context: process_groups.RankContext, wait_s: float) -> None:
    store.set(f"device/{context.rank}", device_uuid(context.device))
    if context.rank != 0:
        return
    keys = [f"device/{rank}" for rank in range(context.world_size)]
    missing = wait_for_keys(store, keys, wait_s)
    shared = [] if missing else ranks_sharing_devices([store.get(key).decode() for key in keys])
    if shared:
        groups = "; ".join(", ".join(str(rank) for rank in ranks) for ranks in shared)
        raise WorkerError(
            f"ranks share a GPU: {groups}",
            hint=f"give every rank its own: srun --gpus-per-task=1, not the same {' or '.join(VISIBLE_DEVICES)}",
        )


def barrier(context: process_groups.RankContext) -> None:
    """Wait for all ranks of the default group, if there is one."""
    if dist.is_initialized():
        dist.barrier(device_ids=[context.device.index] if context.device.type == "cuda" else None)


def any_rank(context: process_groups.RankContext, flag: bool) -> bool:
    """Return on every rank whether ``flag`` is true on any rank of the default group. Waits for all of them."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(int(flag), dtype=torch.int32, device=context.device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())
