"""Pipelines on the real runtime: the bubbles of stages that sleep, and gpipe against torch's and fairscale's own.

``bubbles`` (4 ranks): what every stage computes is next to nothing, and it sleeps a fixed time for it. The bubble is
the share of all ranks' time that they are in no action, from the first action of any rank to the last one's end.
``peers`` (2 ranks): blocks of steps of ours and theirs in turn, over the same stages and micro-batches; fairscale's
pipeline is one process with two threads, and the other rank waits meanwhile. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.ratios import median_interval, tell
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.pipeline.schedule_simulator import ActionSpan, measured_bubble_fraction
from hpcbench.strategies.pipeline.train.action_timeline import ActionRecorder
from hpcbench.strategies.pipeline.train.chunk import ModelChunk
from hpcbench.strategies.pipeline.train.fairscale_pipe import FairscalePipeStrategy
from hpcbench.strategies.pipeline.train.pipeline_strategy import PipelineStrategy
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import summed_loss
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import make_optimizer

CPU = torch.device("cpu")
UNIT_S = float(os.environ.get("SLEEP_UNIT_S", "0.05"))
"""A forward pass of a stage; a backward pass is two. A longer one is for a busy machine, where waking up takes long."""

STAGES, MICRO_BATCHES, REPEATS = 4, 8, 5
PAIRS = int(os.environ.get("PAIRS", "20"))
STEPS = 2
NEAR = 0.05


class Sleeping(ModelChunk):
    """A chunk that takes its time: ``unit_s`` forward, as long for either half of a backward pass."""

    unit_s = UNIT_S

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        time.sleep(self.unit_s)
        return super().forward(*given)

    def backward(self, *given: Any) -> tuple[Tensor, ...]:
        time.sleep(self.unit_s * (1 if self._queue is not None else 2))
        return super().backward(*given)

    def finish_weights(self, micro_batch: int) -> None:
        time.sleep(self.unit_s)
        super().finish_weights(micro_batch)


def small_blocks() -> nn.Sequential:
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 64))
    return nn.Sequential(first, *(nn.Linear(64, 64) for _ in range(2 * STAGES - 2)), nn.Linear(64, 10))


def bubble_of(schedule: str, rank: int) -> float:
    """The median bubble of some steps of ``schedule``; on all ranks."""
    spec = RunSpec(
        model="vgg11", dataset="digits", strategy=schedule, batch_size=4 * MICRO_BATCHES, micro_batches=MICRO_BATCHES,
        tasks_per_node=STAGES, pp_degree=STAGES, options={"balance": "blocks"},
    )  # fmt: skip
    torch.manual_seed(0)
    strategy, feed = PipelineStrategy(), make_feed(spec, CPU)
    strategy.setup(small_blocks(), spec, RankContext(rank, STAGES, CPU))
    virtual = strategy.layout.virtual_stages
    sleeping = {
        number: Sleeping(one.module, schedule == "zero_bubble") for number, one in strategy.runtime.chunks.items()
    }
    for chunk in sleeping.values():
        chunk.unit_s = UNIT_S / virtual
    strategy.runtime.chunks = sleeping
    found = []
    for step in range(REPEATS + 1):
        strategy.runtime.recorder = recorder = ActionRecorder(CPU)
        dist.barrier()
        recorder.start()
        zero_s = time.perf_counter()
        strategy.step(feed, step)
        ranks: list[Any] = [None] * STAGES
        # The ranks of one machine have one clock.
        dist.all_gather_object(ranks, [ActionSpan(a, b + zero_s, e + zero_s) for a, b, e in recorder.spans_s()])
        found.append(measured_bubble_fraction(ranks) or 0.0)
    return statistics.median(found[1:])


def bubbles(rank: int) -> list[dict[str, object]]:
    found = {name: bubble_of(name, rank) for name in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")}
    formula = (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
    gpipe, one_f_one_b = found["gpipe"], found["1f1b"]
    where = f"stages of fixed sleep, p = {STAGES}, m = {MICRO_BATCHES}, forward {UNIT_S:g} s"
    return [
        _row(f"bubble of gpipe, {where}", gpipe, f"within 5% of {formula:.4f}", abs(gpipe / formula - 1) <= NEAR),
        _row("bubble of 1f1b, the same", one_f_one_b, "within 5% of gpipe", abs(one_f_one_b / gpipe - 1) <= NEAR),
        *(
            _row(
                f"bubble of {name}, the same",
                found[name],
                "below gpipe and 1f1b",
                found[name] < min(gpipe, one_f_one_b),
            )
            for name in ("interleaved_1f1b", "zero_bubble")
        ),
    ]


def _row(figure: str, bubble: float, goal: str, met: bool) -> dict[str, object]:
    return {"figure": figure, "measured": f"{bubble:.4f}", "goal": goal, "met": met}


Block = Callable[[], None]


def ours(spec: RunSpec, feed: DataFeed, place: RankContext) -> tuple[PipelineStrategy, Block]:
    strategy = PipelineStrategy()
    strategy.setup(build_model(spec), spec, place)

    def block() -> None:
        for step in range(STEPS):
            strategy.step(feed, step)

    return strategy, block


def torchs(spec: RunSpec, feed: DataFeed, place: RankContext) -> Block:
    """ScheduleGPipe on the very stages of ours, with the same loss and optimizer."""
    made, _ = ours(spec, feed, place)
    chunk = made.module.chunk(place.rank)
    optimizer = make_optimizer(spec, chunk)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return summed_loss(output, target) / spec.batch_size

    stage = PipelineStage(chunk, place.rank, spec.pp_degree, CPU)
    schedule = ScheduleGPipe(stage, spec.micro_batches, loss_fn=loss, scale_grads=False)
    batches = [feed.batch(step, 0) for step in range(STEPS)]

    def block() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            schedule.step(inputs) if place.rank == 0 else schedule.step(target=targets)
            optimizer.step()

    return block


def fairscales(spec: RunSpec, feed: DataFeed, place: RankContext) -> Block:
    """Pipe on rank 0 alone, with a thread for each stage."""
    if place.rank != 0:
        return lambda: None
    strategy = FairscalePipeStrategy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))

    def block() -> None:
        for step in range(STEPS):
            strategy.step(feed, step)

    return block


def seconds(block: Block) -> float:
    dist.barrier()
    began = time.perf_counter()
    block()
    dist.barrier()
    return time.perf_counter() - began


def peers(rank: int) -> list[dict[str, object]]:
    spec = RunSpec(
        model="resnet18",
        dataset="digits",
        strategy="gpipe",
        batch_size=32,
        micro_batches=4,
        tasks_per_node=2,
        pp_degree=2,
    )
    feed, place = make_feed(spec, CPU), RankContext(rank, 2, CPU)
    _, mine = ours(spec, feed, place)
    rows = []
    for name, make in {"torch's ScheduleGPipe": torchs, "fairscale's Pipe": fairscales}.items():
        pair = (mine, make(spec, feed, place))
        for block in pair:
            block()
        ratios = []
        for number in range(PAIRS):
            times = {block: seconds(block) for block in (pair if number % 2 else pair[::-1])}
            ratios.append(times[pair[0]] / times[pair[1]])
        ratio, low, high = median_interval(ratios)
        rows.append(
            {
                "figure": f"our gpipe over {name}, {PAIRS} pairs of {STEPS} steps, 2 stages, 4 micro-batches",
                "measured": f"{ratio:.4f} [{low:.4f} {high:.4f}]",
                "goal": "at most 1, or an interval that holds 1",
                "met": low <= 1,
            }
        )
    return rows


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = bubbles(rank) if sys.argv[1:] == ["bubbles"] else peers(rank)
    tell(rows)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
