"""Steps of a few events, by hand."""

from __future__ import annotations

import pytest

from hpcbench.predict.cost_model import main_overlapped_call
from hpcbench.predict.stream_simulator import (
    CommCall,
    ComputeEvent,
    RepeatEvent,
    StreamEvent,
    StreamTimes,
    WaitEvent,
    simulate_streams,
)
from hpcbench.strategies.traffic import Traffic


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


def test_repeated_events_equal_the_events_written_out() -> None:
    events: list[ComputeEvent | CommCall | WaitEvent] = [CommCall(3, 1, "a"), ComputeEvent(1), WaitEvent("a")]
    assert simulate_streams([ComputeEvent(1), RepeatEvent(4, events), CommCall(1, 1)]) == simulate_streams(
        [ComputeEvent(1), *events * 4, CommCall(1, 1)]
    )


def test_communication_under_computation_is_slower() -> None:
    # Of 4 s of communication 1 s passes under 2 s of computation; the rest at its own pace.
    assert simulate_streams([CommCall(4, 0, "a"), ComputeEvent(2), WaitEvent()], comm_slowdown=2) == StreamTimes(
        5, 2, 5, 3, 0
    )
    # All of it passes under 6 s, which are slower themselves as long as it lasts.
    found = simulate_streams([CommCall(2, 0, "a"), ComputeEvent(6), WaitEvent("a")], slowdown=2, comm_slowdown=2)
    assert found == StreamTimes(8, 8, 4, 0, 0)


def test_without_overlap_durations_add_up() -> None:
    found = simulate_streams(
        [CommCall(3, 0, "a"), ComputeEvent(5), CommCall(1, 0, "a"), ComputeEvent(2), WaitEvent()], comm_slowdown=1e9
    )
    assert found.end_s == pytest.approx(3 + 5 + 1 + 2)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # The computation between the call and the wait overlaps with it.
        ("reduce@8 compute wait", "all_reduce@8"),
        ("reduce@8 wait compute", None),
        ("reduce@8 wait", None),
        # Of one operation the largest call, of several the one that moves most.
        ("reduce@8 compute reduce@9 compute gather@10 compute wait", "all_reduce@9"),
        ("reduce@8 compute gather@10 compute wait", "all_gather@10"),
        ("send@99 compute wait", None),
    ],
)
def test_the_main_overlapped_call_moves_most_bytes_beside_computation(events: str, expected: str | None) -> None:
    def event_of(word: str) -> StreamEvent:
        if word in ("compute", "wait"):
            return ComputeEvent(1.0) if word == "compute" else WaitEvent()
        name, size = word.split("@")
        operation = name if name == "send" else f"all_{name}"
        return CommCall(1.0, key=word, traffic=Traffic(operation=operation, group_size=2, payload_bytes=int(size)))

    call = main_overlapped_call([event_of(word) for word in events.split()])
    assert (None if call is None else f"{call.operation}@{call.payload_bytes}") == expected
