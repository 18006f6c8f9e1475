"""Pipeline schedules: complete, executable, and with exactly the bubbles that their papers say."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcbench.strategies.pipeline.schedule_simulator import simulate_schedule
from hpcbench.strategies.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    UPDATE,
    Action,
    PipelineLayout,
    deadlocked_actions,
    pipedream_window,
    schedule_actions,
    warmup_forwards,
)

UNITS = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1, UPDATE: 0}
"""A whole backward costs two forwards, its halves one each."""


def unit(action: Action) -> float:
    return UNITS[action.kind]


def live_activations(actions: list[Action]) -> list[list[Action]]:
    """After each action, the forward passes whose activations are still kept: until ``B``, or ``W`` of a split one."""
    live: list[Action] = []
    history: list[list[Action]] = []
    for action in actions:
        if action.kind == FORWARD:
            live.append(action)
        elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
            live.remove(action._replace(kind=FORWARD))
        history.append(list(live))
    return history


def drawn(ranks: list[list[Action]]) -> list[str]:
    return [" ".join(f"{kind}{chunk}.{one}" for kind, chunk, one in own) for own in ranks]


def test_the_actions_of_gpipe_are_literal() -> None:
    assert drawn(schedule_actions("gpipe", PipelineLayout(2), 3)) == [
        "F0.0 F0.1 F0.2 B0.2 B0.1 B0.0",
        "F1.0 F1.1 F1.2 B1.2 B1.1 B1.0",
    ]


def test_the_actions_of_1f1b_are_literal() -> None:
    assert drawn(schedule_actions("1f1b", PipelineLayout(3), 3)) == [
        "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2",
        "F1.0 F1.1 B1.0 F1.2 B1.1 B1.2",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2",
    ]


def test_the_actions_of_interleaved_1f1b_are_those_of_its_paper() -> None:
    """Figure 4 of Narayanan et al. 2021 with two stages of two chunks."""
    assert drawn(schedule_actions("interleaved_1f1b", PipelineLayout(2, 2), 4)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_the_actions_of_zero_bubble_are_literal() -> None:
    assert drawn(schedule_actions("zero_bubble", PipelineLayout(2), 3)) == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]


def test_pipedream_runs_across_windows() -> None:
    """The first stage is always two forward passes before its backward passes; the last one never."""
    first, steady, last = (
        [pipedream_window(PipelineLayout(3), rank, 2, *edges) for rank in (0, 2)]
        for edges in ((True, False), (False, False), (False, True))
    )
    assert drawn(first) == ["F0.0 F0.1 F0.2 B0.0 U0.0 F0.3 B0.1 U0.1", "F2.0 B2.0 U2.0 F2.1 B2.1 U2.1"]
    assert drawn(steady) == ["F0.2 B0.0 U0.0 F0.3 B0.1 U0.1", "F2.0 B2.0 U2.0 F2.1 B2.1 U2.1"]
    assert drawn(last) == ["B0.0 U0.0 B0.1 U0.1", "F2.0 B2.0 U2.0 F2.1 B2.1 U2.1"]
    assert [warmup_forwards(PipelineLayout(3), rank) for rank in range(3)] == [2, 1, 0]


BUBBLES = [
    ("gpipe", 2, 1, 1, Fraction(1, 2)),
    ("gpipe", 4, 1, 8, Fraction(3, 11)),
    ("gpipe", 8, 1, 16, Fraction(7, 23)),
    ("1f1b", 2, 1, 1, Fraction(1, 2)),
    ("1f1b", 4, 1, 8, Fraction(3, 11)),
    ("1f1b", 8, 1, 16, Fraction(7, 23)),
    ("interleaved_1f1b", 2, 2, 4, Fraction(1, 9)),
    ("interleaved_1f1b", 4, 2, 8, Fraction(3, 19)),
    ("interleaved_1f1b", 4, 3, 4, Fraction(3, 15)),
    ("interleaved_1f1b", 8, 2, 16, Fraction(7, 39)),
    ("zero_bubble", 2, 1, 4, Fraction(1, 13)),
    ("zero_bubble", 4, 1, 8, Fraction(3, 27)),
    ("zero_bubble", 8, 1, 16, Fraction(7, 55)),
]
"""Schedule, stages, virtual stages, micro-batches: (p-1)/(m+p-1), (p-1)/(vm+p-1), and (p-1)/(3m+p-1) of ZB-H1."""


@pytest.mark.parametrize(("schedule", "stages", "virtual", "micro_batches", "bubble"), BUBBLES)
def test_a_schedule_has_exactly_the_bubble_of_its_paper(
    schedule: str, stages: int, virtual: int, micro_batches: int, bubble: Fraction
) -> None:
    layout = PipelineLayout(stages, virtual)
    found = simulate_schedule(schedule_actions(schedule, layout, micro_batches), layout, unit)
    busy = sum(int(span.end - span.begin) for spans in found.ranks for span in spans)
    assert 1 - Fraction(busy, stages * int(found.end)) == bubble
    assert found.bubble_fraction == pytest.approx(float(bubble))


@pytest.mark.parametrize(
    ("schedule", "virtual", "peaks"),
    [
        ("gpipe", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("zero_bubble", 1, [4, 4, 4, 4]),
        ("interleaved_1f1b", 2, [11, 9, 7, 5]),
    ],
)
def test_a_stage_keeps_as_many_micro_batches_as_the_table(schedule: str, virtual: int, peaks: list[int]) -> None:
    """Eight micro-batches on four stages; an interleaved chunk is half as large."""
    layout = PipelineLayout(4, virtual)
    assert [max(map(len, live_activations(own))) for own in schedule_actions(schedule, layout, 8)] == peaks


def test_a_transfer_delays_the_rank_that_waits_for_it() -> None:
    layout = PipelineLayout(2)
    found = simulate_schedule(schedule_actions("gpipe", layout, 1), layout, unit, lambda _: 0.5)
    assert [[(span.begin, span.end) for span in spans] for spans in found.ranks] == [
        [(0, 1), (5, 7)],
        [(1.5, 2.5), (2.5, 4.5)],
    ]


@st.composite
def drawings(draw: st.DrawFn) -> tuple[str, PipelineLayout, int]:
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "pipedream"]))
    stages, micro_batches = draw(st.integers(1, 8)), draw(st.integers(1, 16))
    virtual = draw(st.integers(1, 4)) if schedule == "interleaved_1f1b" else 1
    uneven = schedule in ("gpipe", "1f1b", "pipedream") and draw(st.booleans())
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))) if uneven else ()
    return schedule, PipelineLayout(stages, virtual, replicas), micro_batches


@settings(max_examples=200, deadline=None)
@given(drawings())
def test_every_schedule_is_complete_and_cannot_get_stuck(drawing: tuple[str, PipelineLayout, int]) -> None:
    schedule, layout, micro_batches = drawing
    ranks = schedule_actions(schedule, layout, micro_batches)
    backwards = [BACKWARD_INPUT, BACKWARD_WEIGHT] if schedule == "zero_bubble" else [BACKWARD]
    updates = [UPDATE] if schedule == "pipedream" else []
    for rank, own in enumerate(ranks):
        assert sorted(own) == sorted(
            Action(kind, chunk, one)
            for kind in [FORWARD, *backwards, *updates]
            for chunk in layout.chunks_of(rank)
            for one in layout.micro_batches_of(rank, micro_batches)
        )
        assert not live_activations(own) or live_activations(own)[-1] == []
    assert deadlocked_actions(ranks, layout) == []


def test_a_schedule_that_waits_for_itself_is_found() -> None:
    layout = PipelineLayout(2)
    first, second = schedule_actions("1f1b", layout, 2)
    wrong = [first, [second[1], second[0], *second[2:]]]
    assert deadlocked_actions(wrong, layout) == [Action(BACKWARD, 0, 0), Action(BACKWARD, 1, 0)]


def test_micro_batches_go_round_the_replicas_of_a_stage() -> None:
    layout = PipelineLayout(3, replicas=(2, 1, 1))
    assert [layout.stage_of(rank) for rank in range(4)] == [0, 0, 1, 2]
    assert drawn(schedule_actions("gpipe", layout, 3)) == [
        "F0.0 F0.2 B0.2 B0.0",
        "F0.1 B0.1",
        "F1.0 F1.1 F1.2 B1.2 B1.1 B1.0",
        "F2.0 F2.1 F2.2 B2.2 B2.1 B2.0",
    ]
    assert [warmup_forwards(layout, layout.stage_of(rank)) for rank in range(4)] == [1, 1, 1, 0]
