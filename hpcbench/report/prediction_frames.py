"""Predictions next to measurements as polars frames, for tables, plots and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import polars as pl

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.predict.prediction import NotPredicted, Prediction
from hpcbench.report.configurations import HIGH, LOW, STEP_TIME, run_spec_of
from hpcbench.report.plots.plot_model import NothingToDraw
from hpcbench.report.plots.point_data import plot_points
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point

EXTRAPOLATION_FACTOR = 8
"""Predicted lines extend to so many times the measured devices."""
PREDICTION_FIELDS = {
    "predicted_step_time_s": "step_time_s", "predicted_samples_per_s": "samples_per_s",
    "predicted_compute_s": "compute_s", "predicted_exposed_comm_s": "exposed_comm_s",
    "predicted_peak_memory_bytes": "peak_memory_bytes",
}  # fmt: skip
"""Columns that a table may ask for, and the fields of a prediction; ``prediction_error`` is signed."""


def with_predictions(rows: pl.DataFrame, forecasts: ClusterForecasts) -> pl.DataFrame:
    """Return ``rows`` of configurations with ``PREDICTION_FIELDS`` and ``prediction_error``, null if unpredicted."""
    predictions = [_predict_row(row, forecasts) for row in rows.iter_rows(named=True)]
    columns = [
        pl.Series(name, [None if entry is None else float(getattr(entry, field)) for entry in predictions], pl.Float64)
        for name, field in PREDICTION_FIELDS.items()
    ]
    rows = rows.with_columns(columns)
    error = (
        (pl.col("predicted_step_time_s") - pl.col(STEP_TIME)) / pl.col(STEP_TIME)
        if STEP_TIME in rows.columns
        else pl.lit(None)
    )
    return rows.with_columns(
        pl.when(pl.col("status") == STATUS_OK).then(error).cast(pl.Float64).alias("prediction_error")
    )


def _predict_row(row: dict[str, Any], forecasts: ClusterForecasts) -> Prediction | None:
    if row["config_id"] is None:
        return None
    prediction = forecasts.predict(row["cluster"], run_spec_of(row))
    return None if isinstance(prediction, NotPredicted) else prediction


def frames_of_page(launches: pl.DataFrame, results: ResultsTree) -> dict[str, pl.DataFrame]:
    """The frames of a report's page with predictions: ``predicted`` beside measurements, and ``lines`` over scales."""
    forecasts = ClusterForecasts(results)
    return {
        "predicted": measured_vs_predicted_frame(launches, forecasts),
        "lines": predicted_scaling_frame(launches, forecasts),
    }


def measured_vs_predicted_frame(
    frame: pl.DataFrame, forecasts: ClusterForecasts, by: Sequence[str] = ()
) -> pl.DataFrame:
    """Return the frame of the plot ``predicted``: one row for each measured configuration with a prediction.

    Columns ``strategy`` (the line), ``label``, ``predicted``, ``measured``, ``low``, ``high`` (bounds of the measured
    time, seconds) and ``launches``. ``frame`` has ``SPEC_COLUMNS`` beside the columns that plots read.
    """
    schema = {"strategy": pl.String, "label": pl.String, "launches": pl.UInt32, "predicted": pl.Float64,
              "measured": pl.Float64, "low": pl.Float64, "high": pl.Float64}  # fmt: skip
    try:
        points = plot_points(frame, by, STEP_TIME, every=True)
    except NothingToDraw:
        return pl.DataFrame(schema=schema)
    rows = with_predictions(points.frame, forecasts).filter(pl.col("predicted_step_time_s").is_not_null())
    return rows.select(
        pl.col("series").alias("strategy"), pl.format("{}, {} devices", "label", "devices").alias("label"), "launches",
        predicted="predicted_step_time_s", measured=STEP_TIME, low=f"{STEP_TIME}:{LOW}", high=f"{STEP_TIME}:{HIGH}",
    )  # fmt: skip


def predicted_scaling_frame(
    frame: pl.DataFrame, forecasts: ClusterForecasts, by: Sequence[str] = (), reach: int = EXTRAPOLATION_FACTOR
) -> pl.DataFrame:
    """Return lines for the plot ``scaling``: predictions for the measured scales and on to ``reach`` times the largest.

    Columns ``panel, strategy, devices, step_time_s, step_time_low_s, step_time_high_s``.
    """
    schema = {"panel": pl.String, "strategy": pl.String, "devices": pl.Int64, "step_time_s": pl.Float64,
              "step_time_low_s": pl.Float64, "step_time_high_s": pl.Float64}  # fmt: skip
    try:
        lines = plot_points(frame, by, STEP_TIME).frame.partition_by("panel", "series", maintain_order=True)
    except NothingToDraw:
        lines = []
    rows = [row for line in lines for row in _predicted_line(line, forecasts, reach)]
    return pl.DataFrame(rows, schema=schema)


def _predicted_line(line: pl.DataFrame, forecasts: ClusterForecasts, reach: int) -> Iterator[dict[str, Any]]:
    """The predictions of one series of one panel."""
    cluster, panel, series = line["cluster"][0], line["panel"][0], line["series"][0]
    measured = {row["devices"]: run_spec_of(row) for row in line.iter_rows(named=True)}
    for spec in specs_over_scales(measured, reach):
        prediction = forecasts.predict(cluster, spec)
        if not isinstance(prediction, NotPredicted):
            yield {
                "panel": panel, "strategy": series, "devices": spec.devices, "step_time_s": prediction.step_time_s,
                "step_time_low_s": prediction.interval.low, "step_time_high_s": prediction.interval.high,
            }  # fmt: skip


def specs_over_scales(measured: dict[int, RunSpec], reach: int) -> Iterator[RunSpec]:
    """Yield ``measured`` by devices, and the largest doubled up to ``reach`` times, as far as these are feasible."""
    yield from (measured[devices] for devices in sorted(measured))
    largest = measured[max(measured)]
    # The same global batch on every scale is strong scaling, which continues as such.
    totals = {spec.global_batch_size for spec in measured.values()}
    is_strong = len(totals) == 1 and len({spec.batch_size for spec in measured.values()}) > 1
    factor = 2
    while factor <= reach:
        enlarged = enlarge_spec(largest, factor, is_strong=is_strong)
        if enlarged is not None:
            yield enlarged
        factor *= 2


def enlarge_spec(spec: RunSpec, factor: int, *, is_strong: bool = False) -> RunSpec | None:
    """Return ``spec`` on ``factor`` times as many nodes, with more replicas or a larger degree of its own.

    ``None`` if that is infeasible.
    """
    degree_name = get_strategy(spec.strategy).own_degree
    if degree_name is None:
        return None
    degree = "dp_degree" if spec.dp_degree > 1 else degree_name
    point = msgspec.to_builtins(spec)
    point |= {"nodes": spec.nodes * factor, degree: getattr(spec, degree) * factor}
    point.pop("time_limit_min", None)
    if is_strong:
        del point["batch_size"]
        point["global_batch_size"] = spec.global_batch_size
    resolved = resolve_point(point, PartitionLimits("anywhere"))
    return None if isinstance(resolved, InfeasiblePoint) else resolved
