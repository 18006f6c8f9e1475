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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import scipy

from hpcbench.units import format_percent, pluralize

SIGNIFICANT: Literal["significant"] = "significant"
EQUIVALENT: Literal["equivalent"] = "equivalent"
INCONCLUSIVE: Literal["inconclusive"] = "inconclusive"
Classification = Literal["significant", "equivalent", "inconclusive"]
SIGNIFICANCE_LEVEL = 0.05
"""Family-wise error rate of all rows of a comparison, or of all findings of one kind, in one direction."""
MIN_LAUNCHES_RANK_TEST = 5
"""Launches per side for a rank test; fewer, but at least ``MIN_LAUNCHES_T_TEST``, give Welch's test alone."""
MIN_LAUNCHES_T_TEST = 3
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


def adjusted_p_values(shifts: Sequence[LogRatioEstimate], *, greater: bool, among: int | None = None) -> list[float]:
    """Return for each shift its one-sided p-value, adjusted for all ``shifts``, or for ``among`` tests.

    The tests that are not among ``shifts`` must have larger p-values.

    Holm's correction of Welch's tests, and separately of the rank tests of shifts that have them; of both the smaller
    one, doubled. Rank tests of few launches cannot reach the small p-values that many configurations need; Welch's
    can, but are sensitive to outliers: a rank test above ``SIGNIFICANCE_LEVEL`` vetoes.
    """
    side = 0 if greater else 1
    welch = holm_adjust([shift.welch[side] for shift in shifts], among)
    rank_p_values = {number: shift.ranks[side] for number, shift in enumerate(shifts) if shift.ranks is not None}
    if not rank_p_values:
        return welch
    ranks = dict(zip(rank_p_values, holm_adjust([*rank_p_values.values()], among), strict=True))
    return [
        1.0 if rank_p_values.get(number, 0.0) > SIGNIFICANCE_LEVEL else min(1.0, 2 * min(p, ranks.get(number, p)))
        for number, p in enumerate(welch)
    ]


def holm_adjust(p_values: Sequence[float], among: int | None = None) -> list[float]:
    """Return Holm's (1979) adjusted p-values, in the order of ``p_values``: the smallest of ``among`` tests, or all."""
    count = len(p_values) if among is None else among
    order = sorted(range(len(p_values)), key=lambda number: p_values[number])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, number in enumerate(order):
        largest = max(largest, min(1.0, (count - rank) * p_values[number]))
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
    # So many of the smallest differences, and of the largest, are outside: the normal approximation of rank sums.
    spread = math.sqrt(len(differences) * (len(base) + len(new) + 1) / 12)
    outside = math.floor(len(differences) / 2 - _NORMAL_975 * spread - 0.5)
    return LogRatioEstimate(
        statistics.median(differences), differences[outside], differences[-1 - outside], welch,
        rank_sum_test(log_base, log_new),
    )  # fmt: skip


def pooled_spread(samples: Iterable[tuple[str, Sequence[float]]]) -> dict[str, tuple[float, int]]:
    """Return by group the standard deviation of a logarithm, pooled over the samples, and its degrees of freedom.

    Two or three launches of one configuration do not determine a spread of their own.

    Args:
        samples: the name of the group, such as a cluster, and positive values; a sample of one value adds nothing.
    """
    squares: dict[str, float] = defaultdict(float)
    freedom: dict[str, int] = defaultdict(int)
    for group, values in samples:
        if len(values) > 1:
            freedom[group] += len(values) - 1
            squares[group] += statistics.variance(map(math.log, values)) * (len(values) - 1)
    return {group: (math.sqrt(squares[group] / freedom[group]), freedom[group]) for group in freedom}


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
    # By scipy.special: ``scipy.stats.ttest_ind`` takes 50 times as long, and a report has thousands of tests.
    half = float(scipy.special.stdtrit(freedom, 0.975)) * error
    p_values = PValues(
        *(float(scipy.special.stdtr(freedom, score)) for score in (-difference / error, difference / error))
    )
    return difference, difference - half, difference + half, p_values


def rank_sum_test(base: Sequence[float], new: Sequence[float]) -> PValues:
    """Wilcoxon's rank-sum test (1945) of ``new`` against ``base``.

    Exact where a side has at most 8 launches and no two are equal, else the normal approximation.
    """
    ordered = sorted([*base, *new])
    return _rank_sum_p_values(
        *(tuple(sorted(bisect.bisect_left(ordered, value) for value in side)) for side in (base, new))
    )


@functools.lru_cache(maxsize=1000)
def _rank_sum_p_values(base: tuple[int, ...], new: tuple[int, ...]) -> PValues:
    """The test of ranks. It takes scipy a millisecond; five against five have 252 orders."""
    sides = ("greater", "less")
    return PValues(*(float(scipy.stats.mannwhitneyu(new, base, alternative=side).pvalue) for side in sides))


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
        why = f"{counts}, the 95 % interval is within {format_percent(threshold)}"
        return WinnerVerdict(EQUIVALENT, why, "", ratio, low, high)
    why = "the difference may be chance"
    if p_value <= SIGNIFICANCE_LEVEL:
        why = f"the difference may be below {format_percent(threshold)}"
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
        if difference >= spread * math.sqrt(2 / count) * (scipy.special.stdtrit(2 * count - 2, 0.975) + _NORMAL_80):
            return count
    return None
