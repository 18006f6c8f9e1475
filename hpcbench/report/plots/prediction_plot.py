"""The plot of measured over predicted step times."""

from __future__ import annotations

import statistics

import polars as pl

from hpcbench.report.configurations import HIGH, LOW, STEP_TIME
from hpcbench.report.phrases import pluralize
from hpcbench.report.plots.line_chart import BAND, IDEAL, MEASURED, LineChart, line_rows
from hpcbench.report.plots.plot_model import Plot, PlotRequest, legend_title, whisker_notes
from hpcbench.report.plots.point_data import plot_points, printable_name
from hpcbench.report.plots.theme import PlotAxis, make_axis

NAME, TITLE = "predicted", "Measured over predicted step time"
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
    notes: list[str] = []
    if request.predicted is not None:
        rows = _rows_from_oracle(request.predicted)
        shared = ""
    else:
        rows, shared, notes, nothing = _rows_from_results(frame, request)
        if nothing:
            return Plot(NAME, TITLE, nothing=nothing, notes=notes)
    rows = rows.filter(
        pl.col("x").is_between(0, _IMPLAUSIBLE_SECONDS, closed="none")
        & pl.col("y").is_between(0, _IMPLAUSIBLE_SECONDS, closed="none")
    )
    if rows.is_empty():
        return Plot(NAME, TITLE, nothing="no run is both measured and predicted", notes=notes)
    rows = line_rows(rows, MEASURED)
    values = [*rows["x"], *rows["y"]]
    y = make_axis("measured step time", "s", values, log=True)
    x = PlotAxis("predicted step time", y.factor, y.unit, y.log)
    off = [abs(predicted / measured - 1) for predicted, measured in zip(rows["x"], rows["y"], strict=True)]
    inside = sum(one <= _TOLERANCE for one in off)
    said = (
        f"{inside} of {pluralize(len(off), 'configuration')} predicted within {_TOLERANCE:.0%}; the median is off by "
        f"{statistics.median(off):.1%}, the worst by {max(off):.1%}"
    )
    return Plot(
        NAME, TITLE, shared, f"Measured over predicted step times: {said}.",
        LineChart(x, y, joined=False, from_zero=False, ideal="equal", legend=legend_title(request.by)),
        pl.concat([rows, *_equality_rows(rows)]),
        [f"dotted: equal; grey (of files): within {_TOLERANCE:.0%}", said, *whisker_notes(rows), *notes],
    )  # fmt: skip


def _rows_from_oracle(frame: pl.DataFrame) -> pl.DataFrame:
    names = frame["strategy"].unique().to_list()
    more = [name for name in ("panel", "label", "low", "high", "launches") if name in frame.columns]
    series = pl.col("strategy").replace_strict(names, [printable_name(one) for one in names], return_dtype=pl.String)
    rows = frame.select(series.alias("series"), *more, x="predicted", y="measured")
    return rows.with_columns(
        *([] if "panel" in more else [pl.lit("").alias("panel")]),
        *([] if "label" in more else [pl.col("series").alias("label")]),
    )


def _rows_from_results(frame: pl.DataFrame, request: PlotRequest) -> tuple[pl.DataFrame, str, list[str], str]:
    """Rows from results that have predicted their own step; what they share; notes; or why there are none."""
    own = frame.filter(pl.col("spec.options").str.contains(_MEASURED_BLOCKS, literal=True))
    if own.is_empty() or request.whole is None:
        return own, "", [], "no run has a prediction: a pipeline with balance = measured makes one of its own"
    points = plot_points(own, request.by, STEP_TIME, every=True)
    if points.nothing:
        return own, "", points.notes, points.nothing
    rows, notes = points.frame.sort("series", "devices", "config_id"), points.notes
    if len(rows) > _MAX_READ:
        notes = [*notes, f"the first {_MAX_READ} configurations of {len(rows)}; others can be chosen with --where"]
        rows = rows.head(_MAX_READ)
    wanted = [(cluster, one) for cluster, ids in rows.select("cluster", "run_ids").iter_rows() for one in ids]
    made = {(one.cluster, one.run_id): one.predicted.step_time_s for one in request.whole(wanted) if one.predicted}
    steps = [
        [made[cluster, one] for one in ids if (cluster, one) in made]
        for cluster, ids in rows.select("cluster", "run_ids").iter_rows()
    ]
    medians = [statistics.median(each) if each else None for each in steps]
    return (
        rows.with_columns(pl.Series("x", medians, dtype=pl.Float64)).select(
            "series", pl.format("{}, {} devices", "label", "devices").alias("label"), "launches", "x",
            pl.lit("").alias("panel"), y=STEP_TIME, low=f"{STEP_TIME}:{LOW}", high=f"{STEP_TIME}:{HIGH}",
        ),
        points.shared, notes, "",
    )  # fmt: skip


def _equality_rows(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """The line of equal figures and the band around it, in every panel from the least to the most of all."""
    least = min([*rows["x"], *rows["y"]]) * (1 - _TOLERANCE)
    most = max([*rows["x"], *rows["y"]]) * (1 + _TOLERANCE)
    panels = rows.select(pl.col("panel").unique(maintain_order=True))
    ends = panels.join(pl.DataFrame({"x": [least, most]}), how="cross").with_columns(y="x")
    band = ends.with_columns(low=pl.col("x") * (1 - _TOLERANCE), high=pl.col("x") * (1 + _TOLERANCE))
    return [line_rows(ends, IDEAL), line_rows(band, BAND)]
