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
"""Expected relative deviation of a run from a fitted model: launches differ by 1 to 3 % on quiet machines."""
_RUN_SPREAD_WEIGHT = 4
"""Number of runs that ``EXPECTED_RUN_SPREAD`` counts for."""
_DOUBLING_SPREAD = 0.03
_MAX_ITERATIONS = 4
_SPREAD_TOLERANCE = 0.1


class Observation(NamedTuple):
    """A configuration that was run."""

    spec: RunSpec
    table: LayerTable
    step_time_s: float
    """The median of the steps, which delayed ones do not move."""
    spread: float = 0.0
    """Relative spread of that median between launches."""
    mean_s: float | None = None
    """The mean of the steps, which contains delayed ones."""


def fit_posterior(
    machine: Machine,
    observations: Sequence[Observation],
    prior: Mapping[str, float] | None = None,
    clock_of: CostModelFactory = CostModel,
) -> Machine:
    """Move the numbers of ``machine`` to where ``observations`` are most probable.

    Args:
        prior: replaces widths of the prior by a parameter's name (see ``oracle.uncertainty``).
        clock_of: prices runs of another library.

    Returns:
        The fitted machine; its ``posterior`` is the uncertainty of the numbers.

    Raises:
        ConfigError: there is no observation.
    """
    if not observations:
        raise ConfigError("no run to fit a machine with", hint="name sweeps of this cluster that have results")
    calm = replace(machine, delay_s=0.0)
    models, strategies = (run.spec.model for run in observations), (run.spec.strategy for run in observations)
    widths = fitted_parameter_widths(calm, models, strategies, prior or {})
    names, run_spread = list(widths), EXPECTED_RUN_SPREAD
    mode = PosteriorMode([0.0] * len(names), [], [])
    for _ in range(_MAX_ITERATIONS):
        mode = _posterior_mode(calm, observations, widths, run_spread, mode.at, clock_of)
        before, run_spread = run_spread, _estimate_run_spread(observations, mode.residuals, run_spread)
        if abs(run_spread / before - 1) < _SPREAD_TOLERANCE:
            break
    fitted = _with_posterior_spreads(apply_parameters(calm, names, mode.at), names, mode.covariance)
    log_factors, covariance = mode.at, mode.covariance
    # Means lie above medians by the delay of the slowest of a run's nodes.
    delayed = [run for run in observations if run.mean_s is not None]
    delays_s = sum((run.mean_s or 0.0) - run.step_time_s for run in delayed)
    delay_s = max(delays_s / sum(harmonic_number(run.spec.nodes) for run in delayed), 0.0) if delayed else 0.0
    if delay_s:
        widths[DELAY] = (prior or {}).get(DELAY, DELAY_PRIOR_WIDTH)
        covariance = [*([*row, 0.0] for row in covariance), [0.0] * len(names) + [widths[DELAY] ** 2]]
        names, log_factors = [*names, DELAY], [*log_factors, 0.0]
    ranks = max(run.spec.ranks for run in observations)
    parameters = [
        FittedParameter(name=name, log_factor=factor, prior_spread=widths[name], spread=sqrt(row[number]))
        for number, (name, factor, row) in enumerate(zip(names, log_factors, covariance, strict=True))
    ]
    residuals = [
        RunResidual(
            run=run_label(run.spec),
            measured_s=run.step_time_s,
            predicted_s=predicted_step_s(fitted, run.spec, run.table, clock_of),
            weight=student_t_weight(residual),
        )
        for run, residual in zip(observations, mode.residuals, strict=True)
    ]
    return replace(
        fitted,
        depth="fitted",
        source=f"{len(observations)} runs on at most {ranks} ranks, drawn to {machine.source}",
        delay_s=delay_s,
        posterior=Posterior(
            parameters=parameters,
            roots=cholesky_factor(covariance),
            run_spread=run_spread,
            ranks=ranks,
            doubling_spread=_DOUBLING_SPREAD,
            residuals=residuals,
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
    names = list(widths)
    affecting = [
        [number for number, name in enumerate(names) if parameter_affects(name, run.spec)] for run in observations
    ]

    @cache
    def residual(number: int, logs: tuple[float, ...]) -> float:
        run = observations[number]
        moved = apply_parameters(machine, [names[parameter] for parameter in affecting[number]], logs)
        predicted_s = predicted_step_s(moved, run.spec, run.table, clock_of)
        return log(run.step_time_s / predicted_s) / hypot(run.spread, run_spread)

    def residuals(logs: Vector) -> Vector:
        return [
            residual(number, tuple(logs[parameter] for parameter in parameters))
            for number, parameters in enumerate(affecting)
        ]

    return find_mode(residuals, list(widths.values()), start)


def _estimate_run_spread(observations: Sequence[Observation], residuals: Vector, run_spread: float) -> float:
    """Return the scatter of the runs, combined with its expected value."""
    weights = [student_t_weight(value) for value in residuals]
    lengths = [value * hypot(run.spread, run_spread) for run, value in zip(observations, residuals, strict=True)]
    squares = sum(weight * length**2 for weight, length in zip(weights, lengths, strict=True))
    return sqrt((_RUN_SPREAD_WEIGHT * EXPECTED_RUN_SPREAD**2 + squares) / (_RUN_SPREAD_WEIGHT + sum(weights)))


def _with_posterior_spreads(machine: Machine, names: Sequence[str], covariance: Sequence[Sequence[float]]) -> Machine:
    """Return ``machine`` with the spreads after the fit, for predictions without its posterior."""

    def spread(wanted: set[str]) -> float:
        places = [place for place, name in enumerate(names) if name in wanted]
        return sqrt(sum(covariance[row][column] for row in places for column in places))

    models = [name for name in names if name.startswith(f"{COMPUTE}.")] or [COMPUTE]
    compute = min(machine.compute.spread, max(spread({COMPUTE, model}) for model in models))
    comm = min(machine.comm.spread, spread({BANDWIDTH, f"inter_node.{BANDWIDTH}"}))
    return replace(machine, compute=replace(machine.compute, spread=compute), comm=replace(machine.comm, spread=comm))


_MEDIAN_SPREAD_FACTOR = 1.2533
"""Spread of a median over that of a mean, of normally distributed values."""
_Z95 = 1.96


def run_observations(results: Iterable[RunResult], table_of: Callable[[RunSpec], LayerTable]) -> list[Observation]:
    """Return an observation a configuration that ended well: the median of its launches' medians, and their spread.

    With a single launch the spread is that of its steps: less than launches differ by, which the fit allows for itself.
    """
    launches: dict[str, list[tuple[RunSpec, StepTimeStatistics]]] = defaultdict(list)
    for result in results:
        if result.status == STATUS_OK and result.metrics.step_time_s is not None:
            launches[result.config_id].append((result.spec, result.metrics.step_time_s))
    observations = []
    for _, pairs in sorted(launches.items()):
        spec, times = pairs[0][0], [statistics for _, statistics in pairs]
        typical_s = median(each.median for each in times)
        if len(times) > 1:
            spread = _MEDIAN_SPREAD_FACTOR * stdev(log(each.median) for each in times) / sqrt(len(times))
        else:
            spread = (times[0].ci95_high - times[0].ci95_low) / (2 * _Z95 * typical_s)
        mean_s = typical_s + median(each.mean - each.median for each in times)
        observations.append(Observation(spec, table_of(spec), typical_s, spread, mean_s))
    return observations
