"""Statistics of two samples against scipy's own tests, and the literal case of five against five."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from hpcbench.report.hypothesis_tests import estimate_log_ratio, rank_sum_test, welch_test

SIZES = [(3, 3), (3, 4), (5, 5), (5, 9), (12, 12), (20, 15)]


def samples(one: int, other: int) -> tuple[list[float], list[float]]:
    source = random.Random(one * 100 + other)
    return [source.gauss(0, 1) for _ in range(one)], [source.gauss(0.7, 2) for _ in range(other)]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_welch_test_equals_scipys(sizes: tuple[int, int]) -> None:
    one, other = samples(*sizes)
    difference, low, high, chances = welch_test(one, other)
    found = stats.ttest_ind(other, one, equal_var=False)
    assert difference == pytest.approx(sum(other) / len(other) - sum(one) / len(one))
    assert (low, high) == pytest.approx(tuple(found.confidence_interval(0.95)), rel=1e-9)
    assert chances.greater == pytest.approx(stats.ttest_ind(other, one, equal_var=False, alternative="greater").pvalue)
    assert chances.greater + chances.less == pytest.approx(1)


@pytest.mark.parametrize("sizes", [(5, 5), (5, 7), (12, 12)])
def test_the_interval_contains_a_true_difference_in_95_of_100_cases(sizes: tuple[int, int]) -> None:
    source = random.Random(7)
    trials, inside = 300, 0
    for _ in range(trials):
        base, new = ([source.lognormvariate(0, 0.02) for _ in range(count)] for count in sizes)
        found = estimate_log_ratio(base, new)
        inside += found.low <= 0 <= found.high
    assert inside / trials >= 0.92


def test_equal_launches_have_a_p_value_of_zero_or_one() -> None:
    assert welch_test([2.0] * 3, [2.0] * 3) == (0.0, 0.0, 0.0, (1.0, 1.0))
    assert welch_test([1.0] * 3, [2.0] * 3)[3] == (0.0, 1.0)
    assert rank_sum_test([2.0] * 5, [2.0] * 5) == (1.0, 1.0)
    assert rank_sum_test([1.0] * 5, [2.0] * 5).greater < 0.005
