"""Validation of the oracle and its baselines against measured configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, hypot, log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import polars as pl

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError
from hpcbench.forecast.forecast import Forecast
from hpcbench.oracle import scoring
from hpcbench.oracle.baselines import BASELINES, BaselineEstimate, BaselineRequest, MeasuredRun, choice_results
from hpcbench.oracle.calibration.calibration_store import read_calibrations
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.prediction import NORMAL_90, NotPredicted, Prediction, count_bases
from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.report.configurations import SPEC_COLUMNS, STEP_TIME, run_spec_of
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK

ORACLE_NAME, MACHINE_ONLY = "hpcbench", "machine_only"
"""The oracle's name among the predictors, and that of the oracle as if nothing else had been measured."""
_WIRE = "wire_s"
"""Measured part that the oracle's communication is compared with: the oracle predicts no wait for late ranks, which
``comm_s`` and ``exposed_comm_s`` contain."""
VALIDATION_COLUMNS = (
    "cluster", "run_id", "config_id", "environment_digest", "status", STEP_TIME,
    *(f"metrics.{part}" for part in (*scoring.SCORED_PARTS, _WIRE)),
    *SPEC_COLUMNS,
)  # fmt: skip
_IMPLAUSIBLE = 1e18
"""Larger values are errors."""
_PEAK_MEMORY = "peak_memory_bytes"
"""The maximum over launches counts."""


class ClusterForecasts:
    """One forecast per cluster, made when it is first used."""

    def __init__(self, results: ResultsTree, model_folder: Path | None = None) -> None:
        """Custom models in ``model_folder`` may be run; without it only their stored tables are used."""
        self._results, self._model_folder = results, model_folder
        self._forecasts: dict[str, Forecast | NotPredicted] = {}
        self._fitted: dict[str, frozenset[str]] = {}

    def forecast(self, cluster: str) -> Forecast | NotPredicted:
        """Return the forecast for a cluster, or the reason why its profile cannot be read."""
        if cluster not in self._forecasts:
            try:
                profile, _ = load_cluster(cluster)
                tree = self._results.cluster(cluster)
                self._forecasts[cluster] = Forecast(profile, tree, self._model_folder, untrusted=True)
            except HpcbenchError as error:
                self._forecasts[cluster] = NotPredicted(error.message)
        return self._forecasts[cluster]

    def predict(self, cluster: str, spec: RunSpec, *, learns: bool = True) -> Prediction | NotPredicted:
        """Return ``Forecast.predict`` without the results of the run's own configuration.

        Without ``learns`` it is ``Forecast.predict_alone``. Where the cluster has no forecast the reason is returned.
        """
        forecast = self.forecast(cluster)
        if isinstance(forecast, NotPredicted):
            return forecast
        return forecast.predict(spec, held_out=True) if learns else forecast.predict_alone(spec)

    def fitted_from(self, cluster: str, spec: RunSpec) -> frozenset[str]:
        """Return the ids of runs that the numbers behind a prediction were fitted to."""
        forecast = self.forecast(cluster)
        if isinstance(forecast, NotPredicted):
            return frozenset()
        source = forecast.machine(spec).source
        if source not in self._fitted:
            stored, _ = read_calibrations(self._results.cluster(cluster), cluster)
            used = [entry.calibration.run_ids for entry in stored if entry.digest in source]
            self._fitted[source] = frozenset(run_id for run_ids in used for run_id in run_ids)
        return self._fitted[source]

    def machines(self) -> list[Machine]:
        """Return the machines that predictions were made with."""
        forecasts = [forecast for forecast in self._forecasts.values() if isinstance(forecast, Forecast)]
        return [machine for forecast in forecasts for machine in forecast.machines()]


def measured_configurations(frame: pl.DataFrame) -> list[scoring.MeasuredConfiguration]:
    """Return the launches of each configuration on one cluster in one environment, in their first order.

    ``frame`` has ``VALIDATION_COLUMNS``. A configuration with any launch that is ok is ``ok``.
    """
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in frame.select(VALIDATION_COLUMNS).iter_rows(named=True):
        if row["config_id"] is not None:
            key = (row["cluster"], row["config_id"], row["environment_digest"] if row["status"] == STATUS_OK else None)
            by_key.setdefault(key, []).append(row)
    succeeded = {key[:2] for key, rows in by_key.items() if rows[0]["status"] == STATUS_OK}
    # Failed launches have no environment of their own; they are a case if no launch is ok.
    return [
        _measured_configuration(rows)
        for key, rows in by_key.items()
        if rows[0]["status"] == STATUS_OK or key[:2] not in succeeded
    ]


