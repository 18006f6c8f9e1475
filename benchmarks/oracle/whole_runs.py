"""A machine fitted to whole runs at small scale: the posterior mode of its numbers, and the intervals that follow.

Each parameter is a factor on a number of the machine, 1 before any run was seen; its logarithm has a normal prior of
mean 0. A number that is 0 stays 0. Prior widths (one standard deviation of the logarithm):

- computation 0.35: vendors' peaks against the 40 to 80 % of them that steps reach; one model against another 0.15;
- bandwidth 0.5 for all links, which share the library, and 0.5 for each;
- latency 0.7: a factor of 2 either way, since vendors publish none;
- a strategy's own computation 0.35, time per step and per sample 1.0: the overhead of its library;
- straggling and delays 1.0: only their order of magnitude is known.

Residuals of runs have Student's t distribution, so that one odd run moves little (Lange, Little and Taylor 1989)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, hypot, log, log2, sqrt
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from scipy.optimize import least_squares

from hpcbench.config.run_spec import RunSpec, run_label
from hpcbench.predict.collective_formulas import HockneyLink
from hpcbench.predict.machine import Machine, StrategyOverhead
from hpcbench.predict.prediction import NORMAL_90, CostModelFactory, Prediction, PredictionInterval, predict
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.layer_table import LayerTable

COMPUTE, BANDWIDTH, STRAGGLING, DELAY = "compute", "bandwidth", "straggling", "delay"
_MODEL_WIDTH, _LATENCY_WIDTH, _DELAY_WIDTH = 0.15, 0.7, 1.0
_WIDTHS = {COMPUTE: 0.35, BANDWIDTH: 0.5, STRAGGLING: 1.0}
_STRATEGY_WIDTHS = {"compute": 0.35, "step": 1.0, "sample": 1.0}
_STRATEGY_FIELDS = {"compute": "compute_factor", "step": "step_s", "sample": "sample_s"}
_FREEDOM = 4.0
"""Degrees of freedom of Student's t: a residual of four standard deviations has a fifth of the weight."""
_RUN_SPREAD, _RUN_SPREAD_WEIGHT = 0.03, 4
"""Expected relative deviation of a run from a fitted machine, and the number of runs that it counts for."""
_DOUBLING_SPREAD, _OVERHEAD_SPREAD = 0.03, 0.1
"""Uncertainty of the formulas, and of a strategy's added time, for the first doubling of the ranks beyond the runs."""


class Observation(NamedTuple):
    """A configuration that was run: the median and the mean of its steps, and the model's table."""

    spec: RunSpec
    table: LayerTable
    step_time_s: float
    mean_s: float


class FittedParameter(NamedTuple):
    """A fitted number: the logarithm of its factor, and its standard deviation before and after the fit."""

    name: str
    log_factor: float
    prior_spread: float
    spread: float

    @property
    def learned(self) -> float:
        """Share of its variance that the runs removed: 0 if they do not determine it, near 1 if they alone do."""
        return 1.0 - (self.spread / self.prior_spread) ** 2


class RunResidual(NamedTuple):
    """A run that was fitted, its prediction without delays, and its weight: less than 1 for an outlier."""

    run: str
    measured_s: float
    predicted_s: float
    weight: float


