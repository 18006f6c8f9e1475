"""The plot of measured over predicted step times."""

from __future__ import annotations

import statistics

import polars as pl

from hpcbench.report.configurations import HIGH, LOW, STEP_TIME
from hpcbench.report.phrases import pluralize
from hpcbench.report.plots.line_chart import BAND, IDEAL, MEASURED, LineChart, line_rows
from hpcbench.report.plots.plot_model import NothingToDraw, Plot, PlotRequest, legend_title, whisker_notes
from hpcbench.report.plots.point_data import plot_points, with_printable_names
from hpcbench.report.plots.theme import PlotAxis, make_axis

_TOLERANCE = 0.1
_MAX_READ = 500
_IMPLAUSIBLE_SECONDS = 1e9
_MEASURED_BLOCKS = '"measured"'
"""What options of runs hold that have timed their blocks: results of others have no prediction of their own."""


def measured_over_predicted_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """A point for each configuration, on the line where both are equal, in the band where they are within 10 %.

    From ``request.predicted`` (columns ``strategy, predicted, measured`` in seconds, and perhaps ``panel, label, low,
    high``), else from results of pipelines that have predicted their own step.
    """
    shared, notes = "", list[str]()
    if request.predicted is not None:
        rows = _rows_from_oracle(request.predicted)
    else:
        rows, shared, notes = _rows_from_results(frame, request)
    is_plausible = pl.all_horizontal(pl.col("x", "y").is_between(0, _IMPLAUSIBLE_SECONDS, closed="none"))
    rows = line_rows(rows.filter(is_plausible), MEASURED)
    if rows.is_empty():
        raise NothingToDraw("no run is both measured and predicted", notes)
    y = make_axis("measured step time", "s", [*rows["x"], *rows["y"]], log=True)
    x = PlotAxis("predicted step time", y.factor, y.unit, y.log)
    off = [abs(predicted / measured - 1) for predicted, measured in zip(rows["x"], rows["y"], strict=True)]
    inside = sum(error <= _TOLERANCE for error in off)
    summary = (
        f"{inside} of {pluralize(len(off), 'configuration')} predicted within {_TOLERANCE:.0%}; the median is off by "
        f"{statistics.median(off):.1%}, the worst by {max(off):.1%}"
    )
    return Plot(
        subtitle=shared, alt=f"Measured over predicted step times: {summary}.",
        drawing=LineChart(x, y, joined=False, from_zero=False, ideal="equal", legend=legend_title(request.by)),
        frame=pl.concat([rows, *_equality_rows(rows)]),
        notes=[f"dotted: equal; grey (of files): within {_TOLERANCE:.0%}", summary, *whisker_notes(rows), *notes],
    )  # fmt: skip


def _rows_from_oracle(frame: pl.DataFrame) -> pl.DataFrame:
    rows = with_printable_names(frame.rename({"strategy": "series", "predicted": "x", "measured": "y"}), "series")
    defaults = {"panel": pl.lit(""), "label": pl.col("series")}
    return rows.with_columns(value.alias(name) for name, value in defaults.items() if name not in rows.columns)


def _rows_from_results(frame: pl.DataFrame, request: PlotRequest) -> tuple[pl.DataFrame, str, list[str]]:
    """Rows from results that have predicted their own step; what they share; and notes."""
    own = frame.filter(pl.col("spec.options").str.contains(_MEASURED_BLOCKS, literal=True))
    if own.is_empty() or request.whole is None:
        raise NothingToDraw("no run has a prediction: a pipeline with balance = measured makes one of its own")
    points = plot_points(own, request.by, STEP_TIME, every=True)
    rows, notes = points.frame.sort("series", "devices", "config_id"), points.notes
    if len(rows) > _MAX_READ:
        notes = [*notes, f"the first {_MAX_READ} configurations of {len(rows)}; others can be chosen with --where"]
        rows = rows.head(_MAX_READ)
    results = request.read_results(rows)
    medians = []
    for cluster, run_ids in rows.select("cluster", "run_ids").iter_rows():
        predictions = [results[cluster, run_id].predicted for run_id in run_ids if (cluster, run_id) in results]
        times = [prediction.step_time_s for prediction in predictions if prediction]
        medians.append(statistics.median(times) if times else None)
    rows = rows.select(
        "series", pl.format("{}, {} devices", "label", "devices").alias("label"), "launches",
        pl.Series("x", medians, dtype=pl.Float64), pl.lit("").alias("panel"), y=STEP_TIME,
        low=f"{STEP_TIME}:{LOW}", high=f"{STEP_TIME}:{HIGH}",
    )  # fmt: skip
    return rows, points.shared, notes


def _equality_rows(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """The line of equal figures and the band around it, in every panel from the least to the most of all."""
    least = min([*rows["x"], *rows["y"]]) * (1 - _TOLERANCE)
    most = max([*rows["x"], *rows["y"]]) * (1 + _TOLERANCE)
    panels = rows.select(pl.col("panel").unique(maintain_order=True))
    ends = panels.join(pl.DataFrame({"x": [least, most]}), how="cross").with_columns(y="x")
    band = ends.with_columns(low=pl.col("x") * (1 - _TOLERANCE), high=pl.col("x") * (1 + _TOLERANCE))
    return [line_rows(ends, IDEAL), line_rows(band, BAND)]
