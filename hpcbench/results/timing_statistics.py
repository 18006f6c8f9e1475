"""Statistics of step times (quantiles, bootstrap intervals, warm-up, drift, outliers), the timed intervals of ranks,
and arithmetic of time intervals.
Pure Python with a fixed seed: equal samples give equal results on every machine."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcbench.results.schema import RankResult, StepTimeStatistics
from hpcbench.units import format_percent

LAUNCH_S = 5e-6
"""Host time that a kernel takes until it is enqueued on cuda. A typical time, not a measured one."""

OPERATOR_S = 10e-6
"""Host time of an operator with its launch: Python, autograd, the dispatcher, the allocator. Operators of eager torch
take 8 to 15 us, and more on slow processors; not a measured one."""

TimeInterval = tuple[int, int]
"""(begin, end)."""


def union_intervals(intervals: Iterable[TimeInterval]) -> list[TimeInterval]:
    """Return the union of ``intervals`` as ascending intervals that neither overlap nor touch.

    >>> union_intervals([(5, 7), (0, 2), (1, 3), (3, 4)])
    [(0, 4), (5, 7)]
    """
    joined: list[TimeInterval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def subtract_intervals(intervals: Iterable[TimeInterval], without: Iterable[TimeInterval]) -> list[TimeInterval]:
    """Return the parts of ``intervals`` that are in no interval of ``without``, ascending.

    >>> subtract_intervals([(0, 10)], [(2, 3), (8, 20)])
    [(0, 2), (3, 8)]
    """
    holes = union_intervals(without)
    left: list[TimeInterval] = []
    first = 0
    for interval in union_intervals(intervals):
        begin, end = interval
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        for hole_begin, hole_end in holes[first:]:
            if hole_begin >= end:
                break
            if hole_begin > begin:
                left.append((begin, hole_begin))
            begin = max(begin, hole_end)
        if begin < end:
            left.append((begin, end))
    return left


def clip_intervals(intervals: Iterable[TimeInterval], window: TimeInterval) -> list[TimeInterval]:
    """The points of ``intervals`` within ``window``."""
    low, high = window
    return union_intervals((max(begin, low), min(end, high)) for begin, end in intervals)


def covered_seconds(intervals: Iterable[TimeInterval]) -> float:
    """Seconds that ``intervals`` cover, each point once."""
    return sum(end - begin for begin, end in union_intervals(intervals)) / 1e9


def slowest_rank_times_s(ranks: Mapping[int, RankResult]) -> list[float]:
    """The longest time of any rank (s), for every timed step that all ranks have ended."""
    return [max(times) for times in zip(*(result.step_times_s for result in ranks.values()), strict=False)]


def timed_intervals_s(ranks: Mapping[int, RankResult], skipped: int) -> dict[int, float]:
    """The timed interval of each rank (s), over the steps that all ranks have ended, without the first ``skipped``.

    A rank's steps follow each other without a gap between evaluations, so the sum of their times is the interval. The
    longest of these intervals is at most the sum of ``slowest_rank_times_s``: ranks do not begin a step together, and
    a rank that is late in one step is short in the next.
    """
    ended = min((len(result.step_times_s) for result in ranks.values()), default=0)
    return {rank: math.fsum(result.step_times_s[skipped:ended]) for rank, result in ranks.items() if ended > skipped}


def straggler_statistics(ranks: Mapping[int, RankResult], skipped: int) -> dict[str, Any]:
    """``slowest_rank``, ``slowest_rank_share`` and ``rank_max_over_median`` of a run's metrics; empty for one rank."""
    numbers = sorted(ranks)
    steps = list(zip(*(ranks[rank].step_times_s for rank in numbers), strict=False))[skipped:]
    if len(numbers) < 2 or not steps:
        return {}
    ((slowest, count),) = Counter(numbers[times.index(max(times))] for times in steps).most_common(1)
    ratios = [max(times) / middle for times in steps if (middle := statistics.median(times)) > 0]
    most = statistics.median(ratios) if ratios else None
    return {"slowest_rank": slowest, "slowest_rank_share": count / len(steps), "rank_max_over_median": most}


