"""Two-sample tests on launches: log-ratio estimates, Welch's test and Wilcoxon's rank-sum test."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

MIN_LAUNCHES_RANK_TEST = 5
"""So many launches a side give a rank test; from ``MIN_LAUNCHES_T_TEST`` on Welch's on logarithms."""
MIN_LAUNCHES_T_TEST = 3
_MAX_EXACT_LAUNCHES = 24
"""Launches of both sides together, whose rank sums are counted rather than approximated."""
_NORMAL_975 = statistics.NormalDist().inv_cdf(0.975)


class PValues(NamedTuple):
    """One-sided probabilities of a difference at least as large where there is none."""

    more: float
    less: float


class LogRatioEstimate(NamedTuple):
    """The logarithm of new over base: its estimate, a 95 % interval, and the tests that there is none."""

    estimate: float
    low: float
    high: float
    welch: PValues
    ranks: PValues | None
    """Where both sides have ``MIN_LAUNCHES_RANK_TEST`` launches."""


def estimate_log_ratio(base: Sequence[float], new: Sequence[float]) -> LogRatioEstimate:
    """How far ``new`` is from ``base``, both positive and of ``MIN_LAUNCHES_T_TEST`` launches or more.

    With ``MIN_LAUNCHES_RANK_TEST`` a side: the median of the pairs' differences and its interval from the
    distribution of rank
    sums (Hodges and Lehmann 1963), else means and Student's t with Welch's degrees of freedom.
    """
    one, other = [math.log(value) for value in base], [math.log(value) for value in new]
    estimate, low, high, by_welch = welch_test(one, other)
    if min(len(one), len(other)) < MIN_LAUNCHES_RANK_TEST:
        return LogRatioEstimate(estimate, low, high, by_welch, None)
    differences = sorted(b - a for a in one for b in other)
    outside = _differences_outside(len(one), len(other))
    return LogRatioEstimate(
        statistics.median(differences), differences[outside], differences[-1 - outside], by_welch,
        rank_sum_test(one, other),
    )  # fmt: skip


def welch_test(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float, PValues]:
    """The difference of the means, its 95 % interval, and Welch's test (1947) of none."""
    difference = statistics.fmean(other) - statistics.fmean(one)
    parts = [statistics.variance(values) / len(values) for values in (one, other)]
    error = math.sqrt(sum(parts))
    if error <= abs(difference) * 1e-12:
        # All launches of a side are alike to the bit, as counts of bytes are.
        sure = PValues(float(difference <= 0), float(difference >= 0))
        return difference, difference, difference, sure
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True)
    )
    score = difference / error
    half = t_quantile_975(freedom) * error
    return (
        difference,
        difference - half,
        difference + half,
        PValues(t_survival(score, freedom), t_survival(-score, freedom)),
    )


def rank_sum_test(one: Sequence[float], other: Sequence[float]) -> PValues:
    """Wilcoxon's rank-sum test (1945) that ``other`` is not more, and not less: exact, ties by their mean rank.

    Beyond ``_MAX_EXACT_LAUNCHES`` values by the normal approximation, corrected for ties and continuity.
    """
    ranks = _doubled_ranks([*one, *other])
    total = sum(ranks[len(one) :])
    if len(ranks) <= _MAX_EXACT_LAUNCHES:
        counts = _rank_sum_counts(tuple(sorted(ranks)), len(other))
        ways = sum(counts.values())
        more = sum(count for value, count in counts.items() if value >= total)
        less = sum(count for value, count in counts.items() if value <= total)
        return PValues(more / ways, less / ways)
    size = len(ranks)
    mean = len(other) * (size + 1)
    spread = statistics.pvariance(ranks) * len(one) * len(other) / (size - 1)
    if not spread:
        return PValues(1.0, 1.0)
    normal = statistics.NormalDist(0, math.sqrt(spread))
    return PValues(1 - normal.cdf(total - mean - 1), normal.cdf(total - mean + 1))


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, so that the mean rank of ties is whole."""
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered)))}
    last = {value: place for place, value in enumerate(ordered)}
    return [first[value] + last[value] + 2 for value in values]


@functools.lru_cache(maxsize=256)
def _rank_sum_counts(ranks: tuple[int, ...], chosen: int) -> dict[int, int]:
    """In how many ways ``chosen`` of ``ranks`` have each sum."""
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(chosen))]
    for rank in ranks:
        for count in range(chosen, 0, -1):
            for value, number in ways[count - 1].items():
                ways[count][value + rank] = ways[count].get(value + rank, 0) + number
    return ways[chosen]


@functools.lru_cache(maxsize=256)
def _differences_outside(one: int, other: int) -> int:
    """How many of the sorted differences lie outside of the 95 % interval on each side."""
    if one + other > _MAX_EXACT_LAUNCHES:
        spread = math.sqrt(one * other * (one + other + 1) / 12)
        return max(0, math.floor(one * other / 2 - _NORMAL_975 * spread))
    counts = _rank_sum_counts(tuple(range(2, 2 * (one + other) + 1, 2)), other)
    ways, least = sum(counts.values()), other * (other + 1)
    outside, passed = 0, 0
    while (passed := passed + counts.get(least + 2 * outside, 0)) <= 0.025 * ways:
        outside += 1
    return outside - 1 if outside else 0


def t_survival(score: float, freedom: float) -> float:
    """The chance that Student's t with ``freedom`` degrees (may be a fraction) is above ``score``."""
    tail = incomplete_beta(freedom / 2, 0.5, freedom / (freedom + score * score)) / 2
    return tail if score > 0 else 1 - tail


def t_quantile_975(freedom: float) -> float:
    """The score that Student's t is below with a chance of 97.5 %.

    By Newton's method from the normal distribution's: the chance of more is convex, so that no step goes too far.
    """
    score = _NORMAL_975
    front = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    for _ in range(50):
        density = front * (1 + score * score / freedom) ** (-(freedom + 1) / 2)
        step = (t_survival(score, freedom) - 0.025) / density
        score += step
        if step <= 1e-12 * score:
            break
    return score


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    # From the last term to the first: each term only divides.
    value = 1.0
    for term in range(100, 0, -1):
        half = term // 2
        if term % 2:
            factor = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            factor = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        value = 1 + factor / value
    return front / (a * value)