class FittedMachine(NamedTuple):
    """A machine with what is known of its numbers."""

    machine: Machine
    parameters: list[FittedParameter]
    roots: Any
    """Lower triangular [n, n]: its product with its transpose is the covariance of the logarithms."""
    run_spread: float
    """Standard deviation of the logarithm of a run's step time around the formulas."""
    ranks: int
    """The most that a fitted run had."""
    residuals: list[RunResidual]
    delay_s: float
    """Mean delay of a node in a step, caused by other users of the network and the file system: exponentially
    distributed, from what means of steps lie above their medians. An interval contains the longest of the nodes'."""
    clock_of: CostModelFactory

    def step_s(self, spec: RunSpec, table: LayerTable, moved: Mapping[str, float] | None = None) -> float:
        """Return the step time of a run; ``moved`` are logarithms to add to those of the fit."""
        logs = {one.name: one.log_factor for one in self.parameters}
        for name, value in (moved or {}).items():
            logs[name] += value
        return _step_s(self.machine, logs, spec, table, self.clock_of)

    def predict(self, spec: RunSpec, table: LayerTable) -> Prediction:
        """Predict a run, with the interval of the posterior.

        Along every independent direction of the posterior the step is computed anew on both sides; to that come a run's
        own scatter and, beyond the scale of the runs, the uncertainty of the formulas and of a strategy's added time.
        """
        logs = {one.name: one.log_factor for one in self.parameters}
        machine = _moved(self.machine, logs, spec.model)
        prediction = predict(spec, table, machine, self.clock_of)
        middle_s, doublings = prediction.step_time_s, max(log2(spec.ranks / self.ranks), 0.0)
        added = machine.strategies.get(spec.strategy, StrategyOverhead())
        unknown = _OVERHEAD_SPREAD * (added.step_s + added.sample_s * spec.batch_size) / middle_s
        below = above = hypot(self.run_spread, hypot(_DOUBLING_SPREAD, unknown) * sqrt(doublings))
        for direction in self.roots.T:
            ends = [0.0]
            for side in (-NORMAL_90, NORMAL_90):
                moved = {one.name: side * value for one, value in zip(self.parameters, direction, strict=True)}
                ends.append(log(self.step_s(spec, table, moved) / middle_s) / NORMAL_90)
            below, above = hypot(below, min(ends)), hypot(above, max(ends))
        delay_s = self.delay_s * exp(logs.get(DELAY, 0.0)) * harmonic_number(spec.nodes) if spec.ranks > 1 else 0.0
        interval = PredictionInterval(
            low=middle_s * exp(-NORMAL_90 * below), high=middle_s * exp(NORMAL_90 * above) + delay_s
        )
        return replace(prediction, interval=interval)


def fit_whole_runs(
    machine: Machine, runs: Sequence[Observation], prior: Mapping[str, float], clock_of: CostModelFactory
) -> FittedMachine:
    """Return ``machine`` with the numbers at which ``runs`` are most probable.

    ``prior`` replaces widths by a parameter's name; a width of 0 leaves a number as it is.
    """
    widths = _prior_widths(machine, runs, prior)
    names, at, run_spread = list(widths), np.zeros(len(widths)), _RUN_SPREAD
    for _ in range(4):
        at, covariance, residuals = _mode(machine, runs, widths, run_spread, at, clock_of)
        weights = _FREEDOM / (_FREEDOM + residuals**2)
        squares = float(np.sum(weights * (residuals * run_spread) ** 2))
        before, run_spread = (
            run_spread,
            sqrt((_RUN_SPREAD_WEIGHT * _RUN_SPREAD**2 + squares) / (_RUN_SPREAD_WEIGHT + float(np.sum(weights)))),
        )
        if abs(run_spread / before - 1) < 0.1:
            break
    # Means lie above medians by the delay of the slowest of a run's nodes.
    delays_s = sum(run.mean_s - run.step_time_s for run in runs)
    delay_s = max(delays_s / sum(harmonic_number(run.spec.nodes) for run in runs), 0.0)
    logs = dict(zip(names, map(float, at), strict=True))
    found = [
        RunResidual(run_label(run.spec), run.step_time_s, _step_s(machine, logs, run.spec, run.table, clock_of), weight)
        for run, weight in zip(runs, map(float, weights), strict=True)
    ]
    if delay_s:
        names, logs, widths = [*names, DELAY], logs | {DELAY: 0.0}, widths | {DELAY: _DELAY_WIDTH}
        covariance = np.pad(covariance, (0, 1))
        covariance[-1, -1] = _DELAY_WIDTH**2
    parameters = [
        FittedParameter(name, logs[name], widths[name], sqrt(covariance[place, place]))
        for place, name in enumerate(names)
    ]
    ranks = max(run.spec.ranks for run in runs)
    return FittedMachine(
        machine, parameters, np.linalg.cholesky(covariance), run_spread, ranks, found, delay_s, clock_of
    )


def harmonic_number(count: int) -> float:
    """Return 1 + 1/2 + ... + 1/count: the expected maximum of ``count`` exponential draws with mean 1."""
    return sum(1.0 / number for number in range(1, count + 1))


