"""Configurations that were measured, and what was said of each before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import log
from statistics import median, stdev

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.results.schema import OK
from hpcbench.results.stats import quantile

COUNTED = frozenset({"oom", "failed", "timeout"})
"""Ends that count against whoever said that the run would go well; the others are nobody's prediction."""
PARTS = ("compute_s", "comm_s", "exposed_comm_s", "peak_memory_bytes")
"""What is scored beside the step time."""
_RESAMPLES = 1000
_SEED = 8


class Measured(msgspec.Struct, kw_only=True):
    """A configuration on one cluster in one environment, as it was run."""

    cluster: str
    config_id: str
    spec: RunSpec
    status: str = OK
    """``ok`` where any launch ended well, else how the first one ended."""
    run_ids: list[str] = []
    launches_s: list[float] = []
    """Median step time of every launch."""
    figures: dict[str, float] = {}
    """Of ``PARTS``: medians over launches, of memory the most."""
    figures_noise: dict[str, float] = {}
    """As ``noise``, of these."""

    @property
    def step_time_s(self) -> float | None:
        """The median over launches."""
        return median(self.launches_s) if self.launches_s else None

    @property
    def noise(self) -> float | None:
        """Standard deviation of the launches' logarithms: what no prediction can be better than."""
        return noise_of(self.launches_s)

    def interval(self) -> tuple[float, float] | None:
        """95 % bootstrap interval of the median over launches; ``None`` for a single one."""
        if len(self.launches_s) < 2:
            return None
        return bootstrap([[value] for value in self.launches_s], median)


def noise_of(values: Sequence[float]) -> float | None:
    """Standard deviation of the logarithms; ``None`` of fewer than two, or where one is 0."""
    return stdev(map(log, values)) if len(values) > 1 and min(values) > 0 else None


class Said(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one predictor said of a configuration."""

    step_time_s: float | None = None
    figures: dict[str, float] = {}
    fits: bool | None = None
    low_s: float | None = None
    high_s: float | None = None
    """90 % interval of the step time, where it has one."""
    reason: str = ""
    """Why it said nothing."""


class Case(msgspec.Struct):
    """A configuration, and by predictor what was said of it."""

    measured: Measured
    said: dict[str, Said]


def bootstrap(clusters: Sequence[Sequence[float]], statistic: Callable[[list[float]], float]) -> tuple[float, float]:
    """95 % percentile interval of ``statistic``, drawing whole clusters with replacement. The seed is fixed."""
    source = random.Random(_SEED)  # noqa: S311 - resampling, not secrecy
    drawn = [source.choices(clusters, k=len(clusters)) for _ in range(_RESAMPLES)]
    values = sorted(statistic([value for cluster in one for value in cluster]) for one in drawn)
    return quantile(values, 0.025), quantile(values, 0.975)
