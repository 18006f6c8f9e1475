"""The cost of our strategies: blocks of steps of one of ours and of a hand-written script on the same library in turn.

Both train the same model on the same data over the same ranks, in the same processes; a pair is one block of each, and
the order within a pair changes from pair to pair. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ratios import median_interval
from hpcbench.config.spec import RunSpec
from hpcbench.parallel.catalog import resolve_runtime
from hpcbench.worker.data.feed import Feed, make_feed
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategies.base import Place

PAIRS = 40
STEPS = 8
GOAL_RATIO = 1.02
GOAL_WIDTH = 0.06
CPU = torch.device("cpu")

Block = Callable[[], None]


def by_hand(model: nn.Module, optimizer: Any, feed: Feed, rank: int) -> Block:
    """What a person would write, with nothing around it."""
    batches = [feed.batch(step, rank) for step in range(STEPS)]

    def block() -> None:
        for inputs, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return block


def ddp_by_hand(spec: RunSpec, feed: Feed, rank: int) -> Block:
    model = DistributedDataParallel(build_model(spec))
    return by_hand(model, torch.optim.SGD(model.parameters(), spec.learning_rate, spec.momentum), feed, rank)


def horovod_by_hand(spec: RunSpec, feed: Feed, rank: int) -> Block:
    import horovod.torch as hvd

    model = build_model(spec)
    plain = torch.optim.SGD(model.parameters(), spec.learning_rate, spec.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return by_hand(model, hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters()), feed, rank)


BY_HAND = {"ddp": ddp_by_hand, "horovod": horovod_by_hand}


def ours(spec: RunSpec, feed: Feed, place: Place) -> Block:
    strategy = resolve_runtime(spec.strategy)()
    strategy.setup(build_model(spec), spec, place)

    def block() -> None:
        for step in range(STEPS):
            strategy.step(feed, step)

    return block


def seconds(block: Block) -> float:
    dist.barrier()
    began = time.perf_counter()
    block()
    return time.perf_counter() - began


def compare(key: str, rank: int, world: int) -> dict[str, object]:
    spec = RunSpec(
        model="resnet18", dataset="digits", strategy=key, batch_size=16, tasks_per_node=world, dp_degree=world
    )
    feed = make_feed(spec, CPU)
    # Ours first: it starts the library that both use.
    pair = (ours(spec, feed, Place(rank, world, CPU)), BY_HAND[key](spec, feed, rank))
    for block in pair:
        block()
    ratios = []
    for number in range(PAIRS):
        order = pair if number % 2 else pair[::-1]
        times = {block: seconds(block) for block in order}
        ratios.append(times[pair[0]] / times[pair[1]])
    ratio, low, high = median_interval(ratios)
    return {
        "figure": f"our {key} over a hand-written one, {PAIRS} pairs of {STEPS} steps on {world} ranks",
        "measured": f"{ratio:.4f} [{low:.4f} {high:.4f}]",
        "goal": f"at most {GOAL_RATIO}, or an interval that holds 1 and is no wider than {GOAL_WIDTH}",
        "met": ratio <= GOAL_RATIO or (low <= 1 <= high and high - low <= GOAL_WIDTH),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # Horovod last: its thread goes on asking for work.
    rows = [compare(key, rank, world) for key in BY_HAND]
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
