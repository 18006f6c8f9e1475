"""Plots of collectives: bus bandwidth over the size, and messages between every two nodes."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

import polars as pl

from hpcbench.report.column_names import with_own_metrics
from hpcbench.report.configurations import HIGH, LOW, STEP_TIME, ok_results
from hpcbench.report.findings.node_findings import pair_times_s
from hpcbench.report.plots import charts
from hpcbench.report.plots.plot_model import NothingToDraw, Plot, PlotRequest, legend_title, typed_frame, whisker_notes
from hpcbench.report.plots.point_data import no_points_reason, plot_points, printable_name
from hpcbench.report.plots.theme import make_axis
from hpcbench.units import format_count, pluralize

BUS_BANDWIDTH = "metrics.own.bus_bandwidth"
COLLECTIVE_COLUMNS = ("spec.workload", "spec.operation", "spec.message_bytes", "spec.group_tasks", "spec.env")
_LINE_KEYS = ("spec.operation", "spec.nodes", "spec.tasks_per_node", "spec.group_tasks", "spec.env")
_MAX_MATRICES = 4


def bandwidth_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The bus bandwidth of each operation and group over ``message_bytes``, the median of launches.

    Raises:
        NothingToDraw: no run measured one collective.
    """
    measured = _ended(frame).filter(pl.col("spec.message_bytes").is_not_null())
    if measured.is_empty():
        raise NothingToDraw('no run has workload = "collectives"')
    by = request.by or tuple(name for name in _LINE_KEYS if name == _LINE_KEYS[0] or measured[name].n_unique() > 1)
    points = plot_points(with_own_metrics(measured, [BUS_BANDWIDTH]), by, BUS_BANDWIDTH, every=True)
    single = pl.col("launches") < 2
    # A single launch has the interval of its time.
    bounds = {
        side: pl.when(single & (pl.col(f"{STEP_TIME}:{other}") > 0))
        .then(pl.col(BUS_BANDWIDTH) * pl.col(STEP_TIME) / pl.col(f"{STEP_TIME}:{other}"))
        .otherwise(pl.col(f"{BUS_BANDWIDTH}:{side}"))
        for side, other in ((LOW, HIGH), (HIGH, LOW))
    }
    named = points.frame.with_columns(x="spec.message_bytes", y=BUS_BANDWIDTH, **bounds).sort("panel", "series", "x")
    rows = charts.line_rows(named, charts.MEASURED)
    x = make_axis("size", "B", rows["x"])._replace(log=2 if rows["x"].n_unique() > 1 else 0)
    y = make_axis("bus bandwidth, {}bytes/s", "/s", rows["y"], log=True)
    fastest = rows.sort("y", descending=True).row(0, named=True)
    alt = (
        f"Bus bandwidth over size, {pluralize(rows['series'].n_unique(), 'line')}. The highest is "
        f"{format_count(fastest['y'])} bytes/s of {fastest['series']} with {format_count(fastest['x'])} bytes."
    )
    chart = charts.LineChart(x, y, legend=legend_title(by))
    return Plot(subtitle=points.shared, alt=alt, drawing=chart, frame=rows, notes=[*whisker_notes(rows), *points.notes])


def _ended(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the runs that ended well; raise ``NothingToDraw`` without any."""
    ended = ok_results(frame)
    if ended.is_empty():
        raise NothingToDraw(no_points_reason(frame))
    return ended


def pairs_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The bandwidth of a message between each two nodes, the median of launches, a matrix for each configuration.

    Raises:
        NothingToDraw: no run measured pairs.
    """
    runs = _ended(frame).filter(pl.col("spec.operation") == "pairs")
    launches = runs.select("cluster", "run_id").rows()
    found: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in request.whole(launches) if request.whole is not None and launches else ():
        panel = f"{format_count(result.spec.message_bytes or 0)} bytes on {printable_name(result.cluster)}"
        for (first, second), seconds in pair_times_s(result).items():
            ends = printable_name(first), printable_name(second)
            for pair in (ends, ends[::-1]):
                found[panel][pair].append((result.spec.message_bytes or 0) / seconds)
    rows: list[dict[str, Any]] = [
        {"panel": panel, "row": row, "column": column, "value": median(values)}
        for panel in [*found][:_MAX_MATRICES] for (row, column), values in sorted(found[panel].items())
    ]  # fmt: skip
    if not rows:
        raise NothingToDraw('no run has operation = "pairs"')
    drawn = typed_frame(rows, charts.HEAT_COLUMNS, ["value"])
    slowest, fastest = (min(rows, key=lambda row: sign * row["value"]) for sign in (1, -1))
    texts = [
        f"{name} pair: {one['row']} - {one['column']}, {format_count(one['value'])} bytes/s"
        for name, one in (("slowest", slowest), ("fastest", fastest))
    ]
    return Plot(
        alt=f"Bandwidth between every two of {pluralize(drawn['row'].n_unique(), 'node')}. {'. '.join(texts)}.",
        drawing=charts.HeatChart(make_axis("{}bytes/s", "/s", drawn["value"])), frame=drawn,
        notes=[*texts, "one pair after the other; median of launches"],
    )  # fmt: skip
