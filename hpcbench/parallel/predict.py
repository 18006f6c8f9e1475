"""How long a pipeline's step takes by the times of its blocks: the schedule itself, walked through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcbench.parallel.partition import ChainBlock
from hpcbench.parallel.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Layout, actions
from hpcbench.parallel.steady import Stage, steady_step_s
from hpcbench.parallel.versions import Delay
from hpcbench.parallel.walk import walk


class StepTime(NamedTuple):
    """One step of a pipeline, without what communication and updates take."""

    step_time_s: float
    bubble_fraction: float
    stage_times_s: list[float]
    """What each chunk computes for one micro-batch."""


def step_time(
    schedule: str,
    layout: Layout,
    micro_batches: int,
    chunks: Sequence[Sequence[ChainBlock]],
    delay: Delay | None = None,
) -> StepTime:
    """The step of ``schedule`` with those blocks in each chunk; of ``pipedream`` one of the steady state.

    ``delay`` is pipedream's: two versions of the weights are too few to fill a pipeline that has fewer micro-batches
    in a step than stages. Both halves of a split backward pass count as half of it.
    """
    forward = [sum(block.forward_s for block in blocks) for blocks in chunks]
    backward = [sum(block.backward_s for block in blocks) for blocks in chunks]

    def duration(action: Action) -> float:
        parts = {FORWARD: forward[action.chunk], BACKWARD: backward[action.chunk]}
        halves = {INPUT: backward[action.chunk] / 2, WEIGHT: backward[action.chunk] / 2}
        return {**parts, **halves}.get(action.kind, 0.0)

    times = [f + b for f, b in zip(forward, backward, strict=True)]
    if delay is None:
        assert schedule != "pipedream", "an endless schedule without its delay"
        walked = walk(actions(schedule, layout, micro_batches), layout, duration)
        return StepTime(walked.end, walked.bubble_fraction, times)
    stages = [Stage(f, b, 0.0) for f, b in zip(forward, backward, strict=True)]
    step_time_s = steady_step_s(stages, delay, micro_batches)
    busy = sum(times) * micro_batches
    return StepTime(step_time_s, 1 - busy / (layout.stages * step_time_s) if step_time_s else 0.0, times)
