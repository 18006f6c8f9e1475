"""Two-sample tests on launches: log-ratio estimates, Welch's test, Wilcoxon's rank-sum test, Holm's correction,
and tests of the best configuration against its rivals.

A verdict is significant, equivalent or inconclusive:

    |<-- threshold -->|
    --[=======]-------|----------   equivalent: the whole 95 % interval is within the threshold
    ------------[=====|===]------   inconclusive
    ------------------|--[=====]-   significant: the adjusted p-value is at most 5 %
                                    and the estimate is at least the threshold
"""

from __future__ import annotations

import bisect
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpcbench.units import pluralize

SIGNIFICANT: Literal["told"] = "told"
EQUIVALENT: Literal["alike"] = "alike"
INCONCLUSIVE: Literal["cannot tell"] = "cannot tell"
Classification = Literal["told", "alike", "cannot tell"]
"""Values in JSON, which scripts read; ``VERDICT_WORDS`` are the printed words (docs/decisions/0017)."""
VERDICT_WORDS = {
    SIGNIFICANT: "significant", EQUIVALENT: "equivalent", INCONCLUSIVE: "inconclusive", "counted": "observed",
}  # fmt: skip
SIGNIFICANCE_LEVEL = 0.05
"""Family-wise error rate of all rows of a comparison, or of all findings of one kind, in one direction."""
MIN_LAUNCHES_RANK_TEST = 5
"""Launches per side for a rank test; fewer, but at least ``MIN_LAUNCHES_T_TEST``, give Welch's test alone."""
MIN_LAUNCHES_T_TEST = 3
_MAX_EXACT_LAUNCHES = 24
"""Up to so many launches of both sides together the distribution of rank sums is counted, not approximated."""
_NORMAL_975 = statistics.NormalDist().inv_cdf(0.975)


class PValues(NamedTuple):
    """One-sided p-values: the probability of a difference at least as large if there is none."""

    greater: float
    less: float


class LogRatioEstimate(NamedTuple):
    """The logarithm of new over base: its estimate, its 95 % interval, and tests against zero."""

    estimate: float
    low: float
    high: float
    welch: PValues
    ranks: PValues | None
    """``None`` where a side has less than ``MIN_LAUNCHES_RANK_TEST`` launches."""


def classify(shift: LogRatioEstimate, p_value: float, threshold: float, *, greater: bool = True) -> Classification:
    """Return the verdict about one shift.

    Args:
        shift: estimate and interval of log(new / base).
        p_value: adjusted one-sided p-value in the direction ``greater``.
        threshold: the smallest change that counts, as a share (0.02).
        greater: whether new is tested to be larger than base, or smaller.
    """
    minimum = math.log1p(threshold)
    if p_value <= SIGNIFICANCE_LEVEL and (shift.estimate if greater else -shift.estimate) >= minimum:
        return SIGNIFICANT
    return EQUIVALENT if -minimum <= shift.low and shift.high <= minimum else INCONCLUSIVE


def adjusted_p_values(shifts: Sequence[LogRatioEstimate], *, greater: bool) -> list[float]:
    """Return for each shift its one-sided p-value, adjusted for all ``shifts``.

    Holm's correction of Welch's tests, and separately of the rank tests of shifts that have them; of both the smaller
    one, doubled. Rank tests of few launches cannot reach the small p-values that many configurations need; Welch's
    can, but are sensitive to outliers: a rank test above ``SIGNIFICANCE_LEVEL`` vetoes.
    """
    side = 0 if greater else 1
    welch = holm_adjust([shift.welch[side] for shift in shifts])
    rank_p_values = {number: shift.ranks[side] for number, shift in enumerate(shifts) if shift.ranks is not None}
    if not rank_p_values:
        return welch
    ranks = dict(zip(rank_p_values, holm_adjust([*rank_p_values.values()]), strict=True))
    return [
        1.0 if rank_p_values.get(number, 0.0) > SIGNIFICANCE_LEVEL else min(1.0, 2 * min(p, ranks.get(number, p)))
        for number, p in enumerate(welch)
    ]


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Return Holm's (1979) adjusted p-values, in the order of ``p_values``."""
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, number in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = largest
    return adjusted


def estimate_log_ratio(base: Sequence[float], new: Sequence[float]) -> LogRatioEstimate:
    """Estimate log(new / base) of positive samples with at least ``MIN_LAUNCHES_T_TEST`` launches per side.

    With ``MIN_LAUNCHES_RANK_TEST`` launches per side the median of the pairs' differences, with its interval from the
    distribution of rank sums (Hodges and Lehmann 1963); else means and Student's t with Welch's degrees of freedom.
    """
    log_base, log_new = [math.log(value) for value in base], [math.log(value) for value in new]
    estimate, low, high, welch = welch_test(log_base, log_new)
    if min(len(base), len(new)) < MIN_LAUNCHES_RANK_TEST:
        return LogRatioEstimate(estimate, low, high, welch, None)
    differences = sorted(b - a for a in log_base for b in log_new)
    outside = _differences_outside(len(base), len(new))
    return LogRatioEstimate(
        statistics.median(differences), differences[outside], differences[-1 - outside], welch,
        rank_sum_test(log_base, log_new),
    )  # fmt: skip


