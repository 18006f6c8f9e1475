"""Rates, ends and node-hours of looks whose right answers can be worked out by hand."""

from __future__ import annotations

import pytest

from hpcbench.report.estimates import Cost, Duration, End, cost, duration, end, runs_per_hour
from hpcbench.submit.watch import ArrayLook, Shape, Snapshot, Timed

ONE, TWO = Shape(1, 4), Shape(2, 8)
TOOK = (Timed(0, 100), Timed(100, 220), Timed(200, 340))
"""100, 120 and 140 s; they end at 100, 220 and 340."""


def look(*arrays: ArrayLook, now: float = 400.0, predicted_s: float | None = None) -> Snapshot:
    return Snapshot(sweep="s", cluster="c", now_unix_s=now, arrays=arrays, predicted_s=predicted_s)


def array(
    shape: Shape = ONE, timed: tuple[Timed, ...] = TOOK, since: tuple[float, ...] = (), **counts: int
) -> ArrayLook:
    return ArrayLook(name="s-0001/0", shape=shape, counts=counts, timed=timed, running_since_unix_s=since)


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        ([], None),
        ([5.0], Duration(5.0, 5.0, 5.0, 1)),
        ([1.0, 2.0, 9.0], Duration(2.0, 1.0, 9.0, 3)),
        ([float(one) for one in range(1, 21)], Duration(10.5, 3.0, 18.0, 20)),
    ],
)
def test_durations(took: list[float], expected: Duration | None) -> None:
    assert duration([Timed(0, one) for one in took] + [Timed(0, 1000, is_ok=False)]) == expected


@pytest.mark.parametrize(
    ("timed", "expected"),
    [
        ((), None),
        (TOOK[:1], None),
        # From the start of the earliest one (0) until now (400).
        (TOOK, (27.0, 3)),
        # The last 20 of 30 that end every 10 s: from the end of the tenth (100) until now.
        (tuple(Timed(0, 10.0 * (one + 1)) for one in range(30)), (240.0, 20)),
    ],
)
def test_runs_per_hour(timed: tuple[Timed, ...], expected: tuple[float, int] | None) -> None:
    assert runs_per_hour(look(array(timed=timed, running=1))) == expected
    assert runs_per_hour(look(array(timed=timed, ok=len(timed)))) is None


def test_the_rate_is_that_of_all_arrays_of_the_submissions_that_are_under_way() -> None:
    done = array(timed=TOOK[:2], ok=2)
    earlier = ArrayLook(name="s-0000/0", shape=ONE, counts={"ok": 3}, timed=TOOK)
    assert runs_per_hour(look(done, earlier, array(timed=(), running=1))) == (18.0, 2)


def test_the_end_of_a_queue_that_keeps_its_width() -> None:
    # 4 queued at 120 s; one that runs since 60 s has 60 left, one since 200 s a tenth: 552 s of runs, two at a time.
    found = end(look(array(running=2, pending=4, since=(340.0, 200.0))))
    assert found == End(
        276.0, 225.0, 327.0, "if 2 run at a time and take as long as the 3 finished runs of the same shape"
    )


def test_the_last_run_ends_no_sooner_than_it_can() -> None:
    found = end(look(array(running=4, pending=1, since=(390.0,) * 4)))
    assert found is not None
    assert found.left_s == pytest.approx((120 + 4 * 110) / 4)
    alone = end(look(array(running=4, since=(399.0, 200.0, 200.0, 200.0))))
    assert alone is not None
    assert alone.left_s == 119.0


@pytest.mark.parametrize("state", ["pending", "waiting"])
def test_no_end_where_nothing_runs_but_what_was_predicted(state: str) -> None:
    queued = ArrayLook(shape=ONE, counts={state: 3}, timed=TOOK)
    assert end(look(queued)) is None
    assert end(look(queued, predicted_s=7.0)) == End(7.0, 7.0, 7.0, "predicted")


def test_no_end_before_a_run_has_ended_and_other_shapes_stand_in() -> None:
    assert end(look(array(timed=(), running=1))) is None
    found = end(look(array(ok=3), array(TWO, (), running=1, since=(400.0,))))
    assert found is not None
    assert (found.left_s, found.basis.rpartition(" of ")[2]) == (120.0, "other shapes")


def test_node_hours() -> None:
    done = array(TWO, ok=6, skipped=9)
    assert cost(look(done)) == Cost(2 * 6 * 120 / 3600, 0.0)
    under_way = array(running=1, pending=2, ok=3, since=(340.0,))
    assert cost(look(done, under_way)) == Cost((2 * 6 * 120 + 3 * 120) / 3600, (2 * 120 + 60) / 3600)
    assert cost(look(array(timed=(), running=1))) == Cost(0.0, None)