def _mode(
    machine: Machine, runs: Sequence[Observation], widths: Mapping[str, float], run_spread: float, start: Any,
    clock_of: CostModelFactory,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the mode of the posterior [n], its covariance [n, n] and the runs' residuals in units of their scale."""
    names, scales = list(widths), np.array(list(widths.values()))
    affecting = [[place for place, name in enumerate(names) if _affects(name, run.spec)] for run in runs]

    @cache
    def residual(number: int, values: tuple[float, ...]) -> float:
        run, logs = runs[number], {names[p]: value for p, value in zip(affecting[number], values, strict=True)}
        return log(run.step_time_s / _step_s(machine, logs, run.spec, run.table, clock_of)) / run_spread

    def of_runs(at: Any) -> Any:
        return np.array([residual(number, tuple(at[places])) for number, places in enumerate(affecting)])

    def robust(squares: Any) -> Any:
        rho = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        mine = squares[: len(runs)]
        factor = _FREEDOM + 1
        rho[:, : len(runs)] = (
            factor * np.log1p(mine / _FREEDOM), factor / (_FREEDOM + mine), -factor / (_FREEDOM + mine) ** 2
        )  # fmt: skip
        return rho

    found = least_squares(lambda at: np.concatenate([of_runs(at), at / scales]), start, loss=robust, diff_step=1e-4)
    residuals, at = of_runs(found.x), found.x
    steps = np.eye(len(names)) * 1e-3
    slopes = np.array([(of_runs(at + step) - residuals) / 1e-3 for step in steps])
    counts = (_FREEDOM + 1) / (_FREEDOM + residuals**2)
    return at, np.linalg.inv(slopes * counts @ slopes.T + np.diag(scales**-2.0)), residuals


def _prior_widths(machine: Machine, runs: Sequence[Observation], widths: Mapping[str, float]) -> dict[str, float]:
    """Return names and widths of what the runs may move.

    A strategy's own numbers are moved only where ``machine.strategies`` has it: else they cannot be separated from the
    device's.
    """
    prior = {COMPUTE: _WIDTHS[COMPUTE]}
    prior |= {f"{COMPUTE}.{model}": _MODEL_WIDTH for model in sorted({run.spec.model for run in runs})}
    prior[BANDWIDTH] = _WIDTHS[BANDWIDTH]
    for link in ("intra_node", "inter_node"):
        prior[f"{link}.bandwidth"] = _WIDTHS[BANDWIDTH]
        if getattr(machine.comm, link).latency_s:
            prior[f"{link}.latency"] = _LATENCY_WIDTH
    if machine.straggling:
        prior[STRAGGLING] = _WIDTHS[STRAGGLING]
    for strategy in sorted({run.spec.strategy for run in runs}):
        overhead = machine.strategies.get(strategy)
        for number, width in _STRATEGY_WIDTHS.items():
            if overhead is not None and getattr(overhead, _STRATEGY_FIELDS[number]):
                prior[f"strategy.{strategy}.{number}"] = width
    return {name: widths.get(name, width) for name, width in prior.items() if widths.get(name, width) > 0}


def _affects(name: str, spec: RunSpec) -> bool:
    """Whether the number can change the step of a run."""
    scope, _, rest = name.partition(".")
    if scope == COMPUTE:
        return rest in ("", spec.model)
    if scope == "strategy":
        return rest.rpartition(".")[0] == spec.strategy
    return spec.devices > 1 and (scope != "inter_node" or spec.nodes > 1)


def _step_s(
    machine: Machine, logs: Mapping[str, float], spec: RunSpec, table: LayerTable, clock_of: CostModelFactory
) -> float:
    moved = _moved(machine, logs, spec.model)
    return resolve_cost(spec.strategy).step(spec, table, clock_of(moved, spec)).step_time_s


def _moved(machine: Machine, logs: Mapping[str, float], model: str) -> Machine:
    """Return ``machine`` with its numbers, as runs of ``model`` find them, times the exponentials of ``logs``."""

    def factor(*names: str) -> float:
        return exp(sum(logs.get(name, 0.0) for name in names))

    def link(name: str) -> HockneyLink:
        wire: HockneyLink = getattr(machine.comm, name)
        rate = factor(BANDWIDTH, f"{name}.bandwidth")
        return HockneyLink(wire.latency_s * factor(f"{name}.latency"), wire.beta_s_per_byte / rate)

    slower, compute = factor(COMPUTE, f"{COMPUTE}.{model}"), machine.compute
    overheads = {
        strategy: replace(
            overhead,
            **{
                field: getattr(overhead, field) * factor(f"strategy.{strategy}.{number}")
                for number, field in _STRATEGY_FIELDS.items()
            },
        )
        for strategy, overhead in machine.strategies.items()
    }
    return replace(
        machine,
        compute=replace(
            compute,
            peak_flops_per_s={name: peak / slower for name, peak in compute.peak_flops_per_s.items()},
            memory_bandwidth_bytes_per_s=compute.memory_bandwidth_bytes_per_s / slower,
            launch_s=compute.launch_s * slower,
        ),
        comm=replace(machine.comm, intra_node=link("intra_node"), inter_node=link("inter_node")),
        strategies=overheads,
        straggling=machine.straggling * factor(STRAGGLING),
    )
