"""A schedule that is too long to be walked through ends when the whole walk would."""

from __future__ import annotations

import pytest

from hpcbench.parallel import course
from hpcbench.parallel.course import Course, Prices, courses
from hpcbench.parallel.schedule import Action, Layout, actions, rank_actions
from hpcbench.parallel.walk import Span, walk

SLOWER = (1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 1.0, 0.7)
"""What the passes through eight chunks take."""


def prices(chunk_times: tuple[float, ...], sent: float) -> Prices:
    units = {"F": 1, "B": 2, "I": 1, "W": 1}
    return Prices(lambda action: units[action.kind] * chunk_times[action.chunk], lambda _: sent)


def ends(
    schedule: str, layout: Layout, count: int, chunk_times: tuple[float, ...], sent: float
) -> tuple[list[float], list[float]]:
    """By the course, and by the whole walk."""
    found = courses(schedule, layout, count, lambda _: prices(chunk_times, sent))
    walked = walk(actions(schedule, layout, count), layout, *prices(chunk_times, sent))
    return [one.end for one in found], [spans[-1].end for spans in walked.ranks]


@pytest.mark.parametrize("sent", [0.0, 0.25])
@pytest.mark.parametrize(
    ("schedule", "layout", "count"),
    [
        ("model", Layout(4), 30),
        ("gpipe", Layout(4), 30),
        ("1f1b", Layout(4), 30),
        ("zero_bubble", Layout(4), 30),
        ("interleaved_1f1b", Layout(4, 2), 32),
        ("1f1b", Layout(2, 1, (2, 1)), 31),
    ],
)
def test_equal_stages_exactly(
    monkeypatch: pytest.MonkeyPatch, schedule: str, layout: Layout, count: int, sent: float
) -> None:
    monkeypatch.setattr(course, "_WALKED", 0)
    found, walked = ends(schedule, layout, count, (1.0,) * 8, sent)
    assert found == pytest.approx(walked)


@pytest.mark.parametrize(
    ("schedule", "layout", "within"),
    [
        ("model", Layout(8), 1e-9),
        ("gpipe", Layout(8), 1e-9),
        ("1f1b", Layout(8), 0.01),
        ("zero_bubble", Layout(8), 0.01),
        ("interleaved_1f1b", Layout(4, 2), 0.02),
    ],
)
def test_unequal_stages_nearly(monkeypatch: pytest.MonkeyPatch, schedule: str, layout: Layout, within: float) -> None:
    monkeypatch.setattr(course, "_WALKED", 0)
    found, walked = ends(schedule, layout, 96, SLOWER, 0.2)
    assert found == pytest.approx(walked, rel=within)


def test_a_short_one_is_walked_through() -> None:
    layout = Layout(2)
    found = courses("1f1b", layout, 3, lambda _: prices((1.0, 1.0), 0.0))
    assert found == [Course(0.0, 12.0, {0: (10.0, 12.0)}), Course(1.0, 10.0, {1: (8.0, 10.0)})]


def test_a_rank_sends_one_message_after_another() -> None:
    """The second forward pass ends at 2, but the first one's result is on its way until 6."""
    spans = walk([[Action("F", 0, 0), Action("F", 0, 1)], [Action("F", 1, 0), Action("F", 1, 1)]], Layout(2), *prices(
        (1.0, 1.0), 5.0
    )).ranks[1]  # fmt: skip
    assert spans == [Span(Action("F", 1, 0), 6.0, 7.0), Span(Action("F", 1, 1), 11.0, 12.0)]


@pytest.mark.parametrize(
    ("schedule", "layout", "count"),
    [
        ("1f1b", Layout(4), 6),
        ("interleaved_1f1b", Layout(4, 2), 6),
        ("interleaved_1f1b", Layout(2, 3), 4),
        ("gpipe", Layout(2, 1, (2, 1)), 3),
        ("pipedream", Layout(3), 2),
    ],
)
def test_one_rank_alone(schedule: str, layout: Layout, count: int) -> None:
    alone = [rank_actions(schedule, layout, rank, count) for rank in range(layout.ranks)]
    assert alone == actions(schedule, layout, count)
