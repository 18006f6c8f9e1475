"""A schedule that is too long to be walked through ends when the whole walk would."""

from __future__ import annotations

import pytest

from hpcbench.strategies.pipeline import schedule_simulator
from hpcbench.strategies.pipeline.schedule_simulator import (
    ActionCosts,
    ActionSpan,
    RankTimes,
    rank_times,
    simulate_schedule,
)
from hpcbench.strategies.pipeline.schedules import Action, PipelineLayout, rank_schedule_actions, schedule_actions

SLOWER = (1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 1.0, 0.7)
"""What the passes through eight chunks take."""


def prices(chunk_times: tuple[float, ...], sent: float) -> ActionCosts:
    units = {"F": 1, "B": 2, "I": 1, "W": 1}
    return ActionCosts(lambda action: units[action.kind] * chunk_times[action.chunk], lambda _: sent)


def ends(
    schedule: str, layout: PipelineLayout, count: int, chunk_times: tuple[float, ...], sent: float
) -> tuple[list[float], list[float]]:
    """Return the ends by extrapolation and by the whole simulation."""
    found = rank_times(schedule, layout, count, lambda _: prices(chunk_times, sent))
    walked = simulate_schedule(schedule_actions(schedule, layout, count), layout, *prices(chunk_times, sent))
    return [one.end for one in found], [spans[-1].end for spans in walked.ranks]


@pytest.mark.parametrize("sent", [0.0, 0.25])
@pytest.mark.parametrize(
    ("schedule", "layout", "count"),
    [
        ("model", PipelineLayout(4), 30),
        ("gpipe", PipelineLayout(4), 30),
        ("1f1b", PipelineLayout(4), 30),
        ("zero_bubble", PipelineLayout(4), 30),
        ("interleaved_1f1b", PipelineLayout(4, 2), 32),
        ("1f1b", PipelineLayout(2, 1, (2, 1)), 31),
    ],
)
def test_extrapolated_ends_of_equal_stages_are_exact(
    monkeypatch: pytest.MonkeyPatch, schedule: str, layout: PipelineLayout, count: int, sent: float
) -> None:
    monkeypatch.setattr(schedule_simulator, "_MAX_SIMULATED_ACTIONS", 0)
    found, walked = ends(schedule, layout, count, (1.0,) * 8, sent)
    assert found == pytest.approx(walked)


@pytest.mark.parametrize(
    ("schedule", "layout", "within"),
    [
        ("model", PipelineLayout(8), 1e-9),
        ("gpipe", PipelineLayout(8), 1e-9),
        ("1f1b", PipelineLayout(8), 0.01),
        ("zero_bubble", PipelineLayout(8), 0.01),
        ("interleaved_1f1b", PipelineLayout(4, 2), 0.02),
    ],
)
def test_extrapolated_ends_of_unequal_stages_are_within_the_bound(
    monkeypatch: pytest.MonkeyPatch, schedule: str, layout: PipelineLayout, within: float
) -> None:
    monkeypatch.setattr(schedule_simulator, "_MAX_SIMULATED_ACTIONS", 0)
    found, walked = ends(schedule, layout, 96, SLOWER, 0.2)
    assert found == pytest.approx(walked, rel=within)


def test_a_short_schedule_is_simulated_action_by_action() -> None:
    layout = PipelineLayout(2)
    found = rank_times("1f1b", layout, 3, lambda _: prices((1.0, 1.0), 0.0))
    assert found == [RankTimes(0.0, 12.0, {0: (10.0, 12.0)}), RankTimes(1.0, 10.0, {1: (8.0, 10.0)})]


def test_a_rank_sends_one_message_after_another() -> None:
    """The second forward pass ends at 2, but the first one's result is on its way until 6."""
    spans = simulate_schedule([[Action("F", 0, 0), Action("F", 0, 1)], [Action("F", 1, 0), Action("F", 1, 1)]], PipelineLayout(2), *prices(
        (1.0, 1.0), 5.0
    )).ranks[1]  # fmt: skip
    assert spans == [ActionSpan(Action("F", 1, 0), 6.0, 7.0), ActionSpan(Action("F", 1, 1), 11.0, 12.0)]


@pytest.mark.parametrize(
    ("schedule", "layout", "count"),
    [
        ("1f1b", PipelineLayout(4), 6),
        ("interleaved_1f1b", PipelineLayout(4, 2), 6),
        ("interleaved_1f1b", PipelineLayout(2, 3), 4),
        ("gpipe", PipelineLayout(2, 1, (2, 1)), 3),
        ("pipedream", PipelineLayout(3), 2),
    ],
)
def test_the_actions_of_one_rank_equal_those_of_the_whole_schedule(
    schedule: str, layout: PipelineLayout, count: int
) -> None:
    alone = [rank_schedule_actions(schedule, layout, rank, count) for rank in range(layout.ranks)]
    assert alone == schedule_actions(schedule, layout, count)
