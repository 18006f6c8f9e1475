"""What fitted numbers leave uncertain in a prediction."""

from __future__ import annotations

from collections.abc import Callable
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


ClockOf = Callable[[Machine, RunSpec], Clock]
"""Who prices a run."""


def step_time_s(machine: Machine, spec: RunSpec, table: LayerTable, clock_of: ClockOf = Clock) -> float:
    """What the oracle says of a run on ``machine``."""
    time_s: float = resolve_cost(spec.strategy).step(spec, table, clock_of(machine, spec)).step_time_s
    return time_s


def spreads(
    spec: RunSpec, table: LayerTable, machine: Machine, posterior: Posterior, clock_of: ClockOf = Clock
) -> tuple[float, float]:
    """Standard deviations of the logarithm of ``spec``'s step time, downwards and upwards.

    Along every independent direction of the posterior the model is computed anew on both sides; to that come a run's
    own scatter and, beyond the scale of the runs that were fitted, the uncertainty of the model's form, and of what the
    strategy adds to a step without the model knowing why.
    """
    names, middle_s = [one.name for one in posterior.parameters], step_time_s(machine, spec, table, clock_of)
    doublings = max(log2(spec.ranks / posterior.ranks), 0.0)
    added = machine.strategies.get(spec.strategy, Strategy())
    unknown = _UNEXPLAINED * (added.step_s + added.sample_s * spec.batch_size) / middle_s
    below = above = hypot(posterior.run_spread, hypot(posterior.doubling_spread, unknown) * doublings**0.5)
    for direction in zip(*posterior.roots, strict=True):
        ends = [0.0]
        for side in (-_FAR, _FAR):
            there = applied(machine, names, [side * value for value in direction])
            ends.append(log(step_time_s(there, spec, table, clock_of) / middle_s) / _FAR)
        below, above = hypot(below, min(ends)), hypot(above, max(ends))
    return below, above
