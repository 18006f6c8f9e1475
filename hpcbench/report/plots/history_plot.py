"""A metric over time: each launch at the date of its result, and the dates at which the environment changed."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

import polars as pl

from hpcbench.report import column_names
from hpcbench.report.configurations import ok_results
from hpcbench.report.plots.charts import CHANGE, MEASURED, LineChart, line_rows
from hpcbench.report.plots.plot_model import NothingToDraw, Plot, PlotRequest, legend_title
from hpcbench.report.plots.point_data import (
    batch_text,
    limit_panels_and_series,
    no_points_reason,
    printable_name,
    with_labels,
    with_panels,
)
from hpcbench.report.plots.theme import PlotAxis, make_axis
from hpcbench.report.table_model import PERCENT_COLUMNS, column_heading, format_value
from hpcbench.units import pluralize

DATE_COLUMN = "ended_at_s"
VERSION_COLUMNS = ("provenance.hpcbench", "provenance.torch", "environment_digest")
"""Columns whose change is marked, the one that explains most first."""
_KINDS = {"_per_s": "/s", "_per_s_per_device": "/s", "_s": "s", ".median": "s", "_bytes": "B", "_j": "J"}
_MAX_CHANGES = 12
_DAY_S, _HOUR_S = 86_400.0, 3_600.0


def history_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The launches of ``frame`` over time, with a vertical line where an environment of a cluster was followed by
    another.

    Raises:
        NothingToDraw: no launch has the metric and a date.
    """
    column = request.metric
    ended = ok_results(frame)
    if ended.is_empty():
        raise NothingToDraw(no_points_reason(frame))
    dated = ended.filter((pl.col(column) > 0) & pl.col(DATE_COLUMN).is_not_null())
    if dated.is_empty():
        what = column_heading(column)
        raise NothingToDraw(f"none of {pluralize(len(ended), 'launch', 'launches')} has {what} and a date")
    notes: list[str] = []
    if len(dated) < len(ended):
        notes.append(f"not drawn: {pluralize(len(ended) - len(dated), 'launch', 'launches')} without figure or date")
    batch = batch_text("batch {} per replica", pl.col("spec.batch_size").cast(pl.String))
    labelled = with_labels(dated, request.by).with_columns(batch)
    # Environments are marks on the time axis, not panels.
    rows, shared = with_panels(labelled.with_columns(pl.lit(None, pl.String).alias("environment_digest")))
    rows = limit_panels_and_series(rows, notes)
    mixed = rows.group_by("panel", "series").agg(pl.col("config_id").n_unique())["config_id"].max()
    if isinstance(mixed, int) and mixed > 1:
        notes.append(f"a line has up to {mixed} configurations: --by separates them")
    dates_s: list[float] = sorted(rows[DATE_COLUMN].to_list())
    first_s, last_s = dates_s[0], dates_s[-1]
    length_s, unit = (_DAY_S, "days") if last_s - first_s >= 2 * _DAY_S else (_HOUR_S, "hours")
    x = (pl.col(DATE_COLUMN) - first_s) / length_s
    points = line_rows(rows.with_columns(x=x, y=pl.col(column)).sort("panel", "series", "x"), MEASURED)
    changes, texts = _changes(labelled)
    marks = _change_rows(points, [(date_s - first_s) / length_s for date_s in changes[:_MAX_CHANGES]])
    if len(changes) > _MAX_CHANGES:
        notes.append(f"{len(changes) - _MAX_CHANGES} later changes of the environment are not marked")
    unit_text = column_names.own_units(frame).get(column)
    y = _value_axis(column, unit_text, points["y"])
    span = f"{_date(first_s)} to {_date(last_s)}"
    low, high = (format_value(column, value, unit_text) for value in (points["y"].min(), points["y"].max()))
    alt = f"{y.title} of {pluralize(len(points), 'launch', 'launches')}, {span}: {low} to {high}. " + "; ".join(texts)
    return Plot(
        subtitle=", ".join(filter(None, [shared, span])), alt=alt.strip(),
        drawing=LineChart(PlotAxis(f"{unit} since {_date(first_s)}"), y, from_zero=False,
                          legend=legend_title(request.by)),
        frame=pl.concat([points, marks]), notes=["a point is one launch", *texts[:_MAX_CHANGES], *notes],
    )  # fmt: skip


def _changes(rows: pl.DataFrame) -> tuple[list[float], list[str]]:
    """The dates (Unix time) at which a cluster's next launch had another environment, and what changed."""
    found = []
    for (cluster,), launches in rows.sort(DATE_COLUMN).group_by(["cluster"], maintain_order=True):
        for (_, *before), (date_s, *after) in pairwise(launches.select(DATE_COLUMN, *VERSION_COLUMNS).iter_rows()):
            different = [
                f"{name} {printable_name(old)} to {printable_name(new)}"
                for name, old, new in zip(("hpcbench", "torch", "environment"), before, after, strict=True)
                if old != new
            ]
            if different:
                # The digest changes with every version; it explains something where it changes alone.
                what = ", ".join(different[:-1] or different)
                found.append((date_s, f"{_date(date_s)}, {printable_name(cluster)}: {what}"))
    return [date_s for date_s, _ in sorted(found)], [text for _, text in sorted(found)]


def _change_rows(points: pl.DataFrame, places: list[float]) -> pl.DataFrame:
    """A vertical line at each of ``places`` in every panel, as high as the points."""
    spans = points.group_by("panel", maintain_order=True).agg(low=pl.col("y").min(), high=pl.col("y").max())
    lines = spans.join(pl.DataFrame({"x": places}, schema={"x": pl.Float64}), how="cross")
    return line_rows(lines.with_columns(y=pl.col("high")), CHANGE)


def _value_axis(column: str, unit: str | None, values: pl.Series) -> PlotAxis:
    """An axis in the unit of ``column``; of a command's metric ``unit`` is that of its sweep."""
    title, name = column_heading(column), column if unit is None else f"_{unit.lower()}"
    kind = "%" if column in PERCENT_COLUMNS else next((kind for end, kind in _KINDS.items() if name.endswith(end)), "")
    return make_axis(title, kind, values) if kind or unit is None else PlotAxis(title, unit=unit)


def _date(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M")
