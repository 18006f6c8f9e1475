"""Predictions next to measurements as polars frames, for tables, plots and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.prediction import NotPredicted, Prediction
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.report.configurations import HIGH, LOW, STEP_TIME, run_spec_of
from hpcbench.report.oracle_validation import ClusterForecasts
from hpcbench.report.plots.point_data import plot_points
from hpcbench.results.schema import STATUS_OK

if TYPE_CHECKING:
    import polars

EXTRAPOLATION_FACTOR = 8
"""Lines go on to so many times the devices that were measured."""
SPEC_COLUMNS = tuple(f"spec.{name}" for name in RunSpec.__struct_fields__)
"""The columns of a results frame that a prediction needs, beside the cluster."""
PREDICTION_FIELDS = {
    "predicted_step_time_s": "step_time_s", "predicted_samples_per_s": "samples_per_s",
    "predicted_compute_s": "compute_s", "predicted_exposed_comm_s": "exposed_comm_s",
    "predicted_peak_memory_bytes": "peak_memory_bytes",
}  # fmt: skip
"""Columns that a table may ask for, and the fields of a prediction; ``prediction_error`` is signed."""


def with_predictions(rows: polars.DataFrame, forecasts: ClusterForecasts) -> polars.DataFrame:
    """``rows`` of configurations with ``FIGURES`` and ``prediction_error``; null where nothing can be said."""
    import polars as pl

    found = [_predict_row(row, forecasts) for row in rows.iter_rows(named=True)]
    columns = [
        pl.Series(name, [None if one is None else float(getattr(one, field)) for one in found], dtype=pl.Float64)
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
    found = forecasts.predict(row["cluster"], run_spec_of(row))
    return None if isinstance(found, NotPredicted) else found


def measured_vs_predicted_frame(
    frame: polars.DataFrame, forecasts: ClusterForecasts, by: Sequence[str] = ()
) -> polars.DataFrame:
    """For the plot ``predicted``: a row for each measured configuration that is predicted.

    Columns ``strategy`` (the line), ``label``, ``predicted``, ``measured``, ``low``, ``high`` (of what was measured,
    seconds) and ``launches``. ``frame`` has ``SPEC_COLUMNS`` beside what plots read.
    """
    import polars as pl

    found = plot_points(frame, by, STEP_TIME, every=True)
    schema = {"strategy": pl.String, "label": pl.String, "launches": pl.UInt32, "predicted": pl.Float64,
              "measured": pl.Float64, "low": pl.Float64, "high": pl.Float64}  # fmt: skip
    if found.nothing:
        return pl.DataFrame(schema=schema)
    rows = with_predictions(found.frame, forecasts).filter(pl.col("predicted_step_time_s").is_not_null())
    return rows.select(
        pl.col("series").alias("strategy"), pl.format("{}, {} devices", "label", "devices").alias("label"), "launches",
        predicted="predicted_step_time_s", measured=STEP_TIME, low=f"{STEP_TIME}:{LOW}", high=f"{STEP_TIME}:{HIGH}",
    )  # fmt: skip


def predicted_scaling_frame(
    frame: polars.DataFrame, forecasts: ClusterForecasts, by: Sequence[str] = (), reach: int = EXTRAPOLATION_FACTOR
) -> polars.DataFrame:
    """For the plot ``scaling``: predicted lines through the measured scales and on to ``reach`` times the largest.

    Columns ``panel, strategy, devices, step_time_s, step_time_low_s, step_time_high_s``.
    """
    import polars as pl

    found = plot_points(frame, by, STEP_TIME)
    schema = {"panel": pl.String, "strategy": pl.String, "devices": pl.Int64, "step_time_s": pl.Float64,
              "step_time_low_s": pl.Float64, "step_time_high_s": pl.Float64}  # fmt: skip
    lines = [] if found.nothing else found.frame.partition_by("panel", "series", maintain_order=True)
    rows = [row for line in lines for row in _predicted_line(line, forecasts, reach)]
    return pl.DataFrame(rows, schema=schema)


def _predicted_line(line: polars.DataFrame, forecasts: ClusterForecasts, reach: int) -> Iterator[dict[str, Any]]:
    """One series of one panel."""
    cluster, panel, series = line["cluster"][0], line["panel"][0], line["series"][0]
    measured = {row["devices"]: run_spec_of(row) for row in line.iter_rows(named=True)}
    for spec in specs_over_scales(measured, reach):
        found = forecasts.predict(cluster, spec)
        if not isinstance(found, NotPredicted):
            yield {
                "panel": panel, "strategy": series, "devices": spec.devices, "step_time_s": found.step_time_s,
                "step_time_low_s": found.interval.low, "step_time_high_s": found.interval.high,
            }  # fmt: skip


def specs_over_scales(measured: dict[int, RunSpec], reach: int) -> Iterator[RunSpec]:
    """``measured`` by devices, and the largest of them doubled until ``reach`` times as many, where that can be run."""
    yield from (measured[devices] for devices in sorted(measured))
    largest = measured[max(measured)]
    # The same samples in all on every scale is strong scaling, which goes on as such.
    totals = {one.global_batch_size for one in measured.values()}
    is_strong = len(totals) == 1 and len({one.batch_size for one in measured.values()}) > 1
    factor = 2
    while factor <= reach:
        made = enlarge_spec(largest, factor, is_strong=is_strong)
        if made is not None:
            yield made
        factor *= 2


def enlarge_spec(spec: RunSpec, factor: int, *, is_strong: bool = False) -> RunSpec | None:
    """``spec`` on ``factor`` times as many nodes: more replicas, or more of what it has one degree of.

    ``None`` where that cannot be run.
    """
    own = get_strategy(spec.strategy).own_degree
    if own is None:
        return None
    degree = "dp_degree" if spec.dp_degree > 1 else own
    point = msgspec.to_builtins(spec)
    point |= {"nodes": spec.nodes * factor, degree: getattr(spec, degree) * factor}
    point.pop("time_limit_min", None)
    if is_strong:
        del point["batch_size"]
        point["global_batch_size"] = spec.global_batch_size
    made = resolve_point(point, PartitionLimits("anywhere"))
    return None if isinstance(made, InfeasiblePoint) else made
