"""Rates, ends and node-hours of looks whose right answers can be worked out by hand."""

from __future__ import annotations

import pytest

from hpcbench.report.live_screen import (
    NodeHourEstimate,
    RemainingTime,
    RunDuration,
    estimate_node_hours,
    estimate_remaining_time,
    run_duration,
    runs_per_hour,
)
from hpcbench.submit.watcher import ArrayShape, ArraySnapshot, SweepSnapshot, TimedRun

ONE, TWO = ArrayShape(1, 4), ArrayShape(2, 8)
TOOK = (TimedRun(0, 100), TimedRun(100, 220), TimedRun(200, 340))
"""100, 120 and 140 s; they end at 100, 220 and 340."""


def look(*arrays: ArraySnapshot, now: float = 400.0, predicted_s: float | None = None) -> SweepSnapshot:
    return SweepSnapshot(sweep="s", cluster="c", now_unix_s=now, arrays=arrays, predicted_s=predicted_s)


def array(
    shape: ArrayShape = ONE, timed: tuple[TimedRun, ...] = TOOK, since: tuple[float, ...] = (), **counts: int
) -> ArraySnapshot:
    return ArraySnapshot(name="s-0001/0", shape=shape, counts=counts, timed=timed, running_since_unix_s=since)


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        ([], None),
        ([5.0], RunDuration(5.0, 5.0, 5.0, 1)),
        ([1.0, 2.0, 9.0], RunDuration(2.0, 1.0, 9.0, 3)),
        ([float(one) for one in range(1, 21)], RunDuration(10.5, 3.0, 18.0, 20)),
    ],
)
def test_the_run_duration_is_median_and_spread_of_ok_runs(took: list[float], expected: RunDuration | None) -> None:
    assert run_duration([TimedRun(0, one) for one in took] + [TimedRun(0, 1000, is_ok=False)]) == expected


@pytest.mark.parametrize(
    ("timed", "expected"),
    [
        ((), None),
        (TOOK[:1], None),
        # From the start of the earliest one (0) until now (400).
        (TOOK, (27.0, 3)),
        # The last 20 of 30 that end every 10 s: from the end of the tenth (100) until now.
        (tuple(TimedRun(0, 10.0 * (one + 1)) for one in range(30)), (240.0, 20)),
    ],
)
def test_runs_per_hour_need_several_ended_runs(timed: tuple[TimedRun, ...], expected: tuple[float, int] | None) -> None:
    assert runs_per_hour(look(array(timed=timed, running=1))) == expected
    assert runs_per_hour(look(array(timed=timed, ok=len(timed)))) is None


def test_the_rate_is_that_of_all_arrays_of_the_submissions_that_are_under_way() -> None:
    done = array(timed=TOOK[:2], ok=2)
    earlier = ArraySnapshot(name="s-0000/0", shape=ONE, counts={"ok": 3}, timed=TOOK)
    assert runs_per_hour(look(done, earlier, array(timed=(), running=1))) == (18.0, 2)


def test_the_remaining_time_assumes_constant_concurrency() -> None:
    # 4 queued at 120 s; one that runs since 60 s has 60 left, one since 200 s a tenth: 552 s of runs, two at a time.
    found = estimate_remaining_time(look(array(running=2, pending=4, since=(340.0, 200.0))))
    assert found == RemainingTime(
        276.0, 225.0, 327.0, "if 2 run at a time and take as long as the 3 finished runs of the same shape"
    )


def test_the_last_run_ends_no_sooner_than_it_can() -> None:
    found = estimate_remaining_time(look(array(running=4, pending=1, since=(390.0,) * 4)))
    assert found is not None
    assert found.left_s == pytest.approx((120 + 4 * 110) / 4)
    alone = estimate_remaining_time(look(array(running=4, since=(399.0, 200.0, 200.0, 200.0))))
    assert alone is not None
    assert alone.left_s == 119.0


@pytest.mark.parametrize("state", ["pending", "waiting"])
def test_no_end_where_nothing_runs_but_what_was_predicted(state: str) -> None:
    queued = ArraySnapshot(shape=ONE, counts={state: 3}, timed=TOOK)
    assert estimate_remaining_time(look(queued)) is None
    assert estimate_remaining_time(look(queued, predicted_s=7.0)) == RemainingTime(7.0, 7.0, 7.0, "predicted")


def test_no_end_before_a_run_has_ended_and_other_shapes_stand_in() -> None:
    assert estimate_remaining_time(look(array(timed=(), running=1))) is None
    found = estimate_remaining_time(look(array(ok=3), array(TWO, (), running=1, since=(400.0,))))
    assert found is not None
    assert (found.left_s, found.basis.rpartition(" of ")[2]) == (120.0, "other shapes")


def test_node_hours_sum_ended_and_remaining_runs() -> None:
    done = array(TWO, ok=6, skipped=9)
    assert estimate_node_hours(look(done)) == NodeHourEstimate(2 * 6 * 120 / 3600, 0.0)
    under_way = array(running=1, pending=2, ok=3, since=(340.0,))
    assert estimate_node_hours(look(done, under_way)) == NodeHourEstimate(
        (2 * 6 * 120 + 3 * 120) / 3600, (2 * 120 + 60) / 3600
    )
    assert estimate_node_hours(look(array(timed=(), running=1))) == NodeHourEstimate(0.0, None)
