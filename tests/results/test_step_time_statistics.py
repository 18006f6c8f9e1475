"""The spread of step times (``hpcbench.results.timing_statistics``): the worker writes it into every result."""

from __future__ import annotations

import random
import statistics

import pytest

from hpcbench.results.timing_statistics import bootstrap_median_interval, step_time_statistics


def test_the_spread_of_none_one_and_many_steps_is_defined() -> None:
    assert step_time_statistics([]) is None
    one = step_time_statistics([2.0])
    assert one is not None
    assert (one.median, one.std, one.ci95_low, one.ci95_high) == (2.0, 0.0, 2.0, 2.0)
    values = [3.0, 1.0, 2.0, 5.0]
    many = step_time_statistics(values)
    assert many is not None
    assert (many.median, many.mean, many.min, many.max) == (2.5, 2.75, 1.0, 5.0)
    assert (many.p10, many.p90) == pytest.approx((1.3, 4.4)), "linear between neighbours"
    assert many.std == pytest.approx(statistics.stdev(values))
    assert many.min <= many.ci95_low <= many.median <= many.ci95_high <= many.max


def test_the_same_steps_give_the_same_interval() -> None:
    values = [random.Random(1).random() for _ in range(50)]
    assert bootstrap_median_interval(values) == bootstrap_median_interval(list(values))


def covered(make: random.Random, correlation: float, resamples: int) -> float:
    """Return the share of intervals that contain the true median 0 of an autoregressive sample of 60."""
    hits = 0
    trials = 150
    for _ in range(trials):
        values, value = [], 0.0
        for _ in range(60):
            value = correlation * value + make.gauss(0.0, 1.0)
            values.append(value)
        low, high = bootstrap_median_interval(values, resamples)
        hits += low <= 0.0 <= high
    return hits / trials


def test_block_bootstrap_keeps_coverage_for_correlated_steps() -> None:
    """Single draws would hold it in about six of ten samples at this correlation."""
    assert covered(random.Random(8), correlation=0.5, resamples=200) >= 0.75
