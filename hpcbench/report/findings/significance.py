"""Significance tests of the best configuration against its rivals, corrected for selection and multiplicity.

The unit is the launch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpcbench.report.comparison import SIGNIFICANCE_LEVEL, adjusted_chances
from hpcbench.report.findings.finding import EQUIVALENT, INCONCLUSIVE, SIGNIFICANT, Certainty
from hpcbench.report.hypothesis_tests import (
    MIN_LAUNCHES_RANK_TEST,
    MIN_LAUNCHES_T_TEST,
    LogRatioEstimate,
    PValues,
    estimate_log_ratio,
    t_quantile_975,
)

_NORMAL_80 = statistics.NormalDist().inv_cdf(0.8)
_MAX_LAUNCHES = 100
"""Nobody repeats a run more often to settle a difference that small."""


@dataclass(frozen=True)
class WinnerTest:
    """The launches of the one that was found best, and of each of its rivals; the next best is the first.

    ``choices`` is among how many that are one to the reader (configurations of a strategy) the winner was the best.
    """

    winner: Sequence[float]
    rivals: Sequence[Sequence[float]]
    choices: int = 1


@dataclass(frozen=True)
class WinnerVerdict:
    """The ratio is that of the winner over the first rival."""

    sure: Certainty
    why: str
    settle: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


def judge_winners(duels: Sequence[WinnerTest], threshold: float) -> list[WinnerVerdict]:
    """A verdict for each duel; ``threshold`` is the least difference that counts, as a share (0.02).

    A winner is told where it beats every rival: the least sure of these comparisons counts, doubled since the winner
    was chosen by the same launches (Gutmann and Maymin 1987: no more is needed, however many the rivals are), times the
    ``choices`` that it was (Bonferroni), and on ``SIGNIFICANCE_LEVEL`` for all duels together (Holm 1979).
    """
    shifts = [_least_significant(duel) for duel in duels]
    chances = iter(adjusted_chances([one for one in shifts if one is not None], more=True))
    return [
        _too_few_launches(duel)
        if found is None
        else _winner_verdict(duel, found, min(1.0, 2 * duel.choices * next(chances)), threshold)
        for duel, found in zip(duels, shifts, strict=True)
    ]


def _least_significant(duel: WinnerTest) -> LogRatioEstimate | None:
    """The shift from the first rival, with the least sure tests of all; ``None`` where launches are too few."""
    if not duel.rivals or min(map(len, [duel.winner, *duel.rivals])) < MIN_LAUNCHES_T_TEST:
        return None
    shifts = [estimate_log_ratio(rival, duel.winner) for rival in duel.rivals]
    welch = PValues(max(one.welch.more for one in shifts), min(one.welch.less for one in shifts))
    ranks = [one.ranks for one in shifts if one.ranks is not None]
    # Ranks that leave a rival out say nothing of the whole.
    whole = len(ranks) == len(shifts)
    ranked = PValues(max(one.more for one in ranks), min(one.less for one in ranks)) if whole else None
    return shifts[0]._replace(welch=welch, ranks=ranked)


def _too_few_launches(duel: WinnerTest) -> WinnerVerdict:
    counts = [len(duel.winner), *map(len, duel.rivals)]
    ratio = statistics.median(duel.winner) / statistics.median(duel.rivals[0]) if duel.rivals else None
    why = f"{_launch_counts(counts)}; {MIN_LAUNCHES_T_TEST} a side are needed"
    return WinnerVerdict(INCONCLUSIVE, why, f"repeats = {MIN_LAUNCHES_RANK_TEST} in the sweep", ratio)


def _launch_counts(counts: Sequence[int]) -> str:
    """``1 launch each``, ``5 launches against 2``."""
    fewest = min(counts[1:], default=0)
    if counts[0] == fewest:
        return f"{fewest} launch{'es' * (fewest != 1)} each"
    return f"{counts[0]} launch{'es' * (counts[0] != 1)} against {fewest}"


def _winner_verdict(duel: WinnerTest, found: LogRatioEstimate, chance: float, threshold: float) -> WinnerVerdict:
    ratio, low, high = (math.exp(one) for one in (found.estimate, found.low, found.high))
    counts = _launch_counts([len(duel.winner), *map(len, duel.rivals)])
    test = "Welch's and rank tests" if found.ranks is not None else "Welch's test"
    least = math.log1p(threshold)
    if chance <= SIGNIFICANCE_LEVEL and found.estimate >= least:
        shown = f"p = {chance:.2g}" if chance >= 1e-4 else "p < 0.0001"
        return WinnerVerdict(SIGNIFICANT, f"{counts}, {test}, {shown}", "", ratio, low, high)
    if threshold and -least <= found.low and found.high <= least:
        why = f"{counts}, the 95 % interval is within {threshold:.0%}"
        return WinnerVerdict(EQUIVALENT, why, "", ratio, low, high)
    why = f"{counts}, the difference may be chance"
    if chance <= SIGNIFICANCE_LEVEL:
        why = f"{counts}, the difference may be under {threshold:.0%}"
    return WinnerVerdict(INCONCLUSIVE, why, _launches_suggestion(duel), ratio, low, high)


def _launches_suggestion(duel: WinnerTest) -> str:
    count = launches_needed(duel.rivals[0], duel.winner)
    if count is None:
        return f"more than {_MAX_LAUNCHES} launches each, if the difference is as measured: take either"
    # What was measured already did not do.
    count = max(count, min(len(duel.winner), len(duel.rivals[0])) + 1, MIN_LAUNCHES_RANK_TEST)
    return f"some {count} launches each, if the difference is as measured"


def launches_needed(one: Sequence[float], other: Sequence[float]) -> int | None:
    """So many launches a side would tell the difference of two samples in four of five cases; ``None`` for too many.

    The normal approximation of the two-sample t-test's power, on logarithms.
    """
    logs = [[math.log(value) for value in side] for side in (one, other)]
    difference = abs(statistics.fmean(logs[0]) - statistics.fmean(logs[1]))
    spread = math.sqrt(statistics.fmean([statistics.variance(side) for side in logs]))
    for count in range(MIN_LAUNCHES_T_TEST, _MAX_LAUNCHES + 1):
        if difference >= spread * math.sqrt(2 / count) * (t_quantile_975(2 * count - 2) + _NORMAL_80):
            return count
    return None
