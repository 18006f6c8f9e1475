"""The gain of an asynchronous pipeline: blocks of steps of pipedream and of gpipe in turn, in the same processes.

Both take the same micro-batches through the same stages; a pair is one block of each, and the order within a pair
changes from pair to pair. gpipe waits p - 1 of m + p - 1 units, pipedream none, so the ratio of their times should be
that of their schedules. A block of pipedream's ends once all stages before the last have gone backward too, which in a
long run overlaps with what follows: that is in the expected ratio. Stages that sleep for a fixed time show the
schedules alone, with any number of ranks; the network is real work and needs a core per rank. Rank 0 prints one line
of JSON.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ratios import median_interval
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.pipeline.schedule_simulator import schedule_step_time
from hpcbench.strategies.pipeline.schedules import PipelineLayout
from hpcbench.strategies.pipeline.stage_partition import parse_cuts
from hpcbench.strategies.pipeline.weight_versions import Staleness
from hpcbench.worker.block_times import profile_blocks
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_meta_model, build_model
from hpcbench.worker.strategy import resolve_runtime

PAIRS = 8
STEPS = 4
SLEEP_S = 0.05
"""Of a forward pass; a backward pass takes twice as long."""
GOAL = 1.05
CPU = torch.device("cpu")


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(2 * SLEEP_S)
        return gradients[0]


class Sleeping(nn.Module):
    """A stage of a fixed length."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Asleep.apply(self.linear(x.flatten(1)))  # type: ignore[no-untyped-call]
        return y


def seconds(block: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    block()
    dist.barrier()
    return time.perf_counter() - began


def block_of(spec: RunSpec, model: nn.Sequential, place: RankContext) -> Callable[[], None]:
    strategy, feed = resolve_runtime(spec.strategy)(), make_feed(spec, CPU)
    strategy.setup(model, spec, place)
    done = 0

    def block() -> None:
        nonlocal done
        for _ in range(STEPS):
            strategy.step(feed, done)
            done += 1

    return block


def ratio_of(build: Callable[[], nn.Sequential], place: RankContext, **given: Any) -> tuple[float, float, float]:
    """pipedream's time over gpipe's."""
    blocks = []
    for strategy in ("pipedream", "gpipe"):
        spec = RunSpec(
            strategy=strategy, tasks_per_node=place.world_size, pp_degree=place.world_size, learning_rate=1e-4, **given
        )
        blocks.append(block_of(spec, build(), place))
        blocks[-1]()
    ratios = []
    for number in range(PAIRS):
        times = {block: seconds(block) for block in (blocks if number % 2 else blocks[::-1])}
        ratios.append(times[blocks[0]] / times[blocks[1]])
    return median_interval(ratios)


def row(what: str, expected: float, found: tuple[float, float, float]) -> dict[str, object]:
    return {
        "figure": f"pipedream's time over gpipe's, {what}, {PAIRS} pairs of {STEPS} steps",
        "measured": f"{found[0]:.3f} [{found[1]:.3f} {found[2]:.3f}]",
        "goal": f"{expected:.3f}, at most 5 % above",
        "met": found[0] <= GOAL * expected,
    }


def sleeping(place: RankContext, micro_batches: int) -> dict[str, object]:
    stages = place.world_size
    found = ratio_of(
        lambda: nn.Sequential(Sleeping(64), *(Sleeping(10) for _ in range(stages - 1))),
        place,
        model="vgg11", dataset="digits", batch_size=4 * micro_batches, micro_batches=micro_batches,
        options={"cuts": ",".join(map(str, range(1, stages)))},
    )  # fmt: skip
    # In forward passes: 3 per micro-batch, and 2 for each stage that goes backward behind the last one.
    ours = 3 * micro_batches * STEPS + 2 * (stages - 1)
    expected = ours / (3 * (micro_batches + stages - 1) * STEPS)
    return row(f"stages of fixed sleep, p = {stages}, m = {micro_batches}", expected, found)


def network(place: RankContext, micro_batches: int) -> dict[str, object]:
    """The expected ratio is that of the schedules with measured blocks, so what uneven stages cost is in it."""
    given: dict[str, Any] = {
        "model": "vgg11", "dataset": "cifar10", "batch_size": 16 * micro_batches, "micro_batches": micro_batches,
        "options": {"cuts": "6"},
    }  # fmt: skip
    spec = RunSpec(strategy="gpipe", tasks_per_node=2, pp_degree=2, **given)
    said: list[Any] = [
        profile_blocks(spec, CPU, build_meta_model(spec), refresh=True).blocks if place.rank == 0 else None
    ]
    dist.broadcast_object_list(said)
    (cut,) = parse_cuts("6") or (0,)
    chunks = [said[0][:cut], said[0][cut:]]
    predicted = [
        schedule_step_time(key, PipelineLayout(2), micro_batches, chunks, delay).step_time_s
        for key, delay in (("pipedream", Staleness(2)), ("gpipe", None))
    ]
    found = ratio_of(lambda: build_model(spec), place, **given)
    behind = sum(block.backward_s for block in chunks[0])
    expected = (predicted[0] * STEPS + behind) / (predicted[1] * STEPS)
    return row(f"vgg11 on cifar10, p = 2, m = {micro_batches}", expected, found)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = RankContext(dist.get_rank(), dist.get_world_size(), CPU)
    rows = [sleeping(place, micro_batches) for micro_batches in (1, 2, 4)]
    if place.world_size == 2:
        rows += [network(place, 2)]
    if place.rank == 0:
        print(json.dumps(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
