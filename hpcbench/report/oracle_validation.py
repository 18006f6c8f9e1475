"""Validation of the oracle and its baselines against measured configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError
from hpcbench.forecast.forecast import Forecast
from hpcbench.oracle.baselines import BASELINES, BaselineEstimate, BaselineRequest, MeasuredRun
from hpcbench.oracle.calibration.calibration_store import read_calibrations
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.prediction import NotPredicted, Prediction
from hpcbench.oracle.scoring import (
    COUNTED_FAILURES,
    SCORED_PARTS,
    MeasuredConfiguration,
    PredictorResult,
    PredictorScore,
    ValidationCase,
    launch_noise,
    score_predictor,
)
from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.report.configurations import STEP_TIME, run_spec_of
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK

if TYPE_CHECKING:
    import polars

ORACLE_NAME = "hpcbench"
"""The oracle's name among the predictors."""
VALIDATION_COLUMNS = (
    "cluster", "run_id", "config_id", "environment_digest", "status", STEP_TIME,
    *(f"metrics.{part}" for part in SCORED_PARTS),
    *(f"spec.{name}" for name in RunSpec.__struct_fields__),
)  # fmt: skip
_IMPLAUSIBLE = 1e18
"""What nobody can have measured."""
_PEAK_MEMORY = "peak_memory_bytes"
"""Of this the largest of all launches counts."""


class ValidationCases(NamedTuple):
    """What can be scored, and what was left out, in words."""

    cases: list[ValidationCase]
    notes: list[str]


class ClusterForecasts:
    """One forecast a cluster."""

    def __init__(self, results: ResultsTree, model_folder: Path | None = None) -> None:
        """``custom_model_folder`` is where users' own models are; without one theirs are looked up, never run."""
        self._results, self._model_folder = results, model_folder
        self._known: dict[str, Forecast | NotPredicted] = {}
        self._seen: dict[str, frozenset[str]] = {}

    def of(self, cluster: str) -> Forecast | NotPredicted:
        """The forecast for a cluster; why there is none where its profile cannot be read."""
        if cluster not in self._known:
            try:
                profile, _ = load_cluster(cluster)
                self._known[cluster] = Forecast(
                    profile, self._results.cluster(cluster), self._model_folder, untrusted=True
                )
            except HpcbenchError as error:
                self._known[cluster] = NotPredicted(error.message)
        return self._known[cluster]

    def predict(self, cluster: str, spec: RunSpec) -> Prediction | NotPredicted:
        """The prediction of ``Forecast.predict``, or the reason why the cluster has no forecast."""
        found = self.of(cluster)
        return found if isinstance(found, NotPredicted) else found.predict(spec)

    def fitted_from(self, cluster: str, spec: RunSpec) -> frozenset[str]:
        """The runs that the numbers behind a prediction were fitted to."""
        forecast = self.of(cluster)
        if isinstance(forecast, NotPredicted):
            return frozenset()
        source = forecast.machine(spec).source
        if source not in self._seen:
            stored, _ = read_calibrations(self._results.cluster(cluster), cluster)
            ids = [one.calibration.run_ids for one in stored if one.digest in source]
            self._seen[source] = frozenset(run_id for own in ids for run_id in own)
        return self._seen[source]

    def made(self) -> list[Forecast]:
        """Those that there are."""
        return [one for one in self._known.values() if isinstance(one, Forecast)]


def measured_configurations(frame: polars.DataFrame) -> list[MeasuredConfiguration]:
    """The launches of each configuration on one cluster in one environment, in their first order.

    ``frame`` has ``COLUMNS``. A configuration that ever ended well is ``ok``.
    """
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in frame.select(VALIDATION_COLUMNS).iter_rows(named=True):
        if row["config_id"] is not None:
            key = (row["cluster"], row["config_id"], row["environment_digest"] if row["status"] == STATUS_OK else None)
            by_key.setdefault(key, []).append(row)
    done = {key[:2] for key, rows in by_key.items() if rows[0]["status"] == STATUS_OK}
    # What failed has no environment of its own; it is a case where no launch ended well.
    return [
        _measured_configuration(rows)
        for key, rows in by_key.items()
        if rows[0]["status"] == STATUS_OK or key[:2] not in done
    ]


def _measured_configuration(rows: Sequence[dict[str, Any]]) -> MeasuredConfiguration:
    spec = run_spec_of(rows[0])
    figures: dict[str, float] = {}
    noise: dict[str, float] = {}
    for part in SCORED_PARTS:
        values = [value for row in rows if (value := row[f"metrics.{part}"]) is not None and 0 <= value < _IMPLAUSIBLE]
        if values:
            figures[part] = max(values) if part == _PEAK_MEMORY else median(values)
        if (spread := launch_noise(values)) is not None:
            noise[part] = spread
    return MeasuredConfiguration(
        cluster=rows[0]["cluster"],
        config_id=rows[0]["config_id"],
        spec=spec,
        status=rows[0]["status"],
        run_ids=[row["run_id"] for row in rows],
        launches_s=[
            row[STEP_TIME]
            for row in rows
            if row["status"] == STATUS_OK and row[STEP_TIME] and 0 < row[STEP_TIME] < _IMPLAUSIBLE
        ],
        figures=figures,
        figures_noise=noise,
    )


