"""Results beside predictions: the cases that the oracle is scored on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hpcbench.config.load import load_cluster
from hpcbench.config.spec import RunSpec
from hpcbench.errors import HpcbenchError
from hpcbench.oracle.answers import Unpriced
from hpcbench.oracle.baselines import BASELINES
from hpcbench.oracle.calibration.store import read_calibrations
from hpcbench.oracle.cases import COUNTED, PARTS, Case, Measured, Said, noise_of
from hpcbench.oracle.estimates import Asked, Estimate, Known
from hpcbench.oracle.predict import Prediction
from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.report.groups import STEP
from hpcbench.report.rows import spec_of
from hpcbench.results.schema import OK
from hpcbench.results.store import ResultsTree
from hpcbench.submit.forecast import Forecast

if TYPE_CHECKING:
    import polars

OURS = "hpcbench"
"""The oracle's name among the predictors."""
COLUMNS = (
    "cluster", "run_id", "config_id", "environment_digest", "status", STEP, *(f"metrics.{part}" for part in PARTS),
    *(f"spec.{name}" for name in RunSpec.__struct_fields__),
)  # fmt: skip
_BEYOND = 1e18
"""What nobody can have measured."""
_MOST = "peak_memory_bytes"
"""Of this the largest of all launches counts."""


class Cases(NamedTuple):
    """What can be scored, and what was left out, in words."""

    cases: list[Case]
    notes: list[str]


class Forecasts:
    """One forecast a cluster."""

    def __init__(self, results: ResultsTree, model_folder: Path | None = None) -> None:
        """``model_folder`` is where users' own models are; without one theirs are looked up, never run."""
        self._results, self._model_folder = results, model_folder
        self._known: dict[str, Forecast | Unpriced] = {}
        self._seen: dict[str, frozenset[str]] = {}

    def of(self, cluster: str) -> Forecast | Unpriced:
        """The forecast for a cluster; why there is none where its profile cannot be read."""
        if cluster not in self._known:
            try:
                profile, _ = load_cluster(cluster)
                self._known[cluster] = Forecast(
                    profile, self._results.cluster(cluster), self._model_folder, forgiving=True
                )
            except HpcbenchError as error:
                self._known[cluster] = Unpriced(error.message)
        return self._known[cluster]

    def predict(self, cluster: str, spec: RunSpec) -> Prediction | Unpriced:
        """As ``Forecast.of``."""
        found = self.of(cluster)
        return found if isinstance(found, Unpriced) else found.of(spec)

    def fitted_from(self, cluster: str, spec: RunSpec) -> frozenset[str]:
        """The runs that the numbers behind a prediction were fitted to."""
        forecast = self.of(cluster)
        if isinstance(forecast, Unpriced):
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


def measured_configurations(frame: polars.DataFrame) -> list[Measured]:
    """The launches of each configuration on one cluster in one environment, in their first order.

    ``frame`` has ``COLUMNS``. A configuration that ever ended well is ``ok``.
    """
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in frame.select(COLUMNS).iter_rows(named=True):
        if row["config_id"] is not None:
            key = (row["cluster"], row["config_id"], row["environment_digest"] if row["status"] == OK else None)
            by_key.setdefault(key, []).append(row)
    done = {key[:2] for key, rows in by_key.items() if rows[0]["status"] == OK}
    # What failed has no environment of its own; it is a case where no launch ended well.
    return [_measured(rows) for key, rows in by_key.items() if rows[0]["status"] == OK or key[:2] not in done]


def _measured(rows: Sequence[dict[str, Any]]) -> Measured:
    spec = spec_of(rows[0])
    figures: dict[str, float] = {}
    noise: dict[str, float] = {}
    for part in PARTS:
        values = [value for row in rows if (value := row[f"metrics.{part}"]) is not None and 0 <= value < _BEYOND]
        if values:
            figures[part] = max(values) if part == _MOST else median(values)
        if (spread := noise_of(values)) is not None:
            noise[part] = spread
    return Measured(
        cluster=rows[0]["cluster"],
        config_id=rows[0]["config_id"],
        spec=spec,
        status=rows[0]["status"],
        run_ids=[row["run_id"] for row in rows],
        launches_s=[row[STEP] for row in rows if row["status"] == OK and row[STEP] and 0 < row[STEP] < _BEYOND],
        figures=figures,
        figures_noise=noise,
    )


Predictor = Callable[[Measured], Said]
Baseline = Callable[[Asked], Estimate]


def said_by_us(forecasts: Forecasts) -> Predictor:
    """The oracle as a predictor."""

    def say(measured: Measured) -> Said:
        found = forecasts.predict(measured.cluster, measured.spec)
        if isinstance(found, Unpriced):
            return Said(reason=found.reason)
        return Said(
            step_time_s=found.step_time_s,
            figures={part: float(getattr(found, part)) for part in PARTS},
            fits=found.fits,
            low_s=found.interval.low,
            high_s=found.interval.high,
        )

    return say


def said_by_baseline(forecasts: Forecasts, baseline: Baseline, measured: Sequence[Measured]) -> Predictor:
    """One of ``BASELINES`` as a predictor, that may look at all that was ``measured`` on fewer devices."""
    known: dict[str, list[Known]] = {}
    for one in measured:
        if one.step_time_s is not None:
            known.setdefault(one.cluster, []).append(Known(one.spec, one.step_time_s))

    def say(measured: Measured) -> Said:
        forecast = forecasts.of(measured.cluster)
        if isinstance(forecast, Unpriced):
            return Said(reason=forecast.reason)
        table = forecast.table(measured.spec)
        if isinstance(table, Unpriced):
            return Said(reason=table.reason)
        asked = Asked(measured.spec, table, forecast.machine(measured.spec), known.get(measured.cluster, []))
        try:
            found = baseline(asked)
        except (ArithmeticError, AssertionError, HpcbenchError, LookupError, ValueError) as error:
            return Said(reason=f"{type(error).__name__}: {error}")
        figures = {"compute_s": found.compute_s, "comm_s": found.comm_s, "peak_memory_bytes": found.memory_bytes}
        return Said(
            step_time_s=found.step_time_s,
            figures={name: value for name, value in figures.items() if value is not None},
            reason=found.reason,
        )

    return say


def cases_of(frame: polars.DataFrame, forecasts: Forecasts) -> Cases:
    """Every configuration that trained, or should have, with what the oracle and each baseline say of it."""
    measured = measured_configurations(frame)
    counted = [one for one in measured if (one.status == OK and one.launches_s) or one.status in COUNTED]
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
    predictors = {OURS: said_by_us(forecasts)}
    predictors |= {name: said_by_baseline(forecasts, one, real) for name, one in BASELINES.items()}
    return Cases([Case(one, {name: say(one) for name, say in predictors.items()}) for one in unseen], notes)


def case_json(one: Case) -> dict[str, Any]:
    """Raw figures of a configuration and what was said of it."""
    interval = one.measured.interval()
    return {
        **msgspec.to_builtins(one.measured),
        "step_time_s": one.measured.step_time_s,
        "ci95": {"low": interval[0], "high": interval[1]} if interval else None,
        "noise": one.measured.noise,
        "predicted": msgspec.to_builtins(one.said),
    }
