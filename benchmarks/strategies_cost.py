"""The cost of our strategies: blocks of steps of one of ours and of a hand-written script on the same library in turn.

Both train the same model from the same weights on the same batches over the same ranks and with the same options, in
the same processes, each rank kept to one core; that they compute the same loss is checked first. A pair is one block of
each, in an order that is drawn. The figure is the median of the pairs' ratios with the bootstrap interval over pairs,
by the clock and in processor time, which other processes hardly touch. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ratios import median_interval, tell
from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime

PAIRS = 60
STEPS = 4
GOAL_RATIO = 1.02
GOAL_WIDTH = 0.06
SAME_LOSS = 1e-3
"""Of losses after ``VERIFIED_STEPS`` updates, which part by far more where gradients are averaged otherwise."""
CPU = torch.device("cpu")

Block = Callable[[], Tensor]
"""Trains for ``VERIFIED_STEPS`` steps; the last one's loss on this rank, such that the sum over ranks is the mean."""


def by_hand(
    model: nn.Module, optimizer: Any, feed: DataFeed, rank: int, clear: Callable[[], object] | None = None
) -> Block:
    """Train by a hand-written loop."""
    batches = [feed.batch(step, rank) for step in range(STEPS)]
    clear = clear or optimizer.zero_grad

    def block() -> Tensor:
        for inputs, labels in batches:
            clear()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return loss.detach() / feed.replicas

    return block


def settings(spec: RunSpec) -> dict[str, Any]:
    return {"lr": spec.learning_rate, "momentum": spec.momentum}


def separate(model: nn.Sequential) -> list[bool]:
    """Which parts have parameters, so that they are sharded by themselves."""
    return [any(True for _ in part.parameters()) for part in model]


def ddp_by_hand(spec: RunSpec, feed: DataFeed, rank: int) -> Block:
    model = DistributedDataParallel(build_model(spec))
    return by_hand(model, torch.optim.SGD(model.parameters(), **settings(spec)), feed, rank)


def zero1_by_hand(spec: RunSpec, feed: DataFeed, rank: int) -> Block:
    model = DistributedDataParallel(build_model(spec))
    make: Any = ZeroRedundancyOptimizer
    return by_hand(model, make(model.parameters(), torch.optim.SGD, **settings(spec)), feed, rank)


def fsdp_by_hand(spec: RunSpec, feed: DataFeed, rank: int) -> Block:
    model = build_model(spec)
    for part, has_own in zip(model, separate(model), strict=True):
        if has_own:
            fully_shard(part, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    return by_hand(model, torch.optim.SGD(model.parameters(), **settings(spec)), feed, rank)


def fairscale_oss_by_hand(spec: RunSpec, feed: DataFeed, rank: int) -> Block:
    from fairscale.optim.oss import OSS

    model = build_model(spec)
    optimizer = OSS(list(model.parameters()), optim=torch.optim.SGD, **settings(spec))
    return by_hand(DistributedDataParallel(model), optimizer, feed, rank)


def fairscale_sddp_by_hand(spec: RunSpec, feed: DataFeed, rank: int) -> Block:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model = build_model(spec)
    optimizer = OSS(list(model.parameters()), optim=torch.optim.SGD, **settings(spec))
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=2**23)
    # Anything else cuts gradients off from the buckets that they are views of.
    return by_hand(wrapped, optimizer, feed, rank, lambda: wrapped.zero_grad(set_to_none=False))


def fairscale_fsdp_by_hand(spec: RunSpec, feed: DataFeed, rank: int) -> Block:
    """Train on a cpu with the replaced streams of our run: the library does not start without them."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    given: dict[str, Any] = {
        "process_group": dist.group.WORLD, "process_group_reduce_scatter": dist.group.WORLD,
        "compute_device": CPU, "bucket_cap_mb": 0,
    }  # fmt: skip
    parts = build_model(spec)
    for name, has_own in enumerate(separate(parts)):
        if has_own:
            parts[name] = FullyShardedDataParallel(parts[name], **given)
    model = FullyShardedDataParallel(parts, **given)
    return by_hand(model, torch.optim.SGD(model.parameters(), **settings(spec)), feed, rank)


def horovod_by_hand(spec: RunSpec, feed: DataFeed, rank: int) -> Block:
    import horovod.torch as hvd

    model = build_model(spec)
    plain = torch.optim.SGD(model.parameters(), **settings(spec))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return by_hand(model, hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters()), feed, rank)


BY_HAND = {
    "ddp": ddp_by_hand,
    "zero1": zero1_by_hand,
    "fsdp": fsdp_by_hand,
    "fairscale_oss": fairscale_oss_by_hand,
    "fairscale_sddp": fairscale_sddp_by_hand,
    "fairscale_fsdp": fairscale_fsdp_by_hand,
    "horovod": horovod_by_hand,
}


def ours(spec: RunSpec, feed: DataFeed, place: RankContext) -> Block:
    strategy = resolve_runtime(spec.strategy)()
    strategy.setup(build_model(spec), spec, place)

    def block() -> Tensor:
        for step in range(STEPS):
            loss: Tensor = strategy.step(feed, step)
        return loss

    return block


class Took(NamedTuple):
    """Seconds by the clock, and of the processor for all threads of this rank."""

    wall_s: float
    cpu_s: float


def timed(block: Block) -> Took:
    dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    block()
    return Took(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def check_alike(key: str, pair: tuple[Block, Block]) -> None:
    """One block of each, in which the libraries also come up to speed; the second begins where the first ended."""
    for _ in range(2):
        losses = torch.stack([block() for block in pair])
        dist.all_reduce(losses)
        ours, theirs = losses.tolist()
        assert abs(ours - theirs) <= SAME_LOSS * theirs, f"{key}: a loss of {ours} against {theirs} by hand"


def compare(key: str, rank: int, world: int) -> dict[str, object]:
    spec = RunSpec(
        model="resnet18", dataset="digits", strategy=key, batch_size=16, tasks_per_node=world, dp_degree=world
    )
    feed = make_feed(spec, CPU)
    # Ours first: it starts the library that both use.
    pair = (ours(spec, feed, RankContext(rank, world, CPU)), BY_HAND[key](spec, feed, rank))
    check_alike(key, pair)
    walls, cpus = [], []
    # The same order on every rank. Alternating would follow anything that comes and goes with every other pair.
    order = random.Random(1)
    for _ in range(PAIRS):
        drawn = pair if order.random() < 0.5 else pair[::-1]
        took = {block: timed(block) for block in drawn}
        walls.append(took[pair[0]].wall_s / took[pair[1]].wall_s)
        cpus.append(took[pair[0]].cpu_s / took[pair[1]].cpu_s)
    ratio, low, high = median_interval(walls)
    return {
        "figure": f"our {key} over a hand-written one, {PAIRS} pairs of {STEPS} steps on {world} ranks",
        "measured": "{:.4f} [{:.4f} {:.4f}], in processor time {:.4f} [{:.4f} {:.4f}]".format(
            ratio, low, high, *median_interval(cpus)
        ),
        "goal": f"at most {GOAL_RATIO}, or an interval that holds 1 and is no wider than {GOAL_WIDTH}",
        "met": ratio <= GOAL_RATIO or (low <= 1 <= high and high - low <= GOAL_WIDTH),
    }


def main() -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # Horovod last: its thread goes on asking for work.
    rows = [compare(key, rank, world) for key in BY_HAND]
    tell(rows)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
