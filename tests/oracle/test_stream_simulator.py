"""Steps of a few events, by hand."""

from __future__ import annotations

import pytest

from hpcbench.oracle.stream_simulator import (
    CommCall,
    ComputeEvent,
    ProcessorQuota,
    RepeatEvent,
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


# Half a core, of which 0.1 s are granted at once: 0.05 s of work, then as it comes in.
#
#     compute 1 | wait 0.4 | compute 1          1 s of work takes 2 s with an empty bucket
@pytest.mark.parametrize(
    ("wait_s", "cpu_s", "second_s"),
    [
        (0.0, 0.0, 2.0),
        # 0.1 s of waiting fill 0.05 s: with them 0.1 s run at full speed, which saves 0.1 s.
        (0.1, 0.0, 1.9),
        (0.4, 0.0, 1.9),
        # The call uses half of the time that is granted meanwhile, or all of it.
        (0.1, 0.025, 1.95),
        (0.1, 0.05, 2.0),
    ],
)
def test_a_quota_saves_while_a_rank_waits(wait_s: float, cpu_s: float, second_s: float) -> None:
    call: list[StreamEvent] = [CommCall(wait_s, cpu_s=cpu_s)] if wait_s else []
    times = simulate_streams([ComputeEvent(2.0), *call, ComputeEvent(2.0)], quota=ProcessorQuota(0.5, 0.1))
    assert times.compute_s == pytest.approx(2.0 + second_s)
    assert times.end_s == pytest.approx(2.0 + wait_s + second_s)


def test_a_call_after_computation_waits_for_its_processor_seconds() -> None:
    times = simulate_streams([ComputeEvent(2.0), CommCall(0.1, cpu_s=0.2)], quota=ProcessorQuota(0.5, 0.1))
    assert times.end_s == pytest.approx(2.0 + 0.4)


def test_short_kernels_run_at_full_speed() -> None:
    events: list[StreamEvent] = [CommCall(1.0), ComputeEvent(0.02), CommCall(1.0), ComputeEvent(0.02)]
    times = simulate_streams(events, quota=ProcessorQuota(0.5, 0.1))
    assert times.compute_s == pytest.approx(0.02)
    # Without a quota nothing changes.
    assert simulate_streams(events).compute_s == pytest.approx(0.04)


def test_a_thread_beside_the_computing_one_takes_its_part_of_the_quota() -> None:
    events: list[StreamEvent] = [ComputeEvent(2.0), CommCall(1.0), ComputeEvent(0.02)]
    times = simulate_streams(events, quota=ProcessorQuota(0.5, 0.1, background_share=0.75))
    # 1 s of processor time at 1/8 of a core; the call fills the bucket by 12.5 ms, at full speed worth 14.3 ms.
    assert times.compute_s == pytest.approx(8.0 + 0.01)