def welch_test(base: Sequence[float], new: Sequence[float]) -> tuple[float, float, float, PValues]:
    """Return the difference of the means, its 95 % interval, and Welch's test (1947) against zero."""
    difference = statistics.fmean(new) - statistics.fmean(base)
    variances = [statistics.variance(values) / len(values) for values in (base, new)]
    error = math.sqrt(sum(variances))
    if error <= abs(difference) * 1e-12:
        # All launches of a side are equal to the bit, as byte counts are.
        return difference, difference, difference, PValues(float(difference <= 0), float(difference >= 0))
    freedom = sum(variances) ** 2 / sum(
        variance**2 / (len(values) - 1) for variance, values in zip(variances, (base, new), strict=True)
    )
    score = difference / error
    half = t_quantile_975(freedom) * error
    p_values = PValues(t_survival(score, freedom), t_survival(-score, freedom))
    return difference, difference - half, difference + half, p_values


def rank_sum_test(base: Sequence[float], new: Sequence[float]) -> PValues:
    """Wilcoxon's rank-sum test (1945) of ``new`` against ``base``: exact, ties by their mean rank.

    With more than ``_MAX_EXACT_LAUNCHES`` values the normal approximation, corrected for ties and continuity.
    """
    # Twice the rank of each value, so that the mean rank of ties is an integer.
    values = [*base, *new]
    ordered = sorted(values)
    ranks = [bisect.bisect_left(ordered, value) + bisect.bisect_right(ordered, value) + 1 for value in values]
    total = sum(ranks[len(base) :])
    if len(ranks) <= _MAX_EXACT_LAUNCHES:
        counts = _rank_sum_counts(tuple(sorted(ranks)), len(new))
        ways = sum(counts.values())
        greater = sum(count for value, count in counts.items() if value >= total)
        less = sum(count for value, count in counts.items() if value <= total)
        return PValues(greater / ways, less / ways)
    size = len(ranks)
    mean = len(new) * (size + 1)
    variance = statistics.pvariance(ranks) * len(base) * len(new) / (size - 1)
    if not variance:
        return PValues(1.0, 1.0)
    normal = statistics.NormalDist(0, math.sqrt(variance))
    return PValues(1 - normal.cdf(total - mean - 1), normal.cdf(total - mean + 1))


@functools.lru_cache(maxsize=256)
def _rank_sum_counts(ranks: tuple[int, ...], chosen: int) -> dict[int, int]:
    """Return the number of ways in which ``chosen`` of ``ranks`` have each sum."""
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(chosen))]
    for rank in ranks:
        for count in range(chosen, 0, -1):
            for value, number in ways[count - 1].items():
                ways[count][value + rank] = ways[count].get(value + rank, 0) + number
    return ways[chosen]


@functools.lru_cache(maxsize=256)
def _differences_outside(base: int, new: int) -> int:
    """Return how many of the sorted ``base * new`` differences lie outside of the 95 % interval on each side."""
    if base + new > _MAX_EXACT_LAUNCHES:
        spread = math.sqrt(base * new * (base + new + 1) / 12)
        return max(0, math.floor(base * new / 2 - _NORMAL_975 * spread))
    counts = _rank_sum_counts(tuple(range(2, 2 * (base + new) + 1, 2)), new)
    ways, minimum = sum(counts.values()), new * (new + 1)
    outside, passed = 0, 0
    while (passed := passed + counts.get(minimum + 2 * outside, 0)) <= 0.025 * ways:
        outside += 1
    return outside - 1 if outside else 0


def t_survival(score: float, freedom: float) -> float:
    """Return the probability that Student's t with ``freedom`` degrees (may be a fraction) exceeds ``score``."""
    tail = incomplete_beta(freedom / 2, 0.5, freedom / (freedom + score * score)) / 2
    return tail if score > 0 else 1 - tail


