"""Significance tests of the best configuration against its rivals, corrected for selection and multiplicity.

The unit is the launch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpcbench.report import hypothesis_tests
from hpcbench.report.phrases import pluralize

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

    sure: hypothesis_tests.Classification
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
    p_values = iter(hypothesis_tests.adjusted_p_values([shift for shift in shifts if shift is not None], greater=True))
    return [
        _too_few_launches(test)
        if shift is None
        else _winner_verdict(test, shift, min(1.0, 2 * test.configurations_tried * next(p_values)), threshold)
        for test, shift in zip(tests, shifts, strict=True)
    ]


def _least_significant(test: WinnerTest) -> hypothesis_tests.LogRatioEstimate | None:
    """The shift from the first rival, with the largest p-values of all rivals; ``None`` for too few launches."""
    if not test.rivals or min(map(len, [test.winner, *test.rivals])) < hypothesis_tests.MIN_LAUNCHES_T_TEST:
        return None
    shifts = [hypothesis_tests.estimate_log_ratio(rival, test.winner) for rival in test.rivals]
    ranks = [shift.ranks for shift in shifts if shift.ranks is not None]
    # Rank tests that leave out a rival do not cover the claim.
    combined = _combine(ranks) if len(ranks) == len(shifts) else None
    return shifts[0]._replace(welch=_combine([shift.welch for shift in shifts]), ranks=combined)


def _combine(p_values: Sequence[hypothesis_tests.PValues]) -> hypothesis_tests.PValues:
    return hypothesis_tests.PValues(max(p.greater for p in p_values), min(p.less for p in p_values))


def _too_few_launches(test: WinnerTest) -> WinnerVerdict:
    ratio = statistics.median(test.winner) / statistics.median(test.rivals[0]) if test.rivals else None
    why = f"not enough repeats ({_launch_counts(test)}; at least {hypothesis_tests.MIN_LAUNCHES_T_TEST} each)"
    return WinnerVerdict(
        hypothesis_tests.INCONCLUSIVE,
        why,
        f"set `repeats = {hypothesis_tests.MIN_LAUNCHES_RANK_TEST}` in the sweep",
        ratio,
    )


def _launch_counts(test: WinnerTest) -> str:
    """``1 launch each``, ``5 launches against 2``."""
    fewest = min(map(len, test.rivals), default=0)
    launches = pluralize(len(test.winner), "launch", "launches")
    return f"{launches} each" if len(test.winner) == fewest else f"{launches} against {fewest}"


def _winner_verdict(
    test: WinnerTest, shift: hypothesis_tests.LogRatioEstimate, p_value: float, threshold: float
) -> WinnerVerdict:
    ratio, low, high = (math.exp(value) for value in (shift.estimate, shift.low, shift.high))
    counts = _launch_counts(test)
    verdict = hypothesis_tests.classify(shift, p_value, threshold)
    if verdict == hypothesis_tests.SIGNIFICANT:
        names = "Welch's and rank tests" if shift.ranks is not None else "Welch's test"
        p_text = f"p = {p_value:.2g}" if p_value >= 1e-4 else "p < 0.0001"
        return WinnerVerdict(hypothesis_tests.SIGNIFICANT, f"{counts}, {names}, {p_text}", "", ratio, low, high)
    if verdict == hypothesis_tests.EQUIVALENT and threshold:
        why = f"{counts}, the 95 % interval is within {threshold:.0%}"
        return WinnerVerdict(hypothesis_tests.EQUIVALENT, why, "", ratio, low, high)
    why = "the difference may be chance"
    if p_value <= hypothesis_tests.SIGNIFICANCE_LEVEL:
        why = f"the difference may be below {threshold:.0%}"
    return WinnerVerdict(
        hypothesis_tests.INCONCLUSIVE, f"{counts}, {why}", _launches_suggestion(test), ratio, low, high
    )


def _launches_suggestion(test: WinnerTest) -> str:
    count = launches_needed(test.rivals[0], test.winner)
    if count is None:
        return f"more than {_MAX_LAUNCHES} launches each, if the difference is as measured: choose either"
    # The present number of launches was not enough.
    count = max(count, min(len(test.winner), len(test.rivals[0])) + 1, hypothesis_tests.MIN_LAUNCHES_RANK_TEST)
    return f"about {count} launches each, if the difference is as measured"


def launches_needed(base: Sequence[float], new: Sequence[float]) -> int | None:
    """Return the launches per side that would find the difference of two samples in four of five cases.

    The normal approximation of the two-sample t-test's power, on logarithms; ``None`` above ``_MAX_LAUNCHES``.
    """
    logs = [[math.log(value) for value in side] for side in (base, new)]
    difference = abs(statistics.fmean(logs[0]) - statistics.fmean(logs[1]))
    spread = math.sqrt(statistics.fmean([statistics.variance(side) for side in logs]))
    for count in range(hypothesis_tests.MIN_LAUNCHES_T_TEST, _MAX_LAUNCHES + 1):
        if difference >= spread * math.sqrt(2 / count) * (hypothesis_tests.t_quantile_975(2 * count - 2) + _NORMAL_80):
            return count
    return None
