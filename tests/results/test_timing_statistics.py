"""Warm-up, drift, outliers and noise, on step times written out by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcbench.results.timing_statistics import (
    count_outliers,
    count_warmup_steps,
    make_steadiness_warnings,
    make_warmup_warning,
    relative_drift,
    step_time_statistics,
)

FLAT = [1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 0.98, 1.01, 1.0, 0.99]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (FLAT[:9], None),
        (FLAT, 0),
        ([3.0, *FLAT], 1),
        ([5.0, 3.0, 2.0, 1.5, *FLAT], 4),
        # One quick step among the slow ones does not end the warm-up.
        ([5.0, 4.0, 1.0, 3.0, *FLAT], 4),
        # A slow step later on is an outlier, and so is a first one that is not the slowest of all.
        ([1.0, 5.0, 1.0, *FLAT], 0),
        ([3.0, *FLAT, 4.0], 0),
        # Slower by less than 5 %, however steady the rest.
        ([1.04, *[1.0] * 9], 0),
        ([1.06, *[1.0] * 9], 1),
        # Never more than half.
        ([2.0] * 8 + [1.0] * 8, 8),
        ([*[9.0] * 7, 1.0, *[1.0] * 6], 7),
    ],
)
def test_warm_up_is_found(times: list[float], expected: int | None) -> None:
    assert count_warmup_steps(times) == expected


@given(st.lists(st.floats(0.5, 50.0), min_size=10, max_size=60))
def test_warm_up_is_at_most_half_and_never_quicker(times: list[float]) -> None:
    found = count_warmup_steps(times)
    assert found is not None
    assert 0 <= found <= len(times) // 2
    if found:
        assert times[0] > max(times[len(times) // 2 :])


def test_noise_is_seldom_counted_as_warm_up() -> None:
    source = random.Random(5)
    found = [count_warmup_steps([1 + abs(source.gauss(0, 0.1)) for _ in range(20)]) for _ in range(300)]
    assert sum(one != 0 for one in found) <= 15


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (FLAT[:9], None),
        (FLAT, 0),
        ([*FLAT, 1.5], 1),
        # The median's own deviation is nothing: 5 % above it is the least that counts.
        ([1.0] * 10 + [1.04, 1.06], 1),
        # Where half of the steps differ by as much, none is an outlier.
        ([1.0, 2.0] * 6, 0),
        # Quick steps are none.
        ([*FLAT, 0.1], 0),
    ],
)
def test_outliers_are_counted_from_ten_steps(times: list[float], expected: int | None) -> None:
    assert count_outliers(times) == expected


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (FLAT[:9], None),
        ([1.0] * 12, 0.0),
        ([float(number) for number in range(10, 21)], 10 / 15),
        ([float(number) for number in range(20, 9, -1)], -10 / 15),
        # A quarter of outliers does not move the slope.
        ([1.0, 1.0, 1.0, 9.0] * 4, 0.0),
    ],
)
def test_relative_drift_is_none_with_too_few_steps(times: list[float], expected: float | None) -> None:
    assert relative_drift(times) == (None if expected is None else pytest.approx(expected))


def test_drift_of_a_long_run_is_that_of_its_blocks() -> None:
    times = [1 + step / 10_000 for step in range(10_000)]
    assert relative_drift(times) == pytest.approx(1 / 1.5, rel=0.01)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (FLAT, []),
        ([1.0] * 12, []),
        ([1 + number / 150 for number in range(12)], ["drift above 5 %: steps became slower during the run"]),
        (
            [2 - number / 75 for number in range(12)],
            ["drift above 5 %: steps became faster during the run"],
        ),
        # As large, but no trend.
        ([*FLAT, *[1.0, 1.3] * 2, *FLAT], ["more than 5 % of the steps are outliers: far slower than the median"]),
        (
            [1.0, 1.4, 1.1, 1.5, 1.3, 1.0, 1.2, 1.4, 1.0, 1.5, 1.2, 1.3],
            ["noise above 10 %: the interval of the median step time is wider than that share of it"],
        ),
        # Too few to say anything.
        ([1.0, 1.1, 2.0], []),
        ([], []),
    ],
)
def test_steadiness_warnings_follow_from_step_times(times: list[float], expected: list[str]) -> None:
    assert make_steadiness_warnings(times, step_time_statistics(times)) == expected


def test_the_warning_names_the_warm_up_to_set() -> None:
    assert make_warmup_warning(4, 20, 5) == (
        "the first 4 of 20 timed steps were still slower than the later ones and are excluded: "
        "set warmup_steps = 9 or more"
    )
