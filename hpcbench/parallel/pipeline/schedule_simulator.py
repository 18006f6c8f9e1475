"""Discrete-event simulation of a pipeline schedule: start and end of every action, also extrapolated for long
schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from hpcbench.parallel.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineLayout,
    schedule_actions,
)


class ActionSpan(NamedTuple):
    """An action and its time, in the unit of the durations."""

    action: Action
    begin: float
    end: float


class ScheduleTimeline(NamedTuple):
    """Per rank its spans, in the order of execution."""

    ranks: list[list[ActionSpan]]

    @property
    def end(self) -> float:
        """When the last rank is done; all begin at 0."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they compute nothing."""
        busy = sum(span.end - span.begin for spans in self.ranks for span in spans)
        return 1.0 - busy / (len(self.ranks) * self.end) if self.end else 0.0


class ActionOrder(NamedTuple):
    """All ranks' actions in an order in which every one finds done what it needs; an entry an action in each list."""

    ranks: list[int]
    actions: list[Action]
    awaited: list[int]
    """Place of the action of another rank that this one waits for; -1 where it waits for none."""
    sent: list[bool]
    """Whether another rank waits for the result."""


def topological_order(ranks: Sequence[Sequence[Action]], layout: PipelineLayout) -> ActionOrder:
    """The actions of all ranks, each rank's in its own order."""
    found = ActionOrder([], [], [], [])
    width = 1 + max((one.micro_batch for own in ranks for one in own), default=0)
    backwards, last = layout.chunks * width, (2 * layout.chunks - 1) * width
    done: dict[int, int] = {}
    waiting: dict[int, int] = {}
    places = [0] * len(ranks)
    ready = list(range(len(ranks) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        own, place = ranks[rank], places[rank]
        while place < len(own):
            kind, chunk, one = action = own[place]
            # What the neighbouring chunk must have done; what the own one has done comes earlier in the own order.
            slot, needed = -1, -1
            if kind == FORWARD:
                slot = chunk * width + one
                needed = slot - width
            elif kind in (BACKWARD, BACKWARD_INPUT):
                slot = backwards + chunk * width + one
                needed = slot + width if slot < last else -1
            other = -1
            if needed >= 0:
                if needed not in done:
                    waiting[needed] = rank
                    break
                other = done[needed]
                if found.ranks[other] == rank:
                    other = -1
                else:
                    found.sent[other] = True
            if slot >= 0:
                done[slot] = len(found.ranks)
                if slot in waiting:
                    ready.append(waiting.pop(slot))
            found.ranks.append(rank)
            found.actions.append(action)
            found.awaited.append(other)
            found.sent.append(False)
            place += 1
        places[rank] = place
    assert all(place == len(own) for place, own in zip(places, ranks, strict=True)), "a schedule that gets stuck"
    return found


def simulate_schedule(
    ranks: list[list[Action]],
    layout: PipelineLayout,
    duration: Callable[[Action], float],
    transfer: Callable[[Action], float] = lambda _: 0.0,
) -> ScheduleTimeline:
    """Every rank does its next action as soon as it is done with the one before and has what the action needs.

    ``transfer`` is the time that the result of an action takes to another rank that waits for it. A rank sends one
    message after another, which costs it no time of its own.
    """
    order = topological_order(ranks, layout)
    found: list[list[ActionSpan]] = [[] for _ in ranks]
    spent = action_times(order, len(ranks), duration, transfer)
    for rank, action, begin, end in zip(order.ranks, order.actions, *spent, strict=True):
        found[rank].append(ActionSpan(action, begin, end))
    return ScheduleTimeline(found)


def action_times(
    order: ActionOrder, ranks: int, duration: Callable[[Action], float], transfer: Callable[[Action], float]
) -> tuple[list[float], list[float]]:
    """When each of the actions of so many ranks begins and ends; see ``walk``."""
    begins: list[float] = []
    ends: list[float] = []
    arrivals: list[float] = []
    free, gone = [0.0] * ranks, [0.0] * ranks
    for rank, action, awaited, is_sent in zip(*order, strict=True):
        begin = free[rank]
        if awaited >= 0 and arrivals[awaited] > begin:
            begin = arrivals[awaited]
        end = arrival = begin + duration(action)
        free[rank] = end
        if is_sent:
            if gone[rank] > end:
                arrival = gone[rank]
            arrival += transfer(action)
            gone[rank] = arrival
        begins.append(begin)
        ends.append(end)
        arrivals.append(arrival)
    return begins, ends


def live_activations(own: Sequence[Action]) -> list[list[Action]]:
    """After each action, the forward passes whose activations are still kept: until ``B``, or ``W`` of a split one."""
    kept: list[Action] = []
    found: list[list[Action]] = []
    for action in own:
        if action.kind == FORWARD:
            kept.append(action)
        elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
            kept.remove(action._replace(kind=FORWARD))
        found.append(list(kept))
    return found


def peak_live_activations(own: Sequence[Action]) -> int:
    """The most forward passes whose activations one rank keeps at the same time."""
    return max((len(kept) for kept in live_activations(own)), default=0)


_MAX_SIMULATED_ACTIONS = 20_000
"""So many actions are walked through as they are."""
_LONG_ROUNDS, _SHORT_ROUNDS = 4, 2
"""Otherwise as many micro-batches as there are stages, so often, and the rest goes on as the second half did."""
_EXACT_ROUNDS = {"model": (2, 1), "gpipe": (2, 1)}
"""What these need for that to be exact."""


class ActionCosts(NamedTuple):
    """What the actions of a schedule take, and their results' ways to another rank; see ``parallel.walk.walk``."""

    duration: Callable[[Action], float]
    transfer: Callable[[Action], float]


class RankTimes(NamedTuple):
    """One rank's way through the schedule."""

    begin: float
    """Of its first action."""
    end: float
    """Of its last one."""
    last: dict[int, tuple[float, float]]
    """By chunk: begin and end of the action after which its gradients are whole."""


def rank_times(
    schedule: str, layout: PipelineLayout, micro_batches: int, prices: Callable[[int], ActionCosts]
) -> list[RankTimes]:
    """Of every rank of the pipeline, by a walk through ``schedule``.

    ``prices`` are asked for the micro-batches of a schedule of so many. A long schedule repeats itself: it is walked
    with fewer micro-batches, twice, and what lies between the two is repeated. Where stages differ, it settles slowly:
    ``tests/parallel/test_course.py`` says how far that is from the whole walk.
    """
    period = lcm(layout.stages, *layout.widths)
    rest = micro_batches % period
    counts = [rounds * period + rest for rounds in _EXACT_ROUNDS.get(schedule, (_LONG_ROUNDS, _SHORT_ROUNDS))]
    if 2 * layout.chunks * micro_batches <= _MAX_SIMULATED_ACTIONS or micro_batches <= counts[0]:
        return _simulated_rank_times(schedule, layout, micro_batches, prices)
    long, short = (_simulated_rank_times(schedule, layout, count, prices) for count in counts)
    repeats = (micro_batches - counts[0]) / (counts[0] - counts[1])
    return [_shifted_times(one, (one.end - other.end) * repeats) for one, other in zip(long, short, strict=True)]


def _simulated_rank_times(
    schedule: str, layout: PipelineLayout, micro_batches: int, prices: Callable[[int], ActionCosts]
) -> list[RankTimes]:
    known = _ordered_schedule(schedule, layout, micro_batches)
    begins, ends = action_times(known.order, layout.ranks, *prices(micro_batches))
    return [
        RankTimes(begins[one.first], ends[one.final], {chunk: (begins[at], ends[at]) for chunk, at in one.last.items()})
        for one in known.ranks
    ]


class _ActionIndices(NamedTuple):
    """Where in the order a rank's first and final action are, and the last of each chunk that makes gradients."""

    first: int
    final: int
    last: dict[int, int]


class _OrderedSchedule(NamedTuple):
    order: ActionOrder
    ranks: list[_ActionIndices]


@lru_cache(maxsize=64)
def _ordered_schedule(schedule: str, layout: PipelineLayout, micro_batches: int) -> _OrderedSchedule:
    order = topological_order(schedule_actions(schedule, layout, micro_batches), layout)
    first, final = [-1] * layout.ranks, [-1] * layout.ranks
    last: list[dict[int, int]] = [{} for _ in range(layout.ranks)]
    for place, (rank, action) in enumerate(zip(order.ranks, order.actions, strict=True)):
        final[rank] = place
        if first[rank] < 0:
            first[rank] = place
        if action.kind in (BACKWARD, BACKWARD_WEIGHT):
            last[rank][action.chunk] = place
    return _OrderedSchedule(order, [_ActionIndices(*one) for one in zip(first, final, last, strict=True)])


def _shifted_times(one: RankTimes, shift: float) -> RankTimes:
    last = {chunk: (begin + shift, end + shift) for chunk, (begin, end) in one.last.items()}
    return RankTimes(one.begin, one.end + shift, last)