def _measured_part(row: dict[str, Any], part: str) -> float | None:
    value: float | None = row[f"metrics.{_WIRE if part == 'comm_s' else part}"]
    return value


def _measured_configuration(rows: Sequence[dict[str, Any]]) -> scoring.MeasuredConfiguration:
    first = rows[0]
    figures: dict[str, float] = {}
    noise: dict[str, float] = {}
    for part in scoring.SCORED_PARTS:
        if part == "comm_s" and (first["spec.pp_degree"] or 1) > 1:
            # A stage's communication is mostly the wait for its neighbour.
            continue
        seen = (_measured_part(row, part) for row in rows)
        values = [value for value in seen if value is not None and 0 <= value < _IMPLAUSIBLE]
        if values:
            figures[part] = max(values) if part == _PEAK_MEMORY else median(values)
        if (spread := scoring.launch_noise(values)) is not None:
            noise[part] = spread
    times = [row[STEP_TIME] for row in rows if row["status"] == STATUS_OK and row[STEP_TIME]]
    return scoring.MeasuredConfiguration(
        cluster=first["cluster"], config_id=first["config_id"], spec=run_spec_of(first), status=first["status"],
        run_ids=[row["run_id"] for row in rows], launches_s=[time for time in times if 0 < time < _IMPLAUSIBLE],
        figures=figures, figures_noise=noise,
    )  # fmt: skip


CasePredictor = Callable[[scoring.MeasuredConfiguration], scoring.PredictorResult]
BaselineEstimator = Callable[[BaselineRequest], BaselineEstimate]


def oracle_predictor(forecasts: ClusterForecasts, *, learns: bool = True) -> CasePredictor:
    """Return the oracle as a predictor; without ``learns`` from the machine's numbers alone."""

    def predict(measured: scoring.MeasuredConfiguration) -> scoring.PredictorResult:
        prediction = forecasts.predict(measured.cluster, measured.spec, learns=learns)
        if isinstance(prediction, NotPredicted):
            return scoring.PredictorResult(reason=prediction.reason)
        return scoring.PredictorResult(
            step_time_s=prediction.step_time_s,
            figures={part: float(getattr(prediction, part)) for part in scoring.SCORED_PARTS},
            fits=prediction.fits, low_s=prediction.interval.low, high_s=prediction.interval.high,
            rests_on=prediction.rests_on,
        )  # fmt: skip

    return predict


def baseline_predictor(
    forecasts: ClusterForecasts, baseline: BaselineEstimator, measured: Sequence[scoring.MeasuredConfiguration]
) -> CasePredictor:
    """Return one of ``BASELINES`` as a predictor that may use all of ``measured`` on fewer devices."""
    runs: dict[str, list[MeasuredRun]] = {}
    for other in measured:
        if other.step_time_s is not None:
            runs.setdefault(other.cluster, []).append(MeasuredRun(other.spec, other.step_time_s))

    def predict(measured: scoring.MeasuredConfiguration) -> scoring.PredictorResult:
        forecast = forecasts.forecast(measured.cluster)
        if isinstance(forecast, NotPredicted):
            return scoring.PredictorResult(reason=forecast.reason)
        # Results of other people may contain a run that no sweep can contain: it is refused before any formula.
        memory = forecast.memory_fit(measured.spec)
        if isinstance(memory, NotPredicted):
            return scoring.PredictorResult(reason=memory.reason)
        table = forecast.table(measured.spec)
        assert not isinstance(table, NotPredicted), "the memory was computed from the table"
        machine = forecast.machine(measured.spec)
        try:
            estimate = baseline(BaselineRequest(measured.spec, table, machine, runs.get(measured.cluster, [])))
        except HpcbenchError as error:
            return scoring.PredictorResult(reason=error.message)
        parts = {"compute_s": estimate.compute_s, "comm_s": estimate.comm_s, "peak_memory_bytes": estimate.memory_bytes}
        figures = {name: value for name, value in parts.items() if value is not None}
        return scoring.PredictorResult(step_time_s=estimate.step_time_s, figures=figures, reason=estimate.reason)

    return predict


