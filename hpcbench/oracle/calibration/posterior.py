"""A machine fitted to whole runs at small scale: the posterior mode of its parameters and their covariance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import hypot, log, sqrt
from statistics import median, stdev
from typing import NamedTuple

from msgspec.structs import replace

from hpcbench.config.run_spec import RunSpec, run_label
from hpcbench.errors import ConfigError
from hpcbench.oracle.calibration.least_squares import (
    PosteriorMode,
    Vector,
    cholesky_factor,
    find_mode,
    student_t_weight,
)
from hpcbench.oracle.cost_model import CostModel, harmonic_number
from hpcbench.oracle.machine import FittedParameter, Machine, Posterior, RunResidual
from hpcbench.oracle.uncertainty import (
    BANDWIDTH,
    COMPUTE,
    DELAY,
    DELAY_PRIOR_WIDTH,
    CostModelFactory,
    apply_parameters,
    fitted_parameter_widths,
    parameter_affects,
    predicted_step_s,
)
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.results.schema import STATUS_OK, RunResult, StepTimeStatistics

EXPECTED_RUN_SPREAD = 0.03
"""What a run is expected to lie off a fitted model, relative: launches differ by 1 to 3 % on quiet machines."""
_RUN_SPREAD_WEIGHT = 4
"""``EXPECTED_RUN_SPREAD`` counts as much as so many runs."""
_DOUBLING_SPREAD = 0.03
_MAX_ITERATIONS = 4
_SPREAD_TOLERANCE = 0.1


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


def fit_posterior(
    machine: Machine,
    observations: Sequence[Observation],
    prior: Mapping[str, float] | None = None,
    clock_of: CostModelFactory = CostModel,
) -> Machine:
    """``machine`` with its numbers moved to where ``observations`` are most probable, and how sure they are.

    ``prior`` replaces widths of the prior by a parameter's name (see ``oracle.fitting.parameters``); ``clock_of``
    prices runs of another library. ``ConfigError`` where there is nothing to fit.
    """
    if not observations:
        raise ConfigError("no run to fit a machine with", hint="name sweeps of this cluster that have results")
    calm = replace(machine, delay_s=0.0)
    models, strategies = (one.spec.model for one in observations), (one.spec.strategy for one in observations)
    widths = fitted_parameter_widths(calm, models, strategies, prior or {})
    names, run_spread = list(widths), EXPECTED_RUN_SPREAD
    found = PosteriorMode([0.0] * len(names), [], [])
    for _ in range(_MAX_ITERATIONS):
        found = _posterior_mode(calm, observations, widths, run_spread, found.at, clock_of)
        before, run_spread = run_spread, _estimate_run_spread(observations, found.residuals, run_spread)
        if abs(run_spread / before - 1) < _SPREAD_TOLERANCE:
            break
    fitted = _with_posterior_spreads(apply_parameters(calm, names, found.at), names, found.covariance)
    covariance = found.covariance
    delay_s = _estimate_delay_s(observations)
    if delay_s:
        widths[DELAY] = (prior or {}).get(DELAY, DELAY_PRIOR_WIDTH)
        covariance = [*([*row, 0.0] for row in covariance), [0.0] * len(names) + [widths[DELAY] ** 2]]
        names = [*names, DELAY]
    return replace(
        fitted,
        depth="fitted",
        source=f"{len(observations)} runs on at most {_max_ranks(observations)} ranks, drawn to {machine.source}",
        delay_s=delay_s,
        posterior=Posterior(
            parameters=_fitted_parameters(names, found, covariance, widths),
            roots=cholesky_factor(covariance),
            run_spread=run_spread,
            ranks=_max_ranks(observations),
            doubling_spread=_DOUBLING_SPREAD,
            residuals=_run_residuals(fitted, observations, found.residuals, clock_of),
        ),
    )


def _posterior_mode(
    machine: Machine,
    observations: Sequence[Observation],
    widths: Mapping[str, float],
    run_spread: float,
    start: Sequence[float],
    clock_of: CostModelFactory,
) -> PosteriorMode:
    scales = [hypot(one.spread, run_spread) for one in observations]
    names = list(widths)
    own_places = [
        [place for place, name in enumerate(names) if parameter_affects(name, one.spec)] for one in observations
    ]

    @cache
    def residual(number: int, own: tuple[float, ...]) -> float:
        one, own_names = observations[number], [names[place] for place in own_places[number]]
        there = apply_parameters(machine, own_names, own)
        return log(one.step_time_s / predicted_step_s(there, one.spec, one.table, clock_of)) / scales[number]

    def residuals(at: Vector) -> Vector:
        return [residual(number, tuple(at[place] for place in places)) for number, places in enumerate(own_places)]

    return find_mode(residuals, list(widths.values()), start)


def _estimate_run_spread(observations: Sequence[Observation], residuals: Vector, run_spread: float) -> float:
    """The runs' own scatter, together with what is usual."""
    counts = [student_t_weight(value) for value in residuals]
    squares = [
        count * (value * hypot(one.spread, run_spread)) ** 2
        for one, value, count in zip(observations, residuals, counts, strict=True)
    ]
    return sqrt((_RUN_SPREAD_WEIGHT * EXPECTED_RUN_SPREAD**2 + sum(squares)) / (_RUN_SPREAD_WEIGHT + sum(counts)))


