"""Factors on predicted step times, learned from measured configurations of the same cluster.

The logarithm of measured over predicted time of a configuration is the sum of five independent normal terms: of the
machine, the model, the strategy, the model with the strategy, and the configuration itself; a launch adds its noise.
The standard deviations of the first four are stated below; those of the last two are estimated from the scatter within
a model with a strategy and between launches, each with a prior that counts as ``_PRIOR_FREEDOM`` observations
(empirical Bayes). The posterior mean shrinks each term towards 0 by what the measurements leave undetermined.

Configurations of the same model and strategy (a cell) differ only in the last two terms, so that a cell's weighted mean
is sufficient: the equations have one unknown for the machine, each model and each strategy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from math import exp, log, sqrt
from statistics import fmean
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import DEGREE_NAMES, RunSpec

MACHINE_SPREAD, MODEL_SPREAD, STRATEGY_SPREAD, CELL_SPREAD = 0.35, 0.15, 0.25, 0.15
"""Standard deviations of the logarithm: machine and models, a strategy's formulas, and how much these differ between
models. None of them was fitted to a score."""
_CONFIGURATION_SPREAD, _LAUNCH_SPREAD, _PRIOR_FREEDOM = 0.10, 0.05, 10
PRIOR_SPREAD = sqrt(MACHINE_SPREAD**2 + MODEL_SPREAD**2 + STRATEGY_SPREAD**2 + CELL_SPREAD**2)
"""Standard deviation of the four together."""
MAX_NEIGHBOURS_NAMED = 8


class MeasuredRatio(NamedTuple):
    """A measured configuration with the prediction that the machine's numbers alone give."""

    config_id: str
    spec: RunSpec
    launches_s: tuple[float, ...]
    measured_s: float
    predicted_s: float

    @property
    def log_ratio(self) -> float:
        """The logarithm of measured over predicted."""
        return log(self.measured_s / self.predicted_s)


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A measured configuration that a prediction rests on."""

    config_id: str
    like: str
    """The part of the configuration that it shares with the run: ``itself``, ``model and strategy``, ``strategy``,
    ``model`` or ``cluster``."""


class LearnedFactor(NamedTuple):
    """The factor on one prediction."""

    log_factor: float
    undetermined: float
    """Share of the prior variance of machine, model and strategy that the measurements leave: 1 without any."""
    distinct: float
    """Standard deviation of what is undetermined of the strategy, alone and with the model: two strategies do not
    share it."""
    spread: float
    """Standard deviation of the logarithm of a launch of the configuration, were those determined."""
    counts: dict[str, int]
    """Number of measured configurations by ``Neighbour.like``, the nearest first."""
    neighbours: list[Neighbour]
    """The nearest, at most ``MAX_NEIGHBOURS_NAMED``."""

    @property
    def factor(self) -> float:
        """Factor on the prediction that the machine's numbers alone give."""
        return exp(self.log_factor)


def model_key(spec: RunSpec) -> Hashable:
    """Return the values that configurations of the same model share: its name and options. A command is one model."""
    return spec.model or spec.command_digest, msgspec.json.encode(spec.model_options, order="deterministic")


def strategy_key(spec: RunSpec) -> Hashable:
    """Return the values that configurations of the same strategy share: its name, and the degrees above 1.

    ``filter`` in groups with replicas communicates unlike ``filter`` over all ranks; ``ddp`` of one rank does not.
    """
    return spec.strategy, tuple(name for name in DEGREE_NAMES if (getattr(spec, name) or 1) > 1)


