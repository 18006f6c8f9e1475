"""What a calibration is fitted from: finished runs with the tables of their models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log, sqrt
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.layers import LayerTable
from hpcbench.results.schema import OK, RunResult

_Z95 = 1.96
PROBE_LAYERS, PROBE_COLLECTIVES = "probe_layers", "probe_collectives"


class Evidence(NamedTuple):
    """One run that ended well."""

    result: RunResult
    table: LayerTable

    @property
    def spec(self) -> RunSpec:
        """What was run."""
        return self.result.spec

    @property
    def step_s(self) -> float:
        """The median of its timed steps, of which each time the slowest rank counts."""
        times = self.result.metrics.step_time_s
        return times.median if times is not None else 0.0

    @property
    def doubt(self) -> float:
        """Relative uncertainty of ``step_s`` within the launch: one deviation."""
        times = self.result.metrics.step_time_s
        return 0.0 if times is None else (times.ci95_high - times.ci95_low) / (2 * _Z95 * times.median)


def usable(runs: Iterable[Evidence]) -> list[Evidence]:
    """Those that ended well and timed steps that were computed, not rehearsed."""
    return [one for one in runs if one.result.status == OK and one.step_s > 0 and not one.spec.rehearse]


def of_strategy(runs: Sequence[Evidence], *keys: str) -> list[Evidence]:
    """Those of one of ``keys``."""
    return [one for one in runs if one.spec.strategy in keys]


def median(values: Iterable[float]) -> float:
    """Of at least one value; of an even number the mean of the two in the middle."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def log_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Root mean square of the logarithms of fitted over measured."""
    squares = [log(fitted / measured) ** 2 for fitted, measured in pairs]
    return sqrt(sum(squares) / len(squares)) if squares else 0.0


def explained(pairs: Sequence[tuple[float, float]]) -> float | None:
    """R2 of pairs of fitted and measured, in the measured unit; ``None`` where all measured are equal."""
    if not pairs:
        return None
    mean = sum(measured for _, measured in pairs) / len(pairs)
    total = sum((measured - mean) ** 2 for _, measured in pairs)
    return 1 - sum((fitted - measured) ** 2 for fitted, measured in pairs) / total if total else None
