"""Results of runs as what a machine is fitted with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import log, sqrt
from statistics import median, stdev

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.fitting.fit import Observation
from hpcbench.parallel.layers import LayerTable
from hpcbench.results.schema import OK, RunResult, Spread

_MEDIAN = 1.2533
"""Spread of a median over that of a mean, of normally distributed values."""
_Z95 = 1.96


def observations_of(results: Iterable[RunResult], table_of: Callable[[RunSpec], LayerTable]) -> list[Observation]:
    """One for every configuration that ended well: the median of its launches' medians, and their spread.

    Of one launch alone the spread is that of its steps: less than launches differ by, which the fit allows for itself.
    """
    launches: dict[str, list[tuple[RunSpec, Spread]]] = defaultdict(list)
    for one in results:
        if one.status == OK and one.metrics.step_time_s is not None:
            launches[one.config_id].append((one.spec, one.metrics.step_time_s))
    return [_observation(found, table_of) for _, found in sorted(launches.items())]


def _observation(launches: list[tuple[RunSpec, Spread]], table_of: Callable[[RunSpec], LayerTable]) -> Observation:
    spec, times = launches[0][0], [one for _, one in launches]
    typical_s = median(one.median for one in times)
    if len(times) > 1:
        spread = _MEDIAN * stdev(log(one.median) for one in times) / sqrt(len(times))
    else:
        spread = (times[0].ci95_high - times[0].ci95_low) / (2 * _Z95 * typical_s)
    return Observation(
        spec, table_of(spec), typical_s, spread, typical_s + median(one.mean - one.median for one in times)
    )
