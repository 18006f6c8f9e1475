"""The cost of our timed loop: instruments per step, and blocks of our loop and of a hand-written one in turn.

Both train the same model on the same data with DDP over the same ranks, in the same processes, each rank kept to one
core; a pair is one short block of each, in an order that is drawn. The figure is the median of the pairs' ratios with
the bootstrap interval over pairs: what disturbs one block of a pair disturbs that pair alone. Rank 0 prints one line of
JSON.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ratios import median_interval
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.data.train import DdpStrategy
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.distributed.world import leave_world
from hpcbench.worker.measure.clocks import make_step_clock
from hpcbench.worker.models.build import build_model
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.training_loop import LoopProgress, run_training_loop

PAIRS = 120
STEPS = 4
GOAL_RATIO = 1.01
GOAL_WIDTH = 0.04


class HandWritten:
    """A hand-written training loop."""

    def __init__(self, spec: RunSpec, feed: DataFeed, rank: int) -> None:
        self.model = DistributedDataParallel(build_model(spec))
        self.optimizer = torch.optim.SGD(self.model.parameters(), spec.learning_rate, spec.momentum)
        self.batches = [feed.batch(step, rank) for step in range(STEPS)]

    def block(self) -> float:
        dist.barrier()
        began = time.perf_counter()
        for inputs, labels in self.batches:
            self.optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(self.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return time.perf_counter() - began


class Ours:
    """The worker's loop, as a run calls it."""

    def __init__(self, spec: RunSpec, feed: DataFeed, place: RankContext) -> None:
        self.spec, self.feed = spec, feed
        self.strategy = DdpStrategy()
        self.strategy.setup(build_model(spec), spec, place)

    def block(self) -> float:
        progress = LoopProgress(self.spec, torch.device("cpu"))
        run_training_loop(self.strategy, self.feed, self.spec, progress, StopController(), dist.barrier)
        return sum(progress.step_times_s())


class Block(NamedTuple):
    """Seconds by the clock, and of the processor for all threads of this rank."""

    wall_s: float
    cpu_s: float


def loop_overhead_s(device: torch.device, repeats: int = 10_000) -> float:
    """Measure the seconds that the loop's bookkeeping adds to one timed step."""
    stop, clock, loss = StopController(), make_step_clock(device), torch.zeros(())
    losses: list[Tensor] = []
    append, mark = losses.append, clock.mark
    first_step_s: float | None = 0.0
    stop.set_deadline(time.time() + 3600, 3600)
    began = time.perf_counter()
    for _ in range(repeats):
        if stop.should_stop():
            break
        append(loss)
        mark()
        if first_step_s is None:
            break
    return (time.perf_counter() - began) / repeats


def timed(one: Ours | HandWritten) -> Block:
    began = time.process_time()
    wall_s = one.block()
    return Block(wall_s, time.process_time() - began)


def main() -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    spec = RunSpec(
        model="resnet18", dataset="digits", strategy="ddp", batch_size=16, tasks_per_node=world, dp_degree=world,
        warmup_steps=0, steps=STEPS,
    )  # fmt: skip
    place = RankContext(rank, world, torch.device("cpu"))
    feed = make_feed(spec, place.device)
    ours, theirs = Ours(spec, feed, place), HandWritten(spec, feed, rank)
    for one in (ours, theirs):
        one.block()
    pairs = []
    # The same order on every rank. Alternating would follow anything that comes and goes with every other pair.
    order = random.Random(1)
    for _ in range(PAIRS):
        ours_first = order.random() < 0.5
        first = timed(ours) if ours_first else timed(theirs)
        second = timed(theirs) if ours_first else timed(ours)
        pairs.append((first, second) if ours_first else (second, first))
    if rank == 0:
        print(json.dumps(rows(pairs)), flush=True)
    del one, ours, theirs
    leave_world()


def rows(pairs: list[tuple[Block, Block]]) -> list[dict[str, object]]:
    step_s = statistics.median(ours.wall_s for ours, _ in pairs) / STEPS
    cost_s = loop_overhead_s(torch.device("cpu"))
    ratio, low, high = median_interval([ours.wall_s / theirs.wall_s for ours, theirs in pairs])
    of_cpu = median_interval([ours.cpu_s / theirs.cpu_s for ours, theirs in pairs])
    met = ratio <= GOAL_RATIO or (low <= 1 <= high and high - low <= GOAL_WIDTH)
    return [
        {
            "figure": "instruments per step over step time",
            "measured": f"{cost_s * 1e6:.2f} us over {step_s * 1e3:.1f} ms = {cost_s / step_s:.2e}",
            "goal": "", "met": None,
        },
        {
            "figure": f"our loop over a hand-written DDP loop, {len(pairs)} pairs of {STEPS} steps",
            "measured": f"{ratio:.4f} [{low:.4f} {high:.4f}]",
            "goal": f"at most {GOAL_RATIO}, or an interval that holds 1 and is no wider than {GOAL_WIDTH}",
            "met": met,
        },
        {
            "figure": "the same in processor time, which other processes hardly touch",
            "measured": "{:.4f} [{:.4f} {:.4f}]".format(*of_cpu),
            "goal": "", "met": None,
        },
    ]  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
