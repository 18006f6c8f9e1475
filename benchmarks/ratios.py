"""Intervals of ratios from pairs that were measured one after the other."""

from __future__ import annotations

import random
import statistics


def median_interval(values: list[float], resamples: int = 2000) -> tuple[float, float, float]:
    """The median of ``values`` and the 95 % bootstrap interval of it, over pairs."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(resamples))
    return statistics.median(values), medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
