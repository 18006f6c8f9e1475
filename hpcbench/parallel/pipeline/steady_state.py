"""Step time of a pipeline: the maximum cycle ratio of the asynchronous pipeline in steady state, and steps simulated
from measured blocks.
In steady state every action happens once per minibatch, no faster than the slowest cycle of dependencies allows: its
time over the minibatches in flight on it (the maximum cycle mean of a timed event graph, Baccelli et al. 1992).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import ceil
from statistics import median
from typing import NamedTuple

from hpcbench.parallel.pipeline.schedule_simulator import (
    ActionOrder,
    ActionSpan,
    ScheduleTimeline,
    action_times,
    simulate_schedule,
    topological_order,
)
from hpcbench.parallel.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    UPDATE,
    Action,
    PipelineLayout,
    schedule_actions,
)
from hpcbench.parallel.pipeline.stage_partition import BlockCost
from hpcbench.parallel.pipeline.weight_versions import Staleness, stage_actions_over_steps


class StageTimes(NamedTuple):
    """What one stage does for a minibatch, in seconds."""

    forward_s: float
    backward_s: float
    update_s: float
    """Of one update, with all that is waited for before it."""
    forward_send_s: float = 0.0
    """To the next stage."""
    backward_send_s: float = 0.0
    """To the stage before."""

    @property
    def sends_s(self) -> float:
        """Messages that leave it for one minibatch, one after another."""
        return self.forward_send_s + self.backward_send_s


def steady_step_time_s(stages: Sequence[StageTimes], delay: Staleness, micro_batches: int) -> float:
    """Of ``micro_batches`` minibatches, with an update each or (double buffers) one for all.

    With fewer micro-batches than stages double buffers let the pipeline run dry: that is walked through.
    """
    if not delay.double_buffered:
        return micro_batches * max(circle / count for circle, count, _ in dependency_cycles(stages, True))
    if micro_batches >= len(stages):
        around_s = max(
            micro_batches * circle / count + stages[first].update_s
            for circle, count, first in dependency_cycles(stages, False)
        )
        return max(around_s, micro_batches * max(stage.sends_s for stage in stages))
    return simulated_step_time_s(stages, delay, micro_batches)


def dependency_cycles(stages: Sequence[StageTimes], with_update: bool) -> list[tuple[float, int, int]]:
    """Every circle: its seconds, the minibatches under way on it, and the stage that it begins at.

    Forward from stage s to stage t, back again, and the update of s, after which s begins another minibatch: it is
    t - s ahead of t, so t - s + 1 are under way. A stage alone is a circle, and so are the messages that it sends.
    """
    found = [(stage.sends_s, 1, place) for place, stage in enumerate(stages)] if with_update else []
    for first, stage in enumerate(stages):
        around_s = stage.update_s if with_update else 0.0
        for last in range(first, len(stages)):
            around_s += stages[last].forward_s + stages[last].backward_s
            if last > first:
                around_s += stages[last - 1].forward_send_s + stages[last].backward_send_s
            found.append((around_s, last - first + 1, first))
    return found


def simulated_step_time_s(stages: Sequence[StageTimes], delay: Staleness, micro_batches: int) -> float:
    """As ``steady_step_time_s``, by a walk through enough steps for them to be alike."""
    layout = PipelineLayout(len(stages))
    many = ceil(2 * layout.stages / micro_batches) + 2
    seconds = {
        FORWARD: [stage.forward_s for stage in stages],
        BACKWARD: [stage.backward_s for stage in stages],
        UPDATE: [stage.update_s for stage in stages],
    }
    sends = {FORWARD: [stage.forward_send_s for stage in stages], BACKWARD: [stage.backward_send_s for stage in stages]}

    def duration(action: Action) -> float:
        return seconds[action.kind][action.chunk]

    def transfer(action: Action) -> float:
        return sends[action.kind][action.chunk]

    shorter_s, longer_s = (
        _end_time_s(_order_of_steps(layout, delay, micro_batches, steps), layout, duration, transfer)
        for steps in (many, 2 * many)
    )
    return (longer_s - shorter_s) / many


def _end_time_s(
    order: ActionOrder, layout: PipelineLayout, duration: Callable[[Action], float], transfer: Callable[[Action], float]
) -> float:
    return max(action_times(order, layout.ranks, duration, transfer)[1])


@lru_cache(maxsize=64)
def _order_of_steps(layout: PipelineLayout, delay: Staleness, micro_batches: int, steps: int) -> ActionOrder:
    """What is forwarded of later steps is left out."""
    every = [stage_actions_over_steps(layout, delay, stage, micro_batches, steps) for stage in range(layout.stages)]
    return topological_order([[one for one in own if one.micro_batch < steps * micro_batches] for own in every], layout)


class ScheduleStepTime(NamedTuple):
    """One step of a pipeline, without what communication and updates take."""

    step_time_s: float
    bubble_fraction: float
    stage_times_s: list[float]
    """What each chunk computes for one micro-batch."""


def schedule_step_time(
    schedule: str,
    layout: PipelineLayout,
    micro_batches: int,
    chunks: Sequence[Sequence[BlockCost]],
    delay: Staleness | None = None,
) -> ScheduleStepTime:
    """The step of ``schedule`` with those blocks in each chunk; of ``pipedream`` one of the steady state.

    ``delay`` is pipedream's: two versions of the weights are too few to fill a pipeline that has fewer micro-batches
    in a step than stages. Both halves of a split backward pass count as half of it.
    """
    forward = [sum(block.forward_s for block in blocks) for blocks in chunks]
    backward = [sum(block.backward_s for block in blocks) for blocks in chunks]

    def duration(action: Action) -> float:
        parts = {FORWARD: forward[action.chunk], BACKWARD: backward[action.chunk]}
        halves = {BACKWARD_INPUT: backward[action.chunk] / 2, BACKWARD_WEIGHT: backward[action.chunk] / 2}
        return {**parts, **halves}.get(action.kind, 0.0)

    times = [f + b for f, b in zip(forward, backward, strict=True)]
    if delay is None:
        assert schedule != "pipedream", "an endless schedule without its delay"
        walked = simulate_schedule(schedule_actions(schedule, layout, micro_batches), layout, duration)
        return ScheduleStepTime(walked.end, walked.bubble_fraction, times)
    stages = [StageTimes(f, b, 0.0) for f, b in zip(forward, backward, strict=True)]
    step_time_s = steady_step_time_s(stages, delay, micro_batches)
    busy = sum(times) * micro_batches
    return ScheduleStepTime(step_time_s, 1 - busy / (layout.stages * step_time_s) if step_time_s else 0.0, times)


def planned_timeline(
    schedule: str, layout: PipelineLayout, micro_batches: int, measured: Mapping[int, Sequence[ActionSpan]]
) -> ScheduleTimeline:
    """The schedule with every action as long as its chunk's measured ones of that kind (the median), and transfers
    that cost nothing: what the measured step lacks to it was waited for messages, or for a slower moment."""
    times: dict[tuple[str, int], list[float]] = {}
    for spans in measured.values():
        for span in spans:
            times.setdefault((span.action.kind, span.action.chunk), []).append(span.end - span.begin)
    typical = {key: median(found) for key, found in times.items()}

    def duration(action: Action) -> float:
        return typical.get((action.kind, action.chunk), 0.0)

    return simulate_schedule(schedule_actions(schedule, layout, micro_batches), layout, duration)


def measured_bubble_fraction(ranks: Sequence[Sequence[ActionSpan]]) -> float | None:
    """Share of the ranks' time, from the first action of any to the last's end, in which they compute nothing."""
    spans = [span for own in ranks for span in own]
    if not spans:
        return None
    length = max(span.end for span in spans) - min(span.begin for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    return 1.0 - busy / (len(ranks) * length) if length else None
