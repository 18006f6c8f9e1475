"""The planned step beside a measured one."""

from __future__ import annotations

import pytest

from hpcbench.strategies.pipeline.schedule_simulator import (
    ActionSpan,
    measured_bubble_fraction,
    planned_timeline,
    simulate_schedule,
)
from hpcbench.strategies.pipeline.schedules import Action, PipelineLayout, schedule_actions

LENGTHS = {"F": 1.0, "B": 2.0}


def late(spans: list[ActionSpan], begin: float, delay: float) -> list[ActionSpan]:
    """Shift every action from ``begin`` on."""
    return [span if span.begin < begin else ActionSpan(span[0], span.begin + delay, span.end + delay) for span in spans]


def test_the_plan_has_the_measured_durations_and_none_of_the_waiting() -> None:
    ideal = simulate_schedule(
        schedule_actions("1f1b", PipelineLayout(2), 4), PipelineLayout(2), lambda action: LENGTHS[action.kind]
    )
    measured = {rank: late(spans, 2.0, 6.0) for rank, spans in enumerate(ideal.ranks)}
    found = planned_timeline("1f1b", PipelineLayout(2), 4, measured)
    assert found.ranks == ideal.ranks
    assert measured_bubble_fraction(ideal.ranks) == pytest.approx(1 / 5)
    assert measured_bubble_fraction(list(measured.values())) == pytest.approx(1 - 12 / (15 + 6))


def test_one_slow_action_does_not_slow_the_planned_timeline() -> None:
    spans = simulate_schedule(
        schedule_actions("gpipe", PipelineLayout(1), 3), PipelineLayout(1), lambda action: LENGTHS[action.kind]
    ).ranks[0]
    slow = [*spans[:2], ActionSpan(spans[2].action, 2.0, 9.0), *(ActionSpan(a, b + 6, e + 6) for a, b, e in spans[3:])]
    assert planned_timeline("gpipe", PipelineLayout(1), 3, {0: slow}).end == 9.0


def test_without_recorded_actions_there_is_no_bubble() -> None:
    assert measured_bubble_fraction([[], []]) is None
    assert measured_bubble_fraction([[ActionSpan(Action("F", 0, 0), 1.0, 1.0)]]) is None