BOOTSTRAP_RESAMPLES = 400
_BOOTSTRAP_SEED = 20220


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` of an ascending sample lies, linear between its neighbours."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def bootstrap_median_interval(values: Sequence[float], resamples: int = BOOTSTRAP_RESAMPLES) -> tuple[float, float]:
    """95 % interval of the median by the moving-block bootstrap.

    Successive steps are correlated (a noisy neighbour lasts), so blocks of about n^(1/3) steps are drawn, not
    single ones (Kuensch 1989; the length by Hall, Horowitz and Jing 1995). The seed is fixed: the same steps give the
    same interval.
    """
    count = len(values)
    if count < 2:
        return values[0], values[0]
    length = max(1, round(count ** (1 / 3)))
    blocks = math.ceil(count / length)
    source = random.Random(_BOOTSTRAP_SEED)  # noqa: S311 - resampling, not secrecy
    medians = []
    for _ in range(resamples):
        drawn: list[float] = []
        for _ in range(blocks):
            start = source.randrange(count - length + 1)
            drawn.extend(values[start : start + length])
        medians.append(statistics.median(drawn[:count]))
    medians.sort()
    return quantile(medians, 0.025), quantile(medians, 0.975)


def step_time_statistics(values: Sequence[float]) -> StepTimeStatistics | None:
    """``values`` in one record; ``None`` where there are none. ``std`` is the sample's (n - 1), 0 for one value."""
    if not values:
        return None
    ordered = sorted(values)
    low, high = bootstrap_median_interval(values)
    return StepTimeStatistics(
        median=statistics.median(ordered),
        mean=math.fsum(ordered) / len(ordered),
        std=statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        p10=quantile(ordered, 0.1),
        p90=quantile(ordered, 0.9),
        min=ordered[0],
        max=ordered[-1],
        ci95_low=low,
        ci95_high=high,
    )


MIN_STEPS = 10
"""Fewer do not show warm-up, drift, outliers or noise."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of normal values over their median absolute deviation."""
WARMUP_SIGMAS = 5.0
WARMUP_MIN_EXCESS = 0.05
OUTLIER_SIGMAS = 5.0
OUTLIER_MIN_EXCESS = 0.05
MAX_OUTLIER_FRACTION = 0.05
MAX_DRIFT_FRACTION = 0.05
DRIFT_SIGNIFICANCE = 0.05
MAX_INTERVAL_FRACTION = 0.10
_MAX_DRIFT_POINTS = 250
"""Longer runs are thinned to so many block medians: a slope of all pairs takes quadratic time."""


def count_warmup_steps(times_s: Sequence[float]) -> int | None:
    """Steps at the beginning that were still slower; ``None`` where there are too few steps.

    The second half is what the run settled at. There is warm-up where the first step is longer than every step of it
    and above its median by ``WARMUP_SIGMAS`` robust standard deviations and ``WARMUP_MIN_EXCESS`` of it; it lasts
    until two
    steps in a row are no longer that much above the median, and at most half of all steps.
    """
    count = len(times_s)
    if count < MIN_STEPS:
        return None
    settled = times_s[count // 2 :]
    if times_s[0] <= max(settled):
        return 0
    limit = _outlier_limit(settled, WARMUP_SIGMAS, WARMUP_MIN_EXCESS)
    for number in range(count // 2):
        if times_s[number] <= limit and times_s[number + 1] <= limit:
            return number
    return count // 2


def count_outliers(times_s: Sequence[float]) -> int | None:
    """Return the number of outliers in ``times_s`` (seconds); ``None`` for fewer than ``MIN_STEPS`` steps.

    An outlier is above the median by ``OUTLIER_SIGMAS`` robust standard deviations and by ``OUTLIER_MIN_EXCESS`` of it.
    """
    if len(times_s) < MIN_STEPS:
        return None
    limit = _outlier_limit(times_s, OUTLIER_SIGMAS, OUTLIER_MIN_EXCESS)
    return sum(value > limit for value in times_s)


def relative_drift(times_s: Sequence[float]) -> float | None:
    """Change from the first to the last step as a share of the median: the slope of Theil and Sen times their distance.

    The median of the slopes between all pairs; a third of the steps may be outliers without moving it. ``None`` for
    fewer than ``MIN_STEPS`` steps.
    """
    if len(times_s) < MIN_STEPS:
        return None
    points = block_medians(times_s, _MAX_DRIFT_POINTS)
    slopes = [
        (later - earlier) / (second - first)
        for (first, earlier), (second, later) in itertools.combinations(enumerate(points), 2)
    ]
    middle = statistics.median(times_s)
    return statistics.median(slopes) * (len(points) - 1) / middle if middle > 0 else None


def mann_kendall_p_value(times_s: Sequence[float]) -> float:
    """Two-sided probability of so much order by chance, by Mann and Kendall: ties counted, normal approximation."""
    points = block_medians(times_s, _MAX_DRIFT_POINTS)
    count = len(points)
    score = sum((later > earlier) - (later < earlier) for earlier, later in itertools.combinations(points, 2))
    ties = [len(list(group)) for _, group in itertools.groupby(sorted(points))]
    variance = (count * (count - 1) * (2 * count + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if score == 0 or variance <= 0:
        return 1.0
    return math.erfc((abs(score) - 1) / math.sqrt(2 * variance))


def block_medians(values: Sequence[float], points: int) -> list[float]:
    """Medians of equally long blocks, at most ``points`` of them; a shorter last block is left out."""
    length = math.ceil(len(values) / points)
    whole = len(values) // length
    return [statistics.median(values[block * length : (block + 1) * length]) for block in range(whole)]


def make_steadiness_warnings(times_s: Sequence[float], spread: StepTimeStatistics | None) -> list[str]:
    """Return the warnings about the median. The texts hold no figures, so that equal ones of many runs are merged."""
    change, count = relative_drift(times_s), count_outliers(times_s)
    if count is None or spread is None:
        return []
    warnings = []
    if change is not None and abs(change) > MAX_DRIFT_FRACTION and mann_kendall_p_value(times_s) < DRIFT_SIGNIFICANCE:
        way = "slower" if change > 0 else "faster"
        warnings.append(f"drift above {format_percent(MAX_DRIFT_FRACTION)}: steps became {way} during the run")
    if count > MAX_OUTLIER_FRACTION * len(times_s):
        warnings.append(
            f"more than {format_percent(MAX_OUTLIER_FRACTION)} of the steps are outliers: far slower than the median"
        )
    if spread.ci95_high - spread.ci95_low > MAX_INTERVAL_FRACTION * spread.median:
        warnings.append(
            f"noise above {format_percent(MAX_INTERVAL_FRACTION)}: the interval of the median step time is wider than "
            "that share of it"
        )
    return warnings


def step_time_metrics(times_s: Sequence[float], warnings: list[str]) -> dict[str, Any]:
    """Return the metrics of a run's steady step times; reasons to doubt them are appended to ``warnings``."""
    figures = step_time_statistics(times_s)
    warnings += make_steadiness_warnings(times_s, figures)
    return {"step_time_s": figures, "outlier_steps": count_outliers(times_s), "drift": relative_drift(times_s)}


def make_warmup_warning(slow_steps: int, timed: int, warmup_steps: int) -> str:
    """Return the warning with the warm-up that makes all timed steps of the next run steady."""
    return (
        f"the first {slow_steps} of {timed} timed steps were still slower than the later ones and are excluded: "
        f"set warmup_steps = {warmup_steps + slow_steps} or more"
    )


def _outlier_limit(values: Sequence[float], sigmas: float, floor: float) -> float:
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return middle + max(sigmas * MAD_TO_SIGMA * deviation, floor * middle)
