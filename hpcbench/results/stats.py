"""Spread of a sample: quantiles, and how sure the median is. Pure Python, the same numbers on every machine."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

from hpcbench.results.schema import Spread

RESAMPLES = 400
_SEED = 20220


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` of an ascending sample lies, linear between its neighbours."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median_interval(values: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % interval of the median by the moving-block bootstrap.

    Steps that follow each other are alike (a noisy neighbour lasts), so blocks of about n^(1/3) steps are drawn, not
    single ones (Kuensch 1989; the length by Hall, Horowitz and Jing 1995). The seed is fixed: the same steps give the
    same interval.
    """
    count = len(values)
    if count < 2:
        return values[0], values[0]
    length = max(1, round(count ** (1 / 3)))
    blocks = math.ceil(count / length)
    source = random.Random(_SEED)  # noqa: S311 - resampling, not secrecy
    medians = []
    for _ in range(resamples):
        drawn: list[float] = []
        for _ in range(blocks):
            start = source.randrange(count - length + 1)
            drawn.extend(values[start : start + length])
        medians.append(statistics.median(drawn[:count]))
    medians.sort()
    return quantile(medians, 0.025), quantile(medians, 0.975)


def spread(values: Sequence[float]) -> Spread | None:
    """``values`` in one record; ``None`` where there are none. ``std`` is the sample's (n - 1), 0 for one value."""
    if not values:
        return None
    ordered = sorted(values)
    low, high = median_interval(values)
    return Spread(
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
