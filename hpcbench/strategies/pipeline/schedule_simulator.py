"""Step times of pipelines: discrete-event simulation of a schedule, extrapolated for long ones, and the steady state of
the asynchronous pipeline.

In steady state every action happens once per minibatch, no faster than the slowest cycle of dependencies allows: its
time over the minibatches in flight on it (the maximum cycle mean of a timed event graph, Baccelli et al. 1992).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import ceil, lcm
from statistics import median
from typing import NamedTuple

from hpcbench.strategies.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SCHEDULES,
    UPDATE,
    Action,
    PipelineLayout,
    schedule_actions,
)
from hpcbench.strategies.pipeline.stage_partition import BlockTimes
from hpcbench.strategies.pipeline.weight_versions import Staleness, stage_actions_over_steps


class ActionSpan(NamedTuple):
    """An action and its time, in the unit of the durations."""

    action: Action
    begin: float
    end: float


class ScheduleTimeline(NamedTuple):
    """The spans of every rank, in the order of execution."""

    ranks: list[list[ActionSpan]]

    @property
    def end(self) -> float:
        """End of the last action; the first one begins at 0."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        return measured_bubble_fraction(self.ranks) or 0.0


def measured_bubble_fraction(ranks: Sequence[Sequence[ActionSpan]]) -> float | None:
    """Idle share of all ranks' time between the first action's begin and the last one's end; ``None`` without any."""
    spans = [span for rank_spans in ranks for span in rank_spans]
    if not spans:
        return None
    length = max(span.end for span in spans) - min(span.begin for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    return 1.0 - busy / (len(ranks) * length) if length else None


class ActionOrder(NamedTuple):
    """The actions of all ranks, every dependency before its action; each list has an entry per action.

    For ``gpipe`` on two ranks with one micro-batch::

        position              0        1        2        3
        ranks                 0        1        1        0
        actions             F(0, 0)  F(1, 0)  B(1, 0)  B(0, 0)
        dependencies         -1        0       -1        2
        has_remote_consumer  True    False     True    False
    """

    ranks: list[int]
    actions: list[Action]
    dependencies: list[int]
    """Position of the action of another rank that this one waits for, or -1."""
    has_remote_consumer: list[bool]
    """Whether another rank waits for the result."""


def topological_order(ranks: Sequence[Sequence[Action]], layout: PipelineLayout) -> ActionOrder:
    """Merge the ranks' lists of actions, keeping the order of each. ``AssertionError`` if they deadlock.

    A forward or backward pass has a slot, ``chunk * width + micro_batch`` (backward passes after all forward passes):
    the slot that it waits for is one ``width`` lower or higher, that of the same micro-batch in the next chunk.
    """
    order = ActionOrder([], [], [], [])
    width = 1 + max((action.micro_batch for actions in ranks for action in actions), default=0)
    first_backward, last_chunk_backward = layout.chunks * width, (2 * layout.chunks - 1) * width
    positions_by_slot: dict[int, int] = {}
    waiting_ranks: dict[int, int] = {}
    next_action = [0] * len(ranks)
    ready = list(range(len(ranks) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        actions, index = ranks[rank], next_action[rank]
        while index < len(actions):
            kind, chunk, micro_batch = action = actions[index]
            # Only the neighbouring chunk is looked at: actions of the own chunk come earlier in the rank's list.
            slot, needed = -1, -1
            if kind == FORWARD:
                slot = chunk * width + micro_batch
                needed = slot - width
            elif kind in (BACKWARD, BACKWARD_INPUT):
                slot = first_backward + chunk * width + micro_batch
                needed = slot + width if slot < last_chunk_backward else -1
            dependency = -1
            if needed >= 0:
                if needed not in positions_by_slot:
                    waiting_ranks[needed] = rank
                    break
                dependency = positions_by_slot[needed]
                if order.ranks[dependency] == rank:
                    dependency = -1
                else:
                    order.has_remote_consumer[dependency] = True
            if slot >= 0:
                positions_by_slot[slot] = len(order.ranks)
                if slot in waiting_ranks:
                    ready.append(waiting_ranks.pop(slot))
            order.ranks.append(rank)
            order.actions.append(action)
            order.dependencies.append(dependency)
            order.has_remote_consumer.append(False)
            index += 1
        next_action[rank] = index
    assert next_action == [len(actions) for actions in ranks], "a schedule that gets stuck"
    return order


def simulate_schedule(
    ranks: list[list[Action]],
    layout: PipelineLayout,
    duration: Callable[[Action], float],
    transfer: Callable[[Action], float] = lambda _: 0.0,
) -> ScheduleTimeline:
    """Execute every rank's actions in order, each as soon as the previous one and the action's dependency are done.

    ``transfer`` is the time until the result of an action reaches another rank that waits for it. A rank sends one
    message after another, which takes none of its computing time.
    """
    order = topological_order(ranks, layout)
    timeline = ScheduleTimeline([[] for _ in ranks])
    times = action_times(order, len(ranks), duration, transfer)
    for rank, action, begin, end in zip(order.ranks, order.actions, *times, strict=True):
        timeline.ranks[rank].append(ActionSpan(action, begin, end))
    return timeline


def action_times(
    order: ActionOrder,
    ranks: int,
    duration: Callable[[Action], float],
    transfer: Callable[[Action], float],
) -> tuple[list[float], list[float]]:
    """Return begin and end of every action of ``order``; see ``simulate_schedule``."""
    begins: list[float] = []
    ends: list[float] = []
    arrivals: list[float] = []
    rank_free, link_free = [0.0] * ranks, [0.0] * ranks
    for rank, action, dependency, is_sent in zip(*order, strict=True):
        begin = rank_free[rank]
        if dependency >= 0 and arrivals[dependency] > begin:
            begin = arrivals[dependency]
        end = arrival = begin + duration(action)
        rank_free[rank] = end
        if is_sent:
            if link_free[rank] > end:
                arrival = link_free[rank]
            arrival += transfer(action)
            link_free[rank] = arrival
        begins.append(begin)
        ends.append(end)
        arrivals.append(arrival)
    return begins, ends


_MAX_SIMULATED_ACTIONS = 20_000
"""Longer schedules are extrapolated."""


class ActionCosts(NamedTuple):
    """Durations of the actions of a schedule and of sending their results; see ``simulate_schedule``."""

    duration: Callable[[Action], float]
    transfer: Callable[[Action], float]


class RankTimes(NamedTuple):
    """Begin of a rank's first action and end of its last one."""

    begin: float
    end: float
    gradients_done: dict[int, tuple[float, float]]
    """Begin and end, by chunk, of the action that completes its gradients."""


def rank_times(
    schedule: str, layout: PipelineLayout, micro_batches: int, costs: Callable[[int], ActionCosts]
) -> list[RankTimes]:
    """Simulate ``schedule`` and return the times of every rank of the pipeline.

    ``costs(n)`` are the costs in a schedule of ``n`` micro-batches. A long schedule is periodic: two shorter ones are
    simulated, and the difference between their ends is repeated. With unequal stages the periodic state is reached
    slowly; ``tests/strategies/test_long_schedules.py`` bounds the error.
    """
    period = lcm(layout.stages, *layout.stage_sizes)
    counts = [rounds * period + micro_batches % period for rounds in SCHEDULES[schedule].extrapolation_rounds]
    if 2 * layout.chunks * micro_batches <= _MAX_SIMULATED_ACTIONS or micro_batches <= counts[0]:
        return _simulated_rank_times(schedule, layout, micro_batches, costs)
    long, short = (_simulated_rank_times(schedule, layout, count, costs) for count in counts)
    repeats = (micro_batches - counts[0]) / (counts[0] - counts[1])
    extrapolated = []
    for times, shorter in zip(long, short, strict=True):
        shift = (times.end - shorter.end) * repeats
        done = {chunk: (begin + shift, end + shift) for chunk, (begin, end) in times.gradients_done.items()}
        extrapolated.append(RankTimes(times.begin, times.end + shift, done))
    return extrapolated


def _simulated_rank_times(
    schedule: str, layout: PipelineLayout, micro_batches: int, costs: Callable[[int], ActionCosts]
) -> list[RankTimes]:
    order, positions = _ordered_schedule(schedule, layout, micro_batches)
    begins, ends = action_times(order, layout.ranks, *costs(micro_batches))
    return [
        RankTimes(
            begins[first], ends[last], {chunk: (begins[index], ends[index]) for chunk, index in completing.items()}
        )
        for first, last, completing in positions
    ]


@lru_cache(maxsize=64)
def _ordered_schedule(
    schedule: str, layout: PipelineLayout, micro_batches: int
) -> tuple[ActionOrder, list[tuple[int, int, dict[int, int]]]]:
    """The order, and per rank the positions of its first and last action and of those that complete gradients."""
    order = topological_order(schedule_actions(schedule, layout, micro_batches), layout)
    first, last = [-1] * layout.ranks, [-1] * layout.ranks
    completing: list[dict[int, int]] = [{} for _ in range(layout.ranks)]
    for position, (rank, action) in enumerate(zip(order.ranks, order.actions, strict=True)):
        last[rank] = position
        if first[rank] < 0:
            first[rank] = position
        if action.kind in (BACKWARD, BACKWARD_WEIGHT):
            completing[rank][action.chunk] = position
    return order, list(zip(first, last, completing, strict=True))


class StageTimes(NamedTuple):
    """Seconds of one stage for one minibatch."""

    forward_s: float
    backward_s: float
    update_s: float
    """Seconds of an update, including the calls that it waits for."""
    forward_send_s: float = 0.0
    """Seconds of the message to the next stage."""
    backward_send_s: float = 0.0
    """Seconds of the message to the previous stage."""

    @property
    def sends_s(self) -> float:
        """Seconds of both messages of a minibatch, one after another."""
        return self.forward_send_s + self.backward_send_s


def steady_step_time_s(
    stages: Sequence[StageTimes],
    staleness: Staleness,
    micro_batches: int,
) -> float:
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


def simulated_step_time_s(
    stages: Sequence[StageTimes],
    staleness: Staleness,
    micro_batches: int,
) -> float:
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
    """The times of a step of a pipeline, without communication and updates."""

    step_time_s: float
    bubble_fraction: float
    stage_times_s: list[float]
    """Computation time of each chunk for one micro-batch."""


def schedule_step_time(
    schedule: str,
    layout: PipelineLayout,
    micro_batches: int,
    chunks: Sequence[Sequence[BlockTimes]],
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