CasePredictor = Callable[[MeasuredConfiguration], PredictorResult]
BaselineEstimator = Callable[[BaselineRequest], BaselineEstimate]


def oracle_predictor(forecasts: ClusterForecasts) -> CasePredictor:
    """The oracle as a predictor."""

    def say(measured: MeasuredConfiguration) -> PredictorResult:
        found = forecasts.predict(measured.cluster, measured.spec)
        if isinstance(found, NotPredicted):
            return PredictorResult(reason=found.reason)
        return PredictorResult(
            step_time_s=found.step_time_s,
            figures={part: float(getattr(found, part)) for part in SCORED_PARTS},
            fits=found.fits,
            low_s=found.interval.low,
            high_s=found.interval.high,
        )

    return say


def baseline_predictor(
    forecasts: ClusterForecasts, baseline: BaselineEstimator, measured: Sequence[MeasuredConfiguration]
) -> CasePredictor:
    """One of ``BASELINES`` as a predictor, that may look at all that was ``measured`` on fewer devices."""
    known: dict[str, list[MeasuredRun]] = {}
    for one in measured:
        if one.step_time_s is not None:
            known.setdefault(one.cluster, []).append(MeasuredRun(one.spec, one.step_time_s))

    def say(measured: MeasuredConfiguration) -> PredictorResult:
        forecast = forecasts.of(measured.cluster)
        if isinstance(forecast, NotPredicted):
            return PredictorResult(reason=forecast.reason)
        table = forecast.table(measured.spec)
        if isinstance(table, NotPredicted):
            return PredictorResult(reason=table.reason)
        asked = BaselineRequest(measured.spec, table, forecast.machine(measured.spec), known.get(measured.cluster, []))
        try:
            found = baseline(asked)
        except (ArithmeticError, AssertionError, HpcbenchError, LookupError, ValueError) as error:
            return PredictorResult(reason=f"{type(error).__name__}: {error}")
        figures = {"compute_s": found.compute_s, "comm_s": found.comm_s, "peak_memory_bytes": found.memory_bytes}
        return PredictorResult(
            step_time_s=found.step_time_s,
            figures={name: value for name, value in figures.items() if value is not None},
            reason=found.reason,
        )

    return say


def validation_cases(frame: polars.DataFrame, forecasts: ClusterForecasts) -> ValidationCases:
    """Every configuration that trained, or should have, with what the oracle and each baseline say of it."""
    measured = measured_configurations(frame)
    counted = [
        one for one in measured if (one.status == STATUS_OK and one.launches_s) or one.status in COUNTED_FAILURES
    ]
    # A probe measures, it does not train; computation that is slept through is no computation.
    trained = [one for one in counted if one.spec.strategy in STRATEGIES and STRATEGIES[one.spec.strategy].cost]
    real = [one for one in trained if not one.spec.rehearse]
    unseen = [one for one in real if not forecasts.fitted_from(one.cluster, one.spec) & {*one.run_ids}]
    left_out = {
        "that were skipped, cancelled, preempted or unsupported": len(measured) - len(counted),
        "of strategies that the oracle has no formulas for": len(counted) - len(trained),
        "that were rehearsed, which is no measurement of this cluster": len(trained) - len(real),
        "that the cluster's calibration was fitted to": len(real) - len(unseen),
    }
    notes = [f"not scored: {count} configurations {what}" for what, count in left_out.items() if count]
    predictors = {ORACLE_NAME: oracle_predictor(forecasts)}
    predictors |= {name: baseline_predictor(forecasts, one, real) for name, one in BASELINES.items()}
    return ValidationCases(
        [ValidationCase(one, {name: say(one) for name, say in predictors.items()}) for one in unseen], notes
    )


def case_json(one: ValidationCase) -> dict[str, Any]:
    """Raw figures of a configuration and what was said of it."""
    interval = one.measured.interval()
    return {
        **msgspec.to_builtins(one.measured),
        "step_time_s": one.measured.step_time_s,
        "ci95": {"low": interval[0], "high": interval[1]} if interval else None,
        "noise": one.measured.noise,
        "predicted": msgspec.to_builtins(one.said),
    }


class ValidationResult(NamedTuple):
    """The cases, the scores of every predictor, the oracle's first, and what it made its predictions from."""

    cases: list[ValidationCase]
    scores: list[PredictorScore]
    machines: list[Machine]
    notes: list[str]


def score_predictors(frame: polars.DataFrame, results: ResultsTree) -> ValidationResult:
    """``frame`` has ``validation.COLUMNS``; calibrations are ``results``'."""
    forecasts = ClusterForecasts(results)
    found = validation_cases(frame, forecasts)
    names = found.cases[0].said if found.cases else []
    scores = [score_predictor(found.cases, name, None if name == ORACLE_NAME else ORACLE_NAME) for name in names]
    machines = [machine for one in forecasts.made() for machine in one.machines()]
    reasons = {one.said[ORACLE_NAME].reason for one in found.cases} - {""}
    return ValidationResult(
        found.cases, scores, machines, [*found.notes, *(f"not predicted: {one}" for one in sorted(reasons))]
    )
