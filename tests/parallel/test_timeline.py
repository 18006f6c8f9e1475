"""The planned step beside a measured one."""

from __future__ import annotations

import pytest

from hpcbench.parallel.schedule import Action, Layout, actions
from hpcbench.parallel.timeline import bubble_fraction, planned
from hpcbench.parallel.walk import Span, walk

LENGTHS = {"F": 1.0, "B": 2.0}


def late(spans: list[Span], begin: float, delay: float) -> list[Span]:
    """From ``begin`` on everything a while later."""
    return [span if span.begin < begin else Span(span[0], span.begin + delay, span.end + delay) for span in spans]


def test_the_plan_has_the_measured_durations_and_none_of_the_waiting() -> None:
    ideal = walk(actions("1f1b", Layout(2), 4), Layout(2), lambda action: LENGTHS[action.kind])
    measured = {rank: late(spans, 2.0, 6.0) for rank, spans in enumerate(ideal.ranks)}
    found = planned("1f1b", Layout(2), 4, measured)
    assert found.ranks == ideal.ranks
    assert bubble_fraction(ideal.ranks) == pytest.approx(1 / 5)
    assert bubble_fraction(list(measured.values())) == pytest.approx(1 - 12 / (15 + 6))


def test_one_slow_action_is_no_plan() -> None:
    spans = walk(actions("gpipe", Layout(1), 3), Layout(1), lambda action: LENGTHS[action.kind]).ranks[0]
    slow = [*spans[:2], Span(spans[2].action, 2.0, 9.0), *(Span(a, b + 6, e + 6) for a, b, e in spans[3:])]
    assert planned("gpipe", Layout(1), 3, {0: slow}).end == 9.0


def test_nothing_was_recorded() -> None:
    assert bubble_fraction([[], []]) is None
    assert bubble_fraction([[Span(Action("F", 0, 0), 1.0, 1.0)]]) is None
