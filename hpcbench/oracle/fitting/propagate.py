"""What fitted numbers leave uncertain in a prediction."""

from __future__ import annotations

from math import hypot, log, log2

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.fitting.parameters import applied
from hpcbench.oracle.machine import Machine, Posterior, Strategy
from hpcbench.parallel.catalog import resolve_cost
from hpcbench.parallel.layers import LayerTable

_FAR = 1.645
"""Standard deviations at which the model is asked: where it is not linear, the ends of the interval are what counts."""
_UNEXPLAINED = 0.1
"""What a strategy adds to every step is of no known form: by so much a doubling it may grow or shrink."""


def spreads(
    spec: RunSpec, table: LayerTable, machine: Machine, posterior: Posterior, step_time_s: float
) -> tuple[float, float]:
    """Standard deviations of the logarithm of ``spec``'s step time, downwards and upwards.

    Along every independent direction of the posterior the model is computed anew on both sides; to that come a run's
    own scatter and, beyond the scale of the runs that were fitted, the uncertainty of the model's form, and of what the
    strategy adds to a step without the model knowing why.
    """
    names = [one.name for one in posterior.parameters]
    doublings = max(log2(spec.ranks / posterior.ranks), 0.0)
    unknown = _UNEXPLAINED * machine.strategies.get(spec.strategy, Strategy()).step_s / step_time_s
    below = above = hypot(posterior.run_spread, hypot(posterior.doubling_spread, unknown) * doublings**0.5)
    for direction in zip(*posterior.roots, strict=True):
        ends = [0.0]
        for side in (-_FAR, _FAR):
            there = applied(machine, names, [side * value for value in direction])
            time_s = resolve_cost(spec.strategy).step(spec, table, Clock(there, spec)).step_time_s
            ends.append(log(time_s / step_time_s) / _FAR)
        below, above = hypot(below, min(ends)), hypot(above, max(ends))
    return below, above
