"""When each rank of a pipeline begins and ends, also of schedules that are too long to be walked through."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from hpcbench.parallel.schedule import BACKWARD, WEIGHT, Action, Layout, actions
from hpcbench.parallel.walk import Order, in_order, times

_WALKED = 20_000
"""So many actions are walked through as they are."""
_LONG, _SHORT = 4, 2
"""Otherwise as many micro-batches as there are stages, so often, and the rest goes on as the second half did."""
_SETTLED = {"model": (2, 1), "gpipe": (2, 1)}
"""What these need for that to be exact."""


class Prices(NamedTuple):
    """What the actions of a schedule take, and their results' ways to another rank; see ``parallel.walk.walk``."""

    duration: Callable[[Action], float]
    transfer: Callable[[Action], float]


class Course(NamedTuple):
    """One rank's way through the schedule."""

    begin: float
    """Of its first action."""
    end: float
    """Of its last one."""
    last: dict[int, tuple[float, float]]
    """By chunk: begin and end of the action after which its gradients are whole."""


def courses(schedule: str, layout: Layout, micro_batches: int, prices: Callable[[int], Prices]) -> list[Course]:
    """Of every rank of the pipeline, by a walk through ``schedule``.

    ``prices`` are asked for the micro-batches of a schedule of so many. A long schedule repeats itself: it is walked
    with fewer micro-batches, twice, and what lies between the two is repeated. Where stages differ, it settles slowly:
    ``tests/parallel/test_course.py`` says how far that is from the whole walk.
    """
    period = lcm(layout.stages, *layout.widths)
    rest = micro_batches % period
    counts = [rounds * period + rest for rounds in _SETTLED.get(schedule, (_LONG, _SHORT))]
    if 2 * layout.chunks * micro_batches <= _WALKED or micro_batches <= counts[0]:
        return _walked(schedule, layout, micro_batches, prices)
    long, short = (_walked(schedule, layout, count, prices) for count in counts)
    repeats = (micro_batches - counts[0]) / (counts[0] - counts[1])
    return [_later(one, (one.end - other.end) * repeats) for one, other in zip(long, short, strict=True)]


def _walked(schedule: str, layout: Layout, micro_batches: int, prices: Callable[[int], Prices]) -> list[Course]:
    known = _ordered(schedule, layout, micro_batches)
    begins, ends = times(known.order, layout.ranks, *prices(micro_batches))
    return [
        Course(begins[one.first], ends[one.final], {chunk: (begins[at], ends[at]) for chunk, at in one.last.items()})
        for one in known.ranks
    ]


class _Places(NamedTuple):
    """Where in the order a rank's first and final action are, and the last of each chunk that makes gradients."""

    first: int
    final: int
    last: dict[int, int]


class _Known(NamedTuple):
    order: Order
    ranks: list[_Places]


@lru_cache(maxsize=64)
def _ordered(schedule: str, layout: Layout, micro_batches: int) -> _Known:
    order = in_order(actions(schedule, layout, micro_batches), layout)
    first, final = [-1] * layout.ranks, [-1] * layout.ranks
    last: list[dict[int, int]] = [{} for _ in range(layout.ranks)]
    for place, (rank, action) in enumerate(zip(order.ranks, order.actions, strict=True)):
        final[rank] = place
        if first[rank] < 0:
            first[rank] = place
        if action.kind in (BACKWARD, WEIGHT):
            last[rank][action.chunk] = place
    return _Known(order, [_Places(*one) for one in zip(first, final, last, strict=True)])


def _later(one: Course, shift: float) -> Course:
    last = {chunk: (begin + shift, end + shift) for chunk, (begin, end) in one.last.items()}
    return Course(one.begin, one.end + shift, last)