def validation_cases(
    frame: pl.DataFrame, forecasts: ClusterForecasts
) -> tuple[list[scoring.ValidationCase], list[str]]:
    """Return the configurations to score with the results of all predictors, and notes on those left out."""
    measured = measured_configurations(frame)
    # A probe measures, it does not train.
    priced = {name for name, strategy in STRATEGIES.items() if strategy.cost is not None}
    steps: dict[str, Callable[[scoring.MeasuredConfiguration], Any]] = {
        "that were skipped, cancelled, preempted or unsupported":
            lambda case: (case.status == STATUS_OK and case.launches_s) or case.status in scoring.COUNTED_FAILURES,
        "of strategies that the oracle has no formulas for": lambda case: case.spec.strategy in priced,
        "that the cluster's calibration was fitted to":
            lambda case: not forecasts.fitted_from(case.cluster, case.spec) & {*case.run_ids},
    }  # fmt: skip
    notes = []
    stages = [measured]
    for reason, is_kept in steps.items():
        stages.append([case for case in stages[-1] if is_kept(case)])
        if len(stages[-1]) < len(stages[-2]):
            notes.append(f"not scored: {len(stages[-2]) - len(stages[-1])} configurations {reason}")
    # Baselines may use runs that the calibration was fitted to.
    *_, usable, scored = stages
    predictors = {ORACLE_NAME: oracle_predictor(forecasts)}
    predictors |= {name: baseline_predictor(forecasts, baseline, usable) for name, baseline in BASELINES.items()}
    cases = [
        scoring.ValidationCase(case, {name: predict(case) for name, predict in predictors.items()}) for case in scored
    ]
    if any(_is_moved(case) for case in cases):
        alone = oracle_predictor(forecasts, learns=False)
        for case in cases:
            case.said[MACHINE_ONLY] = alone(case.measured)
    for case in cases:
        case.said |= choice_results(case.measured.spec.strategy, case.said[ORACLE_NAME].fits)
    return cases, notes


def widened_result(result: scoring.PredictorResult, outside: float) -> scoring.PredictorResult:
    """Return ``result`` with an interval that contains a further relative uncertainty, one standard deviation."""
    middle_s, bounds_s = result.step_time_s, (result.low_s, result.high_s)
    if not middle_s or not all(bounds_s):
        return result
    low_s, high_s = (
        middle_s * exp(side * hypot(log(bound_s / middle_s), NORMAL_90 * outside))
        for side, bound_s in zip((-1, 1), bounds_s, strict=True)
        if bound_s
    )
    return msgspec.structs.replace(result, low_s=low_s, high_s=high_s)


def case_json(case: scoring.ValidationCase) -> dict[str, Any]:
    """Return the figures of a configuration and of all predictors."""
    interval = case.measured.interval()
    return {
        **msgspec.to_builtins(case.measured),
        "step_time_s": case.measured.step_time_s,
        "ci95": {"low": interval[0], "high": interval[1]} if interval else None,
        "noise": case.measured.noise,
        "predicted": msgspec.to_builtins(case.said),
    }


def _is_moved(case: scoring.ValidationCase) -> bool:
    basis = case.said[ORACLE_NAME].rests_on
    return basis is not None and basis.kind == "measured neighbours"


def _basis_notes(cases: Sequence[scoring.ValidationCase]) -> list[str]:
    """Return a note on the evidence of the oracle's predictions."""
    bases = [basis for case in cases if (basis := case.said[ORACLE_NAME].rests_on) is not None]
    if not bases:
        return []
    held_out = "; each leaves the results of its own configuration out (held out)"
    return [f"predictions: {count_bases(bases)}{held_out if any(map(_is_moved, cases)) else ''}"]


class ValidationResult(NamedTuple):
    """The cases, the scores of every predictor (the oracle's first), and the machines of the predictions."""

    cases: list[scoring.ValidationCase]
    scores: list[scoring.PredictorScore]
    machines: list[Machine]
    notes: list[str]


def score_predictors(frame: pl.DataFrame, results: ResultsTree, outside: float = 0.0) -> ValidationResult:
    """Score the oracle and the baselines.

    Args:
        frame: results with ``VALIDATION_COLUMNS``.
        results: the tree of the calibrations.
        outside: relative uncertainty by work of others during the runs of ``frame``, in addition to the predictions'.
    """
    forecasts = ClusterForecasts(results)
    cases, notes = validation_cases(frame, forecasts)
    if outside:
        for case in cases:
            case.said |= {
                name: widened_result(case.said[name], outside)
                for name in (ORACLE_NAME, MACHINE_ONLY)
                if name in case.said
            }
        notes.append(f"the 90 % intervals are wider, by a relative uncertainty of {outside:.0%} from work of others")
    names = cases[0].said if cases else []
    scores = [scoring.score_predictor(cases, name, None if name == ORACLE_NAME else ORACLE_NAME) for name in names]
    reasons = {case.said[ORACLE_NAME].reason for case in cases} - {""}
    notes += [f"not predicted: {reason}" for reason in sorted(reasons)]
    notes += _basis_notes(cases)
    return ValidationResult(cases, scores, forecasts.machines(), notes)
