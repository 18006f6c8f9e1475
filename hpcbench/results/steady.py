"""Which timed steps count, and whether they were steady. Pure Python; thresholds stand here and nowhere else."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from hpcbench.results.schema import Spread

MIN_STEPS = 10
"""Fewer say nothing about warm-up, drift, outliers or noise."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of normal values over their median absolute deviation."""
WARMUP_SIGMAS = 5.0
WARMUP_FLOOR = 0.05
OUTLIER_SIGMAS = 5.0
OUTLIER_FLOOR = 0.05
OUTLIER_SHARE = 0.05
DRIFT_SHARE = 0.05
DRIFT_SIGNIFICANCE = 0.05
NOISE_WIDTH = 0.10
_DRIFT_POINTS = 250
"""Longer runs are thinned to so many block medians: a slope of all pairs takes quadratic time."""


def warmup_found(times_s: Sequence[float]) -> int | None:
    """Steps at the beginning that were still slower; ``None`` where there are too few to tell.

    The second half is what the run settled at. There is warm-up where the first step is longer than every step of it
    and above its median by ``WARMUP_SIGMAS`` robust standard deviations and ``WARMUP_FLOOR`` of it; it lasts until two
    steps in a row are no longer that much above the median, and at most half of all steps.
    """
    count = len(times_s)
    if count < MIN_STEPS:
        return None
    settled = times_s[count // 2 :]
    if times_s[0] <= max(settled):
        return 0
    limit = _upper(settled, WARMUP_SIGMAS, WARMUP_FLOOR)
    for number in range(count // 2):
        if times_s[number] <= limit and times_s[number + 1] <= limit:
            return number
    return count // 2


def outliers(times_s: Sequence[float]) -> int | None:
    """Steps above the median by ``OUTLIER_SIGMAS`` robust standard deviations and by ``OUTLIER_FLOOR`` of it."""
    if len(times_s) < MIN_STEPS:
        return None
    limit = _upper(times_s, OUTLIER_SIGMAS, OUTLIER_FLOOR)
    return sum(value > limit for value in times_s)


def drift(times_s: Sequence[float]) -> float | None:
    """Change from the first to the last step as a share of the median: the slope of Theil and Sen times their distance.

    The median of the slopes between all pairs; a third of the steps may be outliers without moving it.
    """
    if len(times_s) < MIN_STEPS:
        return None
    points = thinned(times_s, _DRIFT_POINTS)
    slopes = [
        (later - earlier) / (second - first)
        for (first, earlier), (second, later) in itertools.combinations(enumerate(points), 2)
    ]
    middle = statistics.median(times_s)
    return statistics.median(slopes) * (len(points) - 1) / middle if middle > 0 else None


def trend_p_value(times_s: Sequence[float]) -> float:
    """Two-sided probability of so much order by chance, by Mann and Kendall: ties counted, normal approximation."""
    points = thinned(times_s, _DRIFT_POINTS)
    count = len(points)
    score = sum((later > earlier) - (later < earlier) for earlier, later in itertools.combinations(points, 2))
    ties = [len(list(group)) for _, group in itertools.groupby(sorted(points))]
    variance = (count * (count - 1) * (2 * count + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if score == 0 or variance <= 0:
        return 1.0
    return math.erfc((abs(score) - 1) / math.sqrt(2 * variance))


def thinned(values: Sequence[float], points: int) -> list[float]:
    """Medians of equally long blocks, at most ``points`` of them; a shorter last block is left out."""
    length = math.ceil(len(values) / points)
    whole = len(values) // length
    return [statistics.median(values[block * length : (block + 1) * length]) for block in range(whole)]


def steadiness_warnings(times_s: Sequence[float], spread: Spread | None) -> list[str]:
    """What a reader of the median must know. The texts hold no figures, so that equal ones of many runs are one."""
    change, count = drift(times_s), outliers(times_s)
    if count is None or spread is None:
        return []
    found = []
    if change is not None and abs(change) > DRIFT_SHARE and trend_p_value(times_s) < DRIFT_SIGNIFICANCE:
        way = "slower" if change > 0 else "faster"
        found.append(f"drift above {DRIFT_SHARE:.0%}: steps became {way} during the run")
    if count > OUTLIER_SHARE * len(times_s):
        found.append(f"more than {OUTLIER_SHARE:.0%} of the steps are outliers: far slower than the median")
    if spread.ci95_high - spread.ci95_low > NOISE_WIDTH * spread.median:
        found.append(
            f"noise above {NOISE_WIDTH:.0%}: the interval of the median step time is wider than that share of it"
        )
    return found


def warmup_warning(found: int, timed: int, warmup_steps: int) -> str:
    """What to set so that the next run's timed steps are all steady."""
    return (
        f"the first {found} of {timed} timed steps were still slower than the later ones and are in no figure: "
        f"set warmup_steps = {warmup_steps + found} or more"
    )


def _upper(values: Sequence[float], sigmas: float, floor: float) -> float:
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return middle + max(sigmas * MAD_TO_SIGMA * deviation, floor * middle)
