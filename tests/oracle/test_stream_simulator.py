"""Steps of a few events, by hand."""

from __future__ import annotations

import pytest

from hpcbench.oracle.stream_simulator import (
    CommCall,
    ComputeEvent,
    StreamEvent,
    StreamTimes,
    WaitEvent,
    simulate_streams,
)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], StreamTimes(0, 0, 0, 0, 0)),
        ([ComputeEvent(2), ComputeEvent(3)], StreamTimes(5, 5, 0, 0, 0)),
        ([ComputeEvent(2), CommCall(3, 1)], StreamTimes(5, 2, 3, 3, 1)),
        # Hidden, half hidden, and one behind the other.
        ([ComputeEvent(1), CommCall(2, 0, "a"), ComputeEvent(4), WaitEvent("a")], StreamTimes(5, 5, 2, 0, 0)),
        ([ComputeEvent(1), CommCall(4, 0, "a"), ComputeEvent(2), WaitEvent("a")], StreamTimes(5, 3, 4, 2, 0)),
        (
            [CommCall(2, 0, "a"), CommCall(2, 0, "b"), WaitEvent("a"), ComputeEvent(1), WaitEvent()],
            StreamTimes(4, 1, 4, 3, 0),
        ),
        # The last call of a name counts; a name that nobody called is not waited for.
        ([CommCall(1, 0, "a"), CommCall(1, 0, "a"), WaitEvent("a"), WaitEvent("b")], StreamTimes(2, 0, 2, 2, 0)),
    ],
)
def test_streams_of_few_events_give_the_expected_times(events: list[StreamEvent], expected: StreamTimes) -> None:
    assert simulate_streams(events) == expected


def test_computation_under_communication_is_slower() -> None:
    assert simulate_streams([CommCall(4, 0, "a"), ComputeEvent(1), WaitEvent()], slowdown=2).compute_s == 2
    # 4 s of communication cover 2 s of what is computed.
    assert simulate_streams([CommCall(4, 0, "a"), ComputeEvent(3)], slowdown=2).end_s == 5


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # Of two lanes on wires of their own neither waits for the other.
        ([CommCall(4, 0, "a", "x", "in"), CommCall(1, 0, None, "y", "out"), WaitEvent()], StreamTimes(4, 0, 4, 4, 0)),
        (
            [CommCall(2, 1, "a", "x", "in"), ComputeEvent(1), CommCall(4, 2, None, "y", "out")],
            StreamTimes(5, 1, 5, 4, 2.5),
        ),
        # On one wire the short call takes twice its time, and the long one both.
        ([CommCall(4, 0, "a", "x", "in"), CommCall(1, 0, None, "y", "in")], StreamTimes(2, 0, 5, 2, 0)),
        ([CommCall(4, 0, "a", "x", "in"), CommCall(1, 0, None, "y", "in"), WaitEvent("a")], StreamTimes(5, 0, 5, 5, 0)),
        ([CommCall(1, 0, "a", "x", "in"), CommCall(4, 0, "b", "y", "in"), WaitEvent("a")], StreamTimes(2, 0, 5, 2, 0)),
        ([CommCall(1, 0, "a", "x", "in"), CommCall(4, 0, "b", "y", "in"), WaitEvent("b")], StreamTimes(5, 0, 5, 5, 0)),
        # What had ended before is not delayed.
        (
            [CommCall(1, 0, "a", "x"), ComputeEvent(3), CommCall(4, 0, "b", "y"), WaitEvent("b")],
            StreamTimes(7, 3, 5, 4, 0),
        ),
    ],
)
def test_calls_on_two_streams_overlap_up_to_their_wait(events: list[StreamEvent], expected: StreamTimes) -> None:
    assert simulate_streams(events) == expected