class MeasuredFactors:
    """The posterior of the factors of one cluster, and what it is without single configurations."""

    def __init__(self, ratios: Sequence[MeasuredRatio]) -> None:
        """``ratios``: one of each configuration."""
        self._rows = [_KeyedRatio(ratio, model_key(ratio.spec), strategy_key(ratio.spec)) for ratio in ratios]
        self._ids = {ratio.config_id for ratio in ratios}
        self._fits: dict[str, _FactorFit | None] = {}

    def learned(self, spec: RunSpec, config_id: str, *, held_out: bool = False) -> LearnedFactor | None:
        """Return the factor on the prediction of a run; ``None`` where nothing was measured.

        Args:
            spec: of the run.
            config_id: of the run.
            held_out: leave the configuration's own results out, as every score must.
        """
        left_out = config_id if held_out and config_id in self._ids else ""
        if left_out not in self._fits:
            rows = [row for row in self._rows if row.ratio.config_id != left_out]
            self._fits[left_out] = _FactorFit(rows) if rows else None
        fit = self._fits[left_out]
        return None if fit is None else fit.factor(spec, config_id)


class _KeyedRatio(NamedTuple):
    """A ratio with the keys of its model and its strategy."""

    ratio: MeasuredRatio
    model: Hashable
    strategy: Hashable


class _Cell(NamedTuple):
    """The measured configurations of a model with a strategy."""

    unknowns: tuple[int, int, int]
    """Indices of the machine, the model and the strategy among the unknowns."""
    mean: float
    weight: float
    """Reciprocal of the variance of ``mean``, given the cell's own term."""


class _FactorFit:
    """The posterior, given some measured configurations."""

    def __init__(self, rows: Sequence[_KeyedRatio]) -> None:
        self._rows = rows
        by_cell: dict[tuple[Hashable, Hashable], list[MeasuredRatio]] = defaultdict(list)
        for row in rows:
            by_cell[row.model, row.strategy].append(row.ratio)
        self._launch_variance = _launch_variance([row.ratio for row in rows])
        self._own_variance = _own_variance(list(by_cell.values()), self._launch_variance)
        self._models = {key: 1 + place for place, key in enumerate(dict.fromkeys(model for model, _ in by_cell))}
        first = 1 + len(self._models)
        strategies = dict.fromkeys(strategy for _, strategy in by_cell)
        self._strategies = {key: first + place for place, key in enumerate(strategies)}
        self._cells = {key: self._cell(key, ratios) for key, ratios in by_cell.items()}
        self._solve()

    def _cell(self, key: tuple[Hashable, Hashable], ratios: Sequence[MeasuredRatio]) -> _Cell:
        weights = [1 / self._variance_of(ratio) for ratio in ratios]
        mean = sum(weight * ratio.log_ratio for weight, ratio in zip(weights, ratios, strict=True)) / sum(weights)
        return _Cell((0, self._models[key[0]], self._strategies[key[1]]), mean, sum(weights))

    def _variance_of(self, ratio: MeasuredRatio) -> float:
        return self._own_variance + self._launch_variance / len(ratio.launches_s)

    def _solve(self) -> None:
        """Set the posterior mean and covariance of the machine's, models' and strategies' terms.

        Each cell is one observation of the sum of its three terms: a step of recursive least squares.
        """
        spreads = [MACHINE_SPREAD, *[MODEL_SPREAD] * len(self._models), *[STRATEGY_SPREAD] * len(self._strategies)]
        self._means = [0.0] * len(spreads)
        self._covariance = [[0.0] * len(spreads) for _ in spreads]
        for place, spread in enumerate(spreads):
            self._covariance[place][place] = spread**2
        for cell in self._cells.values():
            sum_covariance = [sum(row[place] for place in cell.unknowns) for row in self._covariance]
            variance = sum(sum_covariance[place] for place in cell.unknowns) + CELL_SPREAD**2 + 1 / cell.weight
            residual = cell.mean - sum(self._means[place] for place in cell.unknowns)
            for row, shared in enumerate(sum_covariance):
                self._means[row] += shared / variance * residual
                for column, other in enumerate(sum_covariance):
                    self._covariance[row][column] -= shared * other / variance

    def factor(self, spec: RunSpec, config_id: str) -> LearnedFactor:
        """Return the posterior of a configuration's factor."""
        keys = model_key(spec), strategy_key(spec)
        places = [0, self._models.get(keys[0]), self._strategies.get(keys[1])]
        fitted_places = [place for place in places if place is not None]
        mean = sum(self._means[place] for place in fitted_places)
        spread = sum(self._covariance[row][column] for row in fitted_places for column in fitted_places)
        spread += sum(
            width**2 for place, width in zip(places[1:], (MODEL_SPREAD, STRATEGY_SPREAD), strict=True) if place is None
        )
        cell = self._cells.get(keys)
        gain = 0.0 if cell is None else CELL_SPREAD**2 / (CELL_SPREAD**2 + 1 / cell.weight)
        mean = (1 - gain) * mean + gain * (cell.mean if cell is not None else 0.0)
        spread = (1 - gain) ** 2 * spread + CELL_SPREAD**2 * (1 - gain)
        strategy = STRATEGY_SPREAD**2 if places[2] is None else self._covariance[places[2]][places[2]]
        distinct = (1 - gain) ** 2 * strategy + CELL_SPREAD**2 * (1 - gain)
        own_ratio = next((row.ratio for row in self._rows if row.ratio.config_id == config_id), None)
        own_gain = 0.0 if own_ratio is None else self._own_variance / self._variance_of(own_ratio)
        if own_ratio is not None:
            mean = (1 - own_gain) * mean + own_gain * own_ratio.log_ratio
        likes = sorted((_likeness(row, config_id, *keys), row.ratio.config_id) for row in self._rows)
        return LearnedFactor(
            log_factor=mean,
            undetermined=min(1.0, (1 - own_gain) ** 2 * spread / PRIOR_SPREAD**2),
            distinct=(1 - own_gain) * sqrt(distinct),
            spread=sqrt((1 - own_gain) * self._own_variance + self._launch_variance),
            counts=dict(Counter(_LIKENESS[rank] for rank, _ in likes)),
            neighbours=[Neighbour(config_id=key, like=_LIKENESS[rank]) for rank, key in likes[:MAX_NEIGHBOURS_NAMED]],
        )