def t_quantile_975(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t.

    Newton's method from the normal quantile: the survival function is convex there, so that no step overshoots.
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
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
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


_NORMAL_80 = statistics.NormalDist().inv_cdf(0.8)
_MAX_LAUNCHES = 100
"""More repeats are not suggested for a difference that small."""


@dataclass(frozen=True)
class WinnerTest:
    """Samples/s of the launches of the best configuration and of each rival, the second best first.

    ``configurations_tried``: the winner is the best of so many configurations of its strategy.
    """

    winner: Sequence[float]
    rivals: Sequence[Sequence[float]]
    configurations_tried: int = 1


@dataclass(frozen=True)
class WinnerVerdict:
    """``ratio`` is the winner's throughput over that of the first rival, with its 95 % interval."""

    sure: Classification
    why: str
    settle: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


def judge_winners(tests: Sequence[WinnerTest], threshold: float) -> list[WinnerVerdict]:
    """Return a verdict for each test; ``threshold`` is the smallest difference that counts, as a share (0.02).

    A winner is significant if it beats every rival: the largest p-value of these comparisons, doubled since the same
    launches chose the winner (Gutmann and Maymin 1987: sufficient for any number of rivals), times
    ``configurations_tried`` (Bonferroni), at ``SIGNIFICANCE_LEVEL`` for all tests together (Holm 1979).
    """
    shifts = [_least_significant(test) for test in tests]
    p_values = iter(adjusted_p_values([shift for shift in shifts if shift is not None], greater=True))
    return [
        _too_few_launches(test)
        if shift is None
        else _winner_verdict(test, shift, min(1.0, 2 * test.configurations_tried * next(p_values)), threshold)
        for test, shift in zip(tests, shifts, strict=True)
    ]


def _least_significant(test: WinnerTest) -> LogRatioEstimate | None:
    """The shift from the first rival, with the largest p-values of all rivals; ``None`` for too few launches."""
    if not test.rivals or min(map(len, [test.winner, *test.rivals])) < MIN_LAUNCHES_T_TEST:
        return None
    shifts = [estimate_log_ratio(rival, test.winner) for rival in test.rivals]
    ranks = [shift.ranks for shift in shifts if shift.ranks is not None]
    # Rank tests that leave out a rival do not cover the claim.
    combined = _combine(ranks) if len(ranks) == len(shifts) else None
    return shifts[0]._replace(welch=_combine([shift.welch for shift in shifts]), ranks=combined)


def _combine(p_values: Sequence[PValues]) -> PValues:
    return PValues(max(p.greater for p in p_values), min(p.less for p in p_values))


def _too_few_launches(test: WinnerTest) -> WinnerVerdict:
    ratio = statistics.median(test.winner) / statistics.median(test.rivals[0]) if test.rivals else None
    why = f"not enough repeats ({_launch_counts(test)}; at least {MIN_LAUNCHES_T_TEST} each)"
    return WinnerVerdict(INCONCLUSIVE, why, f"set `repeats = {MIN_LAUNCHES_RANK_TEST}` in the sweep", ratio)


def _launch_counts(test: WinnerTest) -> str:
    """``1 launch each``, ``5 launches against 2``."""
    fewest = min(map(len, test.rivals), default=0)
    launches = pluralize(len(test.winner), "launch", "launches")
    return f"{launches} each" if len(test.winner) == fewest else f"{launches} against {fewest}"


def _winner_verdict(test: WinnerTest, shift: LogRatioEstimate, p_value: float, threshold: float) -> WinnerVerdict:
    ratio, low, high = (math.exp(value) for value in (shift.estimate, shift.low, shift.high))
    counts = _launch_counts(test)
    verdict = classify(shift, p_value, threshold)
    if verdict == SIGNIFICANT:
        names = "Welch's and rank tests" if shift.ranks is not None else "Welch's test"
        p_text = f"p = {p_value:.2g}" if p_value >= 1e-4 else "p < 0.0001"
        return WinnerVerdict(SIGNIFICANT, f"{counts}, {names}, {p_text}", "", ratio, low, high)
    if verdict == EQUIVALENT and threshold:
        why = f"{counts}, the 95 % interval is within {threshold:.0%}"
        return WinnerVerdict(EQUIVALENT, why, "", ratio, low, high)
    why = "the difference may be chance"
    if p_value <= SIGNIFICANCE_LEVEL:
        why = f"the difference may be below {threshold:.0%}"
    return WinnerVerdict(INCONCLUSIVE, f"{counts}, {why}", _launches_suggestion(test), ratio, low, high)


def _launches_suggestion(test: WinnerTest) -> str:
    count = launches_needed(test.rivals[0], test.winner)
    if count is None:
        return f"more than {_MAX_LAUNCHES} launches each, if the difference is as measured: choose either"
    # The present number of launches was not enough.
    count = max(count, min(len(test.winner), len(test.rivals[0])) + 1, MIN_LAUNCHES_RANK_TEST)
    return f"about {count} launches each, if the difference is as measured"


def launches_needed(base: Sequence[float], new: Sequence[float]) -> int | None:
    """Return the launches per side that would find the difference of two samples in four of five cases.

    The normal approximation of the two-sample t-test's power, on logarithms; ``None`` above ``_MAX_LAUNCHES``.
    """
    logs = [[math.log(value) for value in side] for side in (base, new)]
    difference = abs(statistics.fmean(logs[0]) - statistics.fmean(logs[1]))
    spread = math.sqrt(statistics.fmean([statistics.variance(side) for side in logs]))
    for count in range(MIN_LAUNCHES_T_TEST, _MAX_LAUNCHES + 1):
        if difference >= spread * math.sqrt(2 / count) * (t_quantile_975(2 * count - 2) + _NORMAL_80):
            return count
    return None
