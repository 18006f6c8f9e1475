"""Steps of a few events, by hand."""

from __future__ import annotations

import pytest

from hpcbench.oracle.streams import Busy, Call, Compute, Event, Repeat, Wait, run


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], Busy(0, 0, 0, 0, 0)),
        ([Compute(2), Compute(3)], Busy(5, 5, 0, 0, 0)),
        ([Compute(2), Call(3, 1)], Busy(5, 2, 3, 3, 1)),
        # Hidden, half hidden, and one behind the other.
        ([Compute(1), Call(2, 0, "a"), Compute(4), Wait("a")], Busy(5, 5, 2, 0, 0)),
        ([Compute(1), Call(4, 0, "a"), Compute(2), Wait("a")], Busy(5, 3, 4, 2, 0)),
        ([Call(2, 0, "a"), Call(2, 0, "b"), Wait("a"), Compute(1), Wait()], Busy(4, 1, 4, 3, 0)),
        # The last call of a name counts; a name that nobody called is not waited for.
        ([Call(1, 0, "a"), Call(1, 0, "a"), Wait("a"), Wait("b")], Busy(2, 0, 2, 2, 0)),
    ],
)
def test_a_step(events: list[Event], expected: Busy) -> None:
    assert run(events) == expected


def test_computation_under_communication_is_slower() -> None:
    assert run([Call(4, 0, "a"), Compute(1), Wait()], slowdown=2).compute_s == 2
    # 4 s of communication cover 2 s of what is computed.
    assert run([Call(4, 0, "a"), Compute(3)], slowdown=2).end_s == 5


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # Of two lanes on wires of their own neither waits for the other.
        ([Call(4, 0, "a", "x", "in"), Call(1, 0, None, "y", "out"), Wait()], Busy(4, 0, 4, 4, 0)),
        ([Call(2, 1, "a", "x", "in"), Compute(1), Call(4, 2, None, "y", "out")], Busy(5, 1, 5, 4, 2.5)),
        # On one wire the short call takes twice its time, and the long one both.
        ([Call(4, 0, "a", "x", "in"), Call(1, 0, None, "y", "in")], Busy(2, 0, 5, 2, 0)),
        ([Call(4, 0, "a", "x", "in"), Call(1, 0, None, "y", "in"), Wait("a")], Busy(5, 0, 5, 5, 0)),
        ([Call(1, 0, "a", "x", "in"), Call(4, 0, "b", "y", "in"), Wait("a")], Busy(2, 0, 5, 2, 0)),
        ([Call(1, 0, "a", "x", "in"), Call(4, 0, "b", "y", "in"), Wait("b")], Busy(5, 0, 5, 5, 0)),
        # What had ended before is not delayed.
        ([Call(1, 0, "a", "x"), Compute(3), Call(4, 0, "b", "y"), Wait("b")], Busy(7, 3, 5, 4, 0)),
    ],
)
def test_lanes(events: list[Event], expected: Busy) -> None:
    assert run(events) == expected


def test_repeated_events() -> None:
    events: list[Compute | Call | Wait] = [Call(3, 1, "a"), Compute(1), Wait("a")]
    assert run([Compute(1), Repeat(4, events), Call(1, 1)]) == run([Compute(1), *events * 4, Call(1, 1)])


def test_communication_under_computation_is_slower() -> None:
    # Of 4 s of communication 1 s passes under 2 s of computation; the rest at its own pace.
    assert run([Call(4, 0, "a"), Compute(2), Wait()], comm_slowdown=2) == Busy(5, 2, 5, 3, 0)
    # All of it passes under 6 s, which are slower themselves as long as it lasts.
    found = run([Call(2, 0, "a"), Compute(6), Wait("a")], slowdown=2, comm_slowdown=2)
    assert found == Busy(8, 8, 4, 0, 0)


def test_what_is_not_hidden_at_all_adds_up() -> None:
    found = run([Call(3, 0, "a"), Compute(5), Call(1, 0, "a"), Compute(2), Wait()], comm_slowdown=1e9)
    assert found.end_s == pytest.approx(3 + 5 + 1 + 2)