_LIKENESS = ("itself", "model and strategy", "strategy", "model", "cluster")
"""Values of ``Neighbour.like``, the nearest first."""


def _likeness(row: _KeyedRatio, config_id: str, model: Hashable, strategy: Hashable) -> int:
    """The index among ``_LIKENESS`` of what a measured configuration has in common with another one."""
    if row.ratio.config_id == config_id:
        return 0
    shares_model, shares_strategy = row.model == model, row.strategy == strategy
    if shares_strategy:
        return 1 if shares_model else 2
    return 3 if shares_model else 4


def _squares(logs: Sequence[float]) -> float:
    """The sum of squared deviations from the mean."""
    mean = sum(logs) / len(logs)
    return sum((value - mean) ** 2 for value in logs)


def _launch_variance(ratios: Sequence[MeasuredRatio]) -> float:
    """The variance of a launch's logarithm, pooled over configurations with several launches, and its prior."""
    several = [[*map(log, ratio.launches_s)] for ratio in ratios if len(ratio.launches_s) > 1]
    freedom = sum(len(logs) - 1 for logs in several)
    squares = sum(map(_squares, several))
    return (_PRIOR_FREEDOM * _LAUNCH_SPREAD**2 + squares) / (_PRIOR_FREEDOM + freedom)


def _own_variance(cells: Sequence[Sequence[MeasuredRatio]], launch_variance: float) -> float:
    """The variance of a configuration's own term, at least 1/4 of its prior: that within cells less the launches'."""
    several = [[ratio.log_ratio for ratio in cell] for cell in cells if len(cell) > 1]
    freedom = sum(len(logs) - 1 for logs in several)
    squares = sum(map(_squares, several))
    launches = fmean(1 / len(ratio.launches_s) for cell in cells for ratio in cell)
    squares = max(0.0, squares - freedom * launch_variance * launches)
    prior = _CONFIGURATION_SPREAD**2
    return max(prior / 4, (_PRIOR_FREEDOM * prior + squares) / (_PRIOR_FREEDOM + freedom))


def counted_phrase(counts: Mapping[str, int]) -> str:
    """Return the nearest kind of neighbours and their number, as tables have them: ``itself``, ``4 of strategy``."""
    like, count = next(iter(counts.items()))
    return "itself" if like == "itself" else f"{count} of {like}"
