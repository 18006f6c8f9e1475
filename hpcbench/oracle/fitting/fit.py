"""Whole runs at small scale, and the machine that explains them best while it stays near what was known before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import hypot, log, sqrt
from typing import NamedTuple

from msgspec.structs import replace

from hpcbench.config.spec import RunSpec, label
from hpcbench.errors import ConfigError
from hpcbench.oracle.clock import Clock, harmonic
from hpcbench.oracle.fitting.least_squares import Mode, Vector, mode, root, weight
from hpcbench.oracle.fitting.parameters import BANDWIDTH, COMPUTE, DELAY, DELAY_WIDTH, applied, concerns, parameters_of
from hpcbench.oracle.fitting.propagate import ClockOf, step_time_s
from hpcbench.oracle.machine import Fitted, Machine, Posterior, Residual
from hpcbench.parallel.layers import LayerTable

RUN_SPREAD = 0.03
"""What a run is expected to lie off a fitted model, relative: launches differ by 1 to 3 % on quiet machines."""
_RUN_WEIGHT = 4
"""``RUN_SPREAD`` counts as much as so many runs."""
_DOUBLING_SPREAD = 0.03
_ROUNDS = 4
_SAME = 0.1


class Observation(NamedTuple):
    """A configuration that was run."""

    spec: RunSpec
    table: LayerTable
    step_time_s: float
    """The median: a step that nothing held up."""
    spread: float = 0.0
    """Relative, of that median between launches."""
    mean_s: float | None = None
    """With the steps that were held up."""


def fit(
    machine: Machine,
    observations: Sequence[Observation],
    prior: Mapping[str, float] | None = None,
    clock_of: ClockOf = Clock,
) -> Machine:
    """``machine`` with its numbers moved to where ``observations`` are most probable, and how sure they are.

    ``prior`` replaces widths of the prior by a parameter's name (see ``oracle.fitting.parameters``); ``clock_of``
    prices runs of another library. ``ConfigError`` where there is nothing to fit.
    """
    if not observations:
        raise ConfigError("no run to fit a machine with", hint="name sweeps of this cluster that have results")
    calm = replace(machine, delay_s=0.0)
    models, strategies = (one.spec.model for one in observations), (one.spec.strategy for one in observations)
    widths = parameters_of(calm, models, strategies, prior or {})
    names, run_spread = list(widths), RUN_SPREAD
    found = Mode([0.0] * len(names), [], [])
    for _ in range(_ROUNDS):
        found = _mode(calm, observations, widths, run_spread, found.at, clock_of)
        before, run_spread = run_spread, _scale(observations, found.residuals, run_spread)
        if abs(run_spread / before - 1) < _SAME:
            break
    fitted = _narrowed(applied(calm, names, found.at), names, found.covariance)
    covariance = found.covariance
    delay_s = _delay_s(observations)
    if delay_s:
        widths[DELAY] = (prior or {}).get(DELAY, DELAY_WIDTH)
        covariance = [*([*row, 0.0] for row in covariance), [0.0] * len(names) + [widths[DELAY] ** 2]]
        names = [*names, DELAY]
    return replace(
        fitted,
        depth="fitted",
        source=f"{len(observations)} runs on at most {_most_ranks(observations)} ranks, drawn to {machine.source}",
        delay_s=delay_s,
        posterior=Posterior(
            parameters=_parameters(names, found, covariance, widths),
            roots=root(covariance),
            run_spread=run_spread,
            ranks=_most_ranks(observations),
            doubling_spread=_DOUBLING_SPREAD,
            residuals=_residuals(fitted, observations, found.residuals, clock_of),
        ),
    )


def _mode(
    machine: Machine,
    observations: Sequence[Observation],
    widths: Mapping[str, float],
    run_spread: float,
    start: Sequence[float],
    clock_of: ClockOf,
) -> Mode:
    scales = [hypot(one.spread, run_spread) for one in observations]
    names = list(widths)
    own_places = [[place for place, name in enumerate(names) if concerns(name, one.spec)] for one in observations]

    @cache
    def residual(number: int, own: tuple[float, ...]) -> float:
        one, own_names = observations[number], [names[place] for place in own_places[number]]
        there = applied(machine, own_names, own)
        return log(one.step_time_s / step_time_s(there, one.spec, one.table, clock_of)) / scales[number]

    def residuals(at: Vector) -> Vector:
        return [residual(number, tuple(at[place] for place in places)) for number, places in enumerate(own_places)]

    return mode(residuals, list(widths.values()), start)


def _scale(observations: Sequence[Observation], residuals: Vector, run_spread: float) -> float:
    """The runs' own scatter, together with what is usual."""
    counts = [weight(value) for value in residuals]
    squares = [
        count * (value * hypot(one.spread, run_spread)) ** 2
        for one, value, count in zip(observations, residuals, counts, strict=True)
    ]
    return sqrt((_RUN_WEIGHT * RUN_SPREAD**2 + sum(squares)) / (_RUN_WEIGHT + sum(counts)))


def _narrowed(machine: Machine, names: Sequence[str], covariance: Sequence[Sequence[float]]) -> Machine:
    """``machine`` with its parts' spreads as the runs left them, for who does not ask its posterior."""

    def spread(wanted: set[str]) -> float:
        places = [place for place, name in enumerate(names) if name in wanted]
        return sqrt(sum(covariance[row][column] for row in places for column in places))

    models = [name for name in names if name.startswith(f"{COMPUTE}.")] or [COMPUTE]
    compute = min(machine.compute.spread, max(spread({COMPUTE, one}) for one in models))
    comm = min(machine.comm.spread, spread({BANDWIDTH, f"inter_node.{BANDWIDTH}"}))
    return replace(machine, compute=replace(machine.compute, spread=compute), comm=replace(machine.comm, spread=comm))


def _delay_s(observations: Sequence[Observation]) -> float:
    """Of one node: means lie above medians by what holds the slowest of a run's nodes up."""
    known = [(one.mean_s - one.step_time_s, harmonic(one.spec.nodes)) for one in observations if one.mean_s is not None]
    return max(sum(above for above, _ in known) / sum(nodes for _, nodes in known), 0.0) if known else 0.0


def _most_ranks(observations: Sequence[Observation]) -> int:
    return max(one.spec.ranks for one in observations)


def _parameters(
    names: Sequence[str], found: Mode, covariance: Sequence[Sequence[float]], widths: Mapping[str, float]
) -> list[Fitted]:
    factors = [*found.at, 0.0]
    return [
        Fitted(name=name, log_factor=factors[place], prior_spread=widths[name], spread=sqrt(covariance[place][place]))
        for place, name in enumerate(names)
    ]


def _residuals(
    machine: Machine, observations: Sequence[Observation], residuals: Vector, clock_of: ClockOf
) -> list[Residual]:
    return [
        Residual(
            run=label(one.spec),
            measured_s=one.step_time_s,
            predicted_s=step_time_s(machine, one.spec, one.table, clock_of),
            weight=weight(value),
        )
        for one, value in zip(observations, residuals, strict=True)
    ]