def _with_posterior_spreads(machine: Machine, names: Sequence[str], covariance: Sequence[Sequence[float]]) -> Machine:
    """``machine`` with its parts' spreads as the runs left them, for who does not ask its posterior."""

    def spread(wanted: set[str]) -> float:
        places = [place for place, name in enumerate(names) if name in wanted]
        return sqrt(sum(covariance[row][column] for row in places for column in places))

    models = [name for name in names if name.startswith(f"{COMPUTE}.")] or [COMPUTE]
    compute = min(machine.compute.spread, max(spread({COMPUTE, one}) for one in models))
    comm = min(machine.comm.spread, spread({BANDWIDTH, f"inter_node.{BANDWIDTH}"}))
    return replace(machine, compute=replace(machine.compute, spread=compute), comm=replace(machine.comm, spread=comm))


def _estimate_delay_s(observations: Sequence[Observation]) -> float:
    """Of one node: means lie above medians by what holds the slowest of a run's nodes up."""
    known = [
        (one.mean_s - one.step_time_s, harmonic_number(one.spec.nodes))
        for one in observations
        if one.mean_s is not None
    ]
    return max(sum(above for above, _ in known) / sum(nodes for _, nodes in known), 0.0) if known else 0.0


def _max_ranks(observations: Sequence[Observation]) -> int:
    return max(one.spec.ranks for one in observations)


def _fitted_parameters(
    names: Sequence[str], found: PosteriorMode, covariance: Sequence[Sequence[float]], widths: Mapping[str, float]
) -> list[FittedParameter]:
    factors = [*found.at, 0.0]
    return [
        FittedParameter(
            name=name, log_factor=factors[place], prior_spread=widths[name], spread=sqrt(covariance[place][place])
        )
        for place, name in enumerate(names)
    ]


def _run_residuals(
    machine: Machine, observations: Sequence[Observation], residuals: Vector, clock_of: CostModelFactory
) -> list[RunResidual]:
    return [
        RunResidual(
            run=run_label(one.spec),
            measured_s=one.step_time_s,
            predicted_s=predicted_step_s(machine, one.spec, one.table, clock_of),
            weight=student_t_weight(value),
        )
        for one, value in zip(observations, residuals, strict=True)
    ]


_MEDIAN_SPREAD_FACTOR = 1.2533
"""Spread of a median over that of a mean, of normally distributed values."""
_Z95 = 1.96


def run_observations(results: Iterable[RunResult], table_of: Callable[[RunSpec], LayerTable]) -> list[Observation]:
    """One for every configuration that ended well: the median of its launches' medians, and their spread.

    Of one launch alone the spread is that of its steps: less than launches differ by, which the fit allows for itself.
    """
    launches: dict[str, list[tuple[RunSpec, StepTimeStatistics]]] = defaultdict(list)
    for one in results:
        if one.status == STATUS_OK and one.metrics.step_time_s is not None:
            launches[one.config_id].append((one.spec, one.metrics.step_time_s))
    return [_configuration_observation(found, table_of) for _, found in sorted(launches.items())]


def _configuration_observation(
    launches: list[tuple[RunSpec, StepTimeStatistics]], table_of: Callable[[RunSpec], LayerTable]
) -> Observation:
    spec, times = launches[0][0], [one for _, one in launches]
    typical_s = median(one.median for one in times)
    if len(times) > 1:
        spread = _MEDIAN_SPREAD_FACTOR * stdev(log(one.median) for one in times) / sqrt(len(times))
    else:
        spread = (times[0].ci95_high - times[0].ci95_low) / (2 * _Z95 * typical_s)
    return Observation(
        spec, table_of(spec), typical_s, spread, typical_s + median(one.mean - one.median for one in times)
    )
