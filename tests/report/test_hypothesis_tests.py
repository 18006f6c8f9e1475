"""Statistics of two samples against scipy's, and the literal cases of five against five."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from hpcbench.report.hypothesis_tests import (
    estimate_log_ratio,
    incomplete_beta,
    rank_sum_test,
    t_quantile_975,
    t_survival,
    welch_test,
)

SIZES = [(3, 3), (3, 4), (5, 5), (5, 9), (12, 12), (20, 15)]


def samples(one: int, other: int, *, ties: bool = False) -> tuple[list[float], list[float]]:
    source = random.Random(one * 100 + other)
    drawn = [source.gauss(0, 1) for _ in range(one)], [source.gauss(0.7, 2) for _ in range(other)]
    return ([round(value) for value in drawn[0]], [round(value) for value in drawn[1]]) if ties else drawn


@pytest.mark.parametrize("sizes", SIZES)
def test_the_welch_test_equals_scipys(sizes: tuple[int, int]) -> None:
    one, other = samples(*sizes)
    difference, low, high, chances = welch_test(one, other)
    found = stats.ttest_ind(other, one, equal_var=False)
    assert difference == pytest.approx(sum(other) / len(other) - sum(one) / len(one))
    assert (low, high) == pytest.approx(tuple(found.confidence_interval(0.95)), rel=1e-9)
    assert chances.greater == pytest.approx(stats.ttest_ind(other, one, equal_var=False, alternative="greater").pvalue)
    assert chances.greater + chances.less == pytest.approx(1)


@pytest.mark.parametrize("sizes", SIZES)
def test_rank_sums_are_scipys(sizes: tuple[int, int]) -> None:
    one, other = samples(*sizes)
    method = "exact" if sum(sizes) <= 24 else "asymptotic"
    theirs = [stats.mannwhitneyu(other, one, alternative=side, method=method).pvalue for side in ("greater", "less")]
    assert rank_sum_test(one, other) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("sizes", [(3, 3), (3, 4), (5, 5), (5, 9)])
def test_ties_have_their_mean_rank(sizes: tuple[int, int]) -> None:
    def total(new: list[float], base: list[float]) -> float:
        return float(stats.rankdata([*new, *base])[: len(new)].sum())

    one, other = samples(*sizes, ties=True)
    theirs = [
        stats.permutation_test((other, one), total, alternative=side, n_resamples=10_000, vectorized=False).pvalue
        for side in ("greater", "less")
    ]
    assert rank_sum_test(one, other) == pytest.approx(theirs, rel=1e-9)


def test_many_ties_are_approximated() -> None:
    one, other = samples(20, 15, ties=True)
    theirs = [stats.mannwhitneyu(other, one, alternative=side).pvalue for side in ("greater", "less")]
    assert rank_sum_test(one, other) == pytest.approx(theirs, rel=1e-9)


def test_two_samples_of_five_give_exact_rank_probabilities() -> None:
    base, slower = [1.0, 1.01, 1.02, 1.03, 1.04], [1.05, 1.06, 1.07, 1.08, 1.09]
    found = estimate_log_ratio(base, slower)
    assert found.ranks is not None
    assert found.ranks.greater == pytest.approx(1 / 252)
    # P(U <= 2) = 4 / 252 is within 2.5 %, P(U <= 3) = 7 / 252 is not: two differences on each side lie outside.
    differences = sorted(b - a for a in range(5) for b in range(5, 10))
    assert differences[2] == 2
    assert found.low == pytest.approx(0.0186, abs=2e-3)
    assert found.low < found.estimate < found.high
    assert estimate_log_ratio(base[:4], slower[:4]).ranks is None


def test_equal_launches_have_a_p_value_of_zero_or_one() -> None:
    assert welch_test([2.0] * 3, [2.0] * 3) == (0.0, 0.0, 0.0, (1.0, 1.0))
    assert welch_test([1.0] * 3, [2.0] * 3)[3] == (0.0, 1.0)


@pytest.mark.parametrize(("score", "freedom"), [(0.0, 1.0), (2.0, 2.5), (-1.3, 7.9), (40.0, 8.0), (0.4, 300.0)])
def test_students_t_distribution_equals_scipys(score: float, freedom: float) -> None:
    assert t_survival(score, freedom) == pytest.approx(stats.t.sf(score, freedom), rel=1e-9, abs=1e-15)
    assert t_quantile_975(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    assert incomplete_beta(freedom, 0.5, 0.9) == pytest.approx(stats.beta.cdf(0.9, freedom, 0.5), rel=1e-9)
