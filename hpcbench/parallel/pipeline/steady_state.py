"""Step time of a pipeline: the maximum cycle ratio of the asynchronous pipeline in steady state, and steps simulated
from measured blocks.
In steady state every action happens once per minibatch, no faster than the slowest cycle of dependencies allows: its
time over the minibatches in flight on it (the maximum cycle mean of a timed event graph, Baccelli et al. 1992).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    PipelineLayout,
    schedule_actions,
)
from hpcbench.parallel.pipeline.stage_partition import BlockCost
from hpcbench.parallel.pipeline.weight_versions import Staleness, stage_actions_over_steps


class StageTimes(NamedTuple):
    """Seconds of one stage for one minibatch."""

    forward_s: float
    backward_s: float
    update_s: float
    """One update, with everything that is waited for before it."""
    forward_send_s: float = 0.0
    """To the next stage."""
    backward_send_s: float = 0.0
    """To the previous stage."""

    @property
    def sends_s(self) -> float:
        """Both messages of a minibatch: they leave one after another."""
        return self.forward_send_s + self.backward_send_s


def steady_step_time_s(stages: Sequence[StageTimes], staleness: Staleness, micro_batches: int) -> float:
    """Return the seconds of ``micro_batches`` minibatches with an update each, or one update with double buffers.

    With fewer micro-batches than stages, double-buffered weights let the pipeline drain: that is simulated.
    """
    if not staleness.double_buffered:
        return micro_batches * max(cycle_s / count for cycle_s, count, _ in dependency_cycles(stages, True))
    if micro_batches >= len(stages):
        slowest_s = max(
            micro_batches * cycle_s / count + stages[first].update_s
            for cycle_s, count, first in dependency_cycles(stages, False)
        )
        return max(slowest_s, micro_batches * max(stage.sends_s for stage in stages))
    return simulated_step_time_s(stages, staleness, micro_batches)


def dependency_cycles(stages: Sequence[StageTimes], with_update: bool) -> list[tuple[float, int, int]]:
    """Return every cycle of dependencies: its seconds, the minibatches in flight on it, and its first stage.

    ::

        forward(s) -> send -> ... -> forward(t) -> backward(t) -> send -> ... -> backward(s) -> update(s) -+
            ^                                                                                              |
            +---------------------------- the next minibatch but t - s of stage s <------------------------+

    Stage s is t - s minibatches ahead of stage t, so that t - s + 1 are in flight on the cycle. A stage alone is a
    cycle (t = s), and so are the messages that it sends.
    """
    cycles = [(stage.sends_s, 1, index) for index, stage in enumerate(stages)] if with_update else []
    for first, stage in enumerate(stages):
        cycle_s = stage.update_s if with_update else 0.0
        for last in range(first, len(stages)):
            cycle_s += stages[last].forward_s + stages[last].backward_s
            if last > first:
                cycle_s += stages[last - 1].forward_send_s + stages[last].backward_send_s
            cycles.append((cycle_s, last - first + 1, first))
    return cycles


def simulated_step_time_s(stages: Sequence[StageTimes], staleness: Staleness, micro_batches: int) -> float:
    """Return ``steady_step_time_s`` from a simulation of enough steps for the pipeline to settle."""
    layout = PipelineLayout(len(stages))
    steps = ceil(2 * layout.stages / micro_batches) + 2
    seconds = {
        FORWARD: [stage.forward_s for stage in stages],
        BACKWARD: [stage.backward_s for stage in stages],
        UPDATE: [stage.update_s for stage in stages],
    }
    sends = {FORWARD: [stage.forward_send_s for stage in stages], BACKWARD: [stage.backward_send_s for stage in stages]}

    def end_s(count: int) -> float:
        _, ends = action_times(
            _order_of_steps(layout, staleness, micro_batches, count),
            layout.ranks,
            lambda action: seconds[action.kind][action.chunk],
            lambda action: sends[action.kind][action.chunk],
        )
        return max(ends)

    return (end_s(2 * steps) - end_s(steps)) / steps


@lru_cache(maxsize=64)
def _order_of_steps(layout: PipelineLayout, staleness: Staleness, micro_batches: int, steps: int) -> ActionOrder:
    """The actions of ``steps`` steps, without forward passes of later ones."""
    ranks = [stage_actions_over_steps(layout, staleness, stage, micro_batches, steps) for stage in range(layout.stages)]
    return topological_order(
        [[action for action in actions if action.micro_batch < steps * micro_batches] for actions in ranks], layout
    )


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
    staleness: Staleness | None = None,
) -> ScheduleStepTime:
    """Return the time of one step of ``schedule``; of an asynchronous one (with ``staleness``) in steady state.

    ``chunks`` are the blocks of each chunk. Both halves of a split backward pass take half its time.
    """
    forward = [sum(block.forward_s for block in blocks) for blocks in chunks]
    backward = [sum(block.backward_s for block in blocks) for blocks in chunks]
    times = [sum(passes) for passes in zip(forward, backward, strict=True)]
    if staleness is None:
        halves = [seconds / 2 for seconds in backward]
        seconds_by_kind = {FORWARD: forward, BACKWARD: backward, BACKWARD_INPUT: halves, BACKWARD_WEIGHT: halves}
        actions = schedule_actions(schedule, layout, micro_batches)
        timeline = simulate_schedule(actions, layout, lambda action: seconds_by_kind[action.kind][action.chunk])
        return ScheduleStepTime(timeline.end, timeline.bubble_fraction, times)
    stages = [StageTimes(*passes, 0.0) for passes in zip(forward, backward, strict=True)]
    step_time_s = steady_step_time_s(stages, staleness, micro_batches)
    busy = sum(times) * micro_batches
    return ScheduleStepTime(step_time_s, 1 - busy / (layout.stages * step_time_s) if step_time_s else 0.0, times)


def planned_timeline(
    schedule: str, layout: PipelineLayout, micro_batches: int, measured: Mapping[int, Sequence[ActionSpan]]
) -> ScheduleTimeline:
    """Simulate the schedule with the median measured time of each kind of action and chunk, and free transfers.

    The difference to the measured step is time spent waiting for messages or lost to variation.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for spans in measured.values():
        for span in spans:
            times.setdefault((span.action.kind, span.action.chunk), []).append(span.end - span.begin)
    medians = {key: median(seconds) for key, seconds in times.items()}
    return simulate_schedule(
        schedule_actions(schedule, layout, micro_batches),
        layout,
        lambda action: medians.get((action.kind, action.chunk), 0.0),
    )
