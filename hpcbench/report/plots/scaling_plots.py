"""Plots over the number of devices or another parameter: throughput, efficiency, energy per sample, step time and its
crossovers; and measured over predicted step times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import NamedTuple

import polars as pl

from hpcbench.errors import ConfigError
from hpcbench.report.column_names import with_own_metrics
from hpcbench.report.configurations import HIGH, LOW, STEP_TIME, THROUGHPUT
from hpcbench.report.plots import plot_model
from hpcbench.report.plots.charts import (
    BAND,
    CROSSOVER,
    IDEAL,
    MEASURED,
    PREDICTED,
    BarChart,
    LineChart,
    line_rows,
    unit_values,
)
from hpcbench.report.plots.plot_model import DEVICES, NothingToDraw, Plot, PlotRequest, legend_title, whisker_notes
from hpcbench.report.plots.point_data import (
    PlotPoints,
    has_numeric_axis,
    plot_points,
    printable_name,
    with_printable_names,
)
from hpcbench.report.plots.theme import PlotAxis, make_axis, parameter_axis
from hpcbench.report.table_model import short_name
from hpcbench.units import format_count, format_percent, format_seconds, pluralize

BUS_BANDWIDTH, MESSAGE_BYTES = "metrics.own.bus_bandwidth", "spec.message_bytes"
_GROUP_KEYS = ("spec.operation", "spec.group_tasks", "spec.env")
COLLECTIVE_COLUMNS = ("spec.workload", MESSAGE_BYTES, *_GROUP_KEYS)
TOKEN_RATE, MFU, HFU = "metrics.tokens_per_s", "metrics.mfu", "metrics.hfu"


class Crossover(NamedTuple):
    """``below`` is lower than ``above`` from ``x`` on; ``y`` is what both have there."""

    x: float
    y: float
    below: str
    above: str


LinePoints = Sequence[tuple[float, float]]


def find_crossovers(lines: Mapping[str, LinePoints]) -> list[Crossover]:
    """Return the crossovers of each two series in the order of ``x``; lines are straight in log-log scales.

    Points are positive; a line that only touches another does not cross it.
    """
    crossovers = []
    ordered = {name: sorted(points) for name, points in lines.items()}
    for (name, line), (other_name, other) in combinations(ordered.items(), 2):
        start, end = max(line[0][0], other[0][0]), min(line[-1][0], other[-1][0])
        shared_x = sorted({x for x, _ in (*line, *other) if start <= x <= end})
        gaps = [(math.log(x), _log_height(line, x) - _log_height(other, x)) for x in shared_x]
        # Where they are equal nobody leads: the crossing is there, if the lead changes.
        for (x1, gap1), (x2, gap2) in pairwise((x, gap) for x, gap in gaps if gap):
            if gap1 * gap2 < 0:
                equal = [x for x, gap in gaps if not gap and x1 < x < x2]
                x = math.exp(equal[0] if equal else x1 + (x2 - x1) * gap1 / (gap1 - gap2))
                below, above = (name, other_name) if gap2 < 0 else (other_name, name)
                crossovers.append(Crossover(x, math.exp(_log_height(line, x)), below, above))
    return sorted(crossovers)


def _log_height(line: LinePoints, x: float) -> float:
    """The logarithm of the line's height at ``x``."""
    for (x1, y1), (x2, y2) in pairwise(line):
        if x1 <= x <= x2:
            share = math.log(x / x1) / math.log(x2 / x1) if x2 > x1 else 0.0
            return math.log(y1) + share * math.log(y2 / y1)
    # Beyond the ends by rounding alone, or a line of one point.
    return math.log(line[0][1] if x <= line[0][0] else line[-1][1])


def throughput_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """Samples/s of all ranks, or tokens/s where all are of tokens, the median of launches.

    The ideal is a baseline's rate times its devices' number.
    """
    points = plot_points(frame, request.by, x=request.x)
    unit, measured = "samples/s", points.frame
    if measured[TOKEN_RATE].null_count() == 0:
        unit, measured = "tokens/s", _as_tokens(measured)
    rows = _measured_rows(measured, THROUGHPUT, request)
    ideal = _ideal_throughput(measured) if request.x == DEVICES else rows.clear()
    y = make_axis(f"{{}}{unit}", "/s", unit_values(rows), log=_is_log(rows))
    notes = ["ideal: as many times one device's rate as there are devices"] if len(ideal) else []
    alt = _Alt("throughput", lambda value: f"{value:.4g} {unit}")
    return _plot_over_x(rows, ideal, y, alt, points, request, [*plot_model.whisker_notes(rows), *notes])


def _as_tokens(rows: pl.DataFrame) -> pl.DataFrame:
    """Return ``rows`` with tokens in the place of samples."""
    tokens = pl.col(TOKEN_RATE) / pl.col(THROUGHPUT)
    names = [name for name in rows.columns if name in (THROUGHPUT, f"{THROUGHPUT}:{LOW}", f"{THROUGHPUT}:{HIGH}")]
    return rows.with_columns((pl.col(name) * tokens).alias(name) for name in names)


def utilisation_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """MFU, and HFU as a line of its own where a forward pass is computed again."""
    points = plot_points(frame, request.by, MFU, request.x)
    is_repeated = pl.col(HFU) > pl.col(MFU)
    bounds = {f"{MFU}:{side}": pl.lit(None, pl.Float64) for side in (LOW, HIGH)}
    names = [(pl.col(name) + " HFU").alias(name) for name in ("series", "label")]
    hardware = points.frame.filter(is_repeated).with_columns(pl.col(HFU).alias(MFU), *names, **bounds)
    rows = pl.concat([_measured_rows(points.frame, MFU, request), _measured_rows(hardware, MFU, request)])
    alt = _Alt("MFU", lambda value: format_percent(value, 1))
    notes = [*plot_model.whisker_notes(rows), "MFU: the model's own FLOPs over the devices' peak"]
    notes += ["HFU: with the forward passes that activation checkpointing repeats"] if len(hardware) else []
    return _plot_over_x(rows, rows.clear(), make_axis("MFU", "%", rows["y"]), alt, points, request, notes)


def bandwidth_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The bus bandwidth of each operation and group over ``message_bytes``, the median of launches."""
    try:
        frame = with_own_metrics(frame, [BUS_BANDWIDTH])
    except ConfigError:
        # No launch has one: the plot states it.
        frame = frame.with_columns(pl.lit(None, pl.Float64).alias(BUS_BANDWIDTH))
    measured = frame.drop_nulls(BUS_BANDWIDTH)
    by = request.by or tuple(name for name in _GROUP_KEYS if name == _GROUP_KEYS[0] or measured[name].n_unique() > 1)
    request = replace(request, by=by, x=MESSAGE_BYTES)
    points = plot_points(frame, by, BUS_BANDWIDTH, MESSAGE_BYTES)
    rows = _measured_rows(points.frame, BUS_BANDWIDTH, request)
    y = make_axis("bus bandwidth, {}bytes/s", "/s", unit_values(rows), log=_is_log(rows))
    alt = _Alt("bus bandwidth", lambda value: f"{format_count(value)} bytes/s")
    return _plot_over_x(rows, rows.clear(), y, alt, points, request, plot_model.whisker_notes(rows))


class _Alt(NamedTuple):
    """Name of the plotted quantity, how its figures are formatted, and whether the highest leads."""

    what: str
    shown: Callable[[float], str]
    most: bool = True


def _plot_over_x(
    rows: pl.DataFrame, more: pl.DataFrame, y: PlotAxis, alt: _Alt, points: PlotPoints, request: PlotRequest,
    notes: Sequence[str], *, from_zero: bool = True,
) -> Plot:  # fmt: skip
    """Lines over the values of ``request.x``, or bars where ``rows`` have none; ``more`` are ideals and crossovers."""
    legend = legend_title(request.by)
    chart: LineChart | BarChart = BarChart(y._replace(log=0), legend)
    title = ""
    if rows["x"].null_count() < len(rows):
        title = short_name(request.x).replace("_", " ")
        chart = LineChart(parameter_axis(title, rows["x"]), y, from_zero=from_zero, legend=legend)
    names = "series" if title else "label"
    text = plot_model.lines_alt_text(rows, title, alt.what, alt.shown, most=alt.most, names=names)
    return Plot("", "", points.shared, text, chart, pl.concat([rows, more]), [*notes, *points.notes])


def _is_log(rows: pl.DataFrame) -> bool:
    """Whether the x axis of ``rows`` is logarithmic."""
    return bool(parameter_axis("", rows["x"].drop_nulls()).log)


def _ideal_throughput(rows: pl.DataFrame) -> pl.DataFrame:
    """Return by panel the baseline's rate per device times the fewest and the most devices."""
    baselines = rows.filter(pl.col("efficiency") > 0).with_columns(
        (pl.col(THROUGHPUT) / pl.col("efficiency") / pl.col("devices")).alias("_each"), x="devices"
    )
    return line_rows(
        _ends_of_panels(baselines, pl.col("_each").first()).with_columns(y=pl.col("_each") * pl.col("x")), IDEAL
    )


def _ends_of_panels(rows: pl.DataFrame, *values: pl.Expr) -> pl.DataFrame:
    """``values`` of each panel at its smallest and at its largest ``x``."""
    ends = pl.concat_list(pl.col("x").min(), pl.col("x").max()).alias("x")
    return rows.group_by("panel", maintain_order=True).agg(*values, ends).explode("x").unique(maintain_order=True)


def efficiency_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The speed-up over one device with the same workload, per device, as tables compute it; 100 % is the ideal."""
    points = plot_points(frame, request.by, "efficiency", request.x)
    per_speedup = pl.col("efficiency") / pl.col("speedup")
    bounds = {f"efficiency:{side}": pl.col(f"speedup:{side}") * per_speedup for side in (LOW, HIGH)}
    rows = _measured_rows(points.frame.with_columns(**bounds), "efficiency", request)
    ideal = line_rows(_ends_of_panels(rows).with_columns(y=pl.lit(1.0)), IDEAL)
    notes = plot_model.whisker_notes(rows, "the baseline's own is in them")
    notes.append("ideal: the baseline's rate from each of its devices")
    alt = _Alt("efficiency", format_percent)
    return _plot_over_x(rows, ideal, make_axis("efficiency", "%", rows["y"]), alt, points, request, notes)


_ENERGY_PER_SAMPLE = "metrics.energy_per_sample_j"


def energy_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """Return the devices' energy over the timed steps per sample: samples are mean step time x steps x samples/s.

    Raises:
        plot_model.NothingToDraw: no result has an energy.
    """
    samples = pl.col("metrics.step_time_s.mean") * pl.col("spec.steps") * pl.col(THROUGHPUT)
    # Of every launch by itself: a slow one may well have drawn less power.
    frame = frame.with_columns((pl.col("metrics.energy_j") / samples).alias(_ENERGY_PER_SAMPLE))
    try:
        points = plot_points(frame, request.by, _ENERGY_PER_SAMPLE, request.x)
    except plot_model.NothingToDraw as empty:
        raise plot_model.NothingToDraw(str(empty).replace("energy_per_sample_j", "energy"), empty.notes) from None
    rows = _measured_rows(points.frame, _ENERGY_PER_SAMPLE, request)
    sources = map(printable_name, points.frame["metrics.energy_source"].drop_nulls().unique().sort())
    source_text = "; ".join(sources)
    y = make_axis("energy per sample", "J", unit_values(rows))
    alt = _Alt("energy per sample", lambda value: f"{y.shown(value)} {y.unit}", most=False)
    notes = [*plot_model.whisker_notes(rows), *([f"read from: {source_text}"] if source_text else [])]
    return _plot_over_x(rows, rows.clear(), y, alt, points, request, notes)


_MAX_CROSSOVERS_NAMED = 5


def scaling_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The median step time; points over predicted lines where ``request.predicted`` has some.

    Its columns: ``strategy, devices, step_time_s, step_time_low_s, step_time_high_s``, and ``panel`` (as the measured
    rows have it) where there are several. Without measurements it is drawn alone.
    """
    try:
        points = plot_points(frame, request.by, STEP_TIME, request.x)
        # Predicted lines continue to more devices than were measured.
        has_lines = request.predicted is not None and request.predicted["devices"].n_unique() > 1
        rows = _measured_rows(points.frame, STEP_TIME, request, has_axis=has_lines)
    except plot_model.NothingToDraw as empty:
        if request.predicted is None or request.predicted.is_empty():
            raise
        points, rows = PlotPoints(frame.clear(), "", empty.notes), line_rows(_NO_ROWS, MEASURED)
    predicted, notes = _predicted_rows(request.predicted, rows)
    drawn = pl.concat([rows, predicted])
    crossed = _crossover_rows(drawn if predicted.is_empty() else predicted)
    y = make_axis("step time", "s", unit_values(drawn), log=_is_log(drawn))
    if len(rows):
        notes = [*plot_model.whisker_notes(rows), *notes, *_unequal_batch_notes(points.frame, request.x)]
    if len(predicted):
        notes.insert(0, "lines: predicted, with their interval; points: measured")
    crossings = "; ".join(_crossover_text(row, request.x) for row in crossed.head(_MAX_CROSSOVERS_NAMED).to_dicts())
    if crossings:
        notes.append(f"lines cross ({'predicted' if len(predicted) else 'between medians'}): {crossings}")
    alt = _Alt("step time", format_seconds, most=False)
    plot = _plot_over_x(drawn, crossed, y, alt, points, request, notes, from_zero=False)
    return replace(plot, alt=f"{plot.alt} Lines cross: {crossings}.") if crossings else plot


def _measured_rows(points: pl.DataFrame, metric: str, request: PlotRequest, *, has_axis: bool = False) -> pl.DataFrame:
    """Rows of ``metric`` over ``request.x``, with the ends of its interval.

    Without an axis of numbers, or ``has_axis``, they are bars: they have no x, and ``label`` is the name of the bar.
    """
    ends = {"low": f"{metric}:{LOW}", "high": f"{metric}:{HIGH}"}
    x, label = pl.col(request.x), pl.col("label")
    if not (has_axis or has_numeric_axis(points, request.x)):
        names = [pl.col("series" if request.by else "label")]
        if points[request.x].n_unique() > 1 and request.x not in (request.by or ("spec.strategy",)):
            names.append(x.cast(pl.String).fill_null("default"))
        x, label = pl.lit(None), pl.concat_str(names, separator=", ")
    rows = points.select("panel", "series", label.alias("label"), "launches", x=x, y=metric, **ends)
    return line_rows(with_printable_names(rows, "label"), MEASURED)


_NO_ROWS = pl.DataFrame(schema=["panel", "series", "label", "x", "y"])


def _predicted_rows(predicted: pl.DataFrame | None, measured: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """The predicted rows, and notes on them."""
    panels = measured["panel"].unique().to_list() or [""]
    if predicted is None or predicted.is_empty():
        return measured.clear(), []
    if "panel" not in predicted.columns:
        if len(panels) > 1:
            return measured.clear(), ["predictions are not drawn: they do not name their panel"]
        predicted = predicted.with_columns(pl.lit(panels[0]).alias("panel"))
    rows = with_printable_names(predicted, "strategy").filter(pl.col("step_time_s") > 0).select(
        "panel", series="strategy", label="strategy", x="devices", y="step_time_s", low="step_time_low_s",
        high="step_time_high_s",
    )  # fmt: skip
    return line_rows(rows.sort("panel", "series", "x"), PREDICTED), []


def _crossover_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """A row for each intersection of lines: ``series`` overtakes ``label``."""
    crossovers = []
    for (panel,), inside in rows.filter(rows["x"] > 0).group_by(["panel"], maintain_order=True):
        series = inside.group_by(["series"], maintain_order=True)
        lines = {str(name): part.select("x", "y").rows() for (name,), part in series}
        crossovers += [(panel, *crossover) for crossover in find_crossovers(lines)]
    columns = ["panel", "x", "y", "series", "label"]
    return line_rows(pl.DataFrame(crossovers, schema=columns, orient="row"), CROSSOVER)


def _crossover_text(row: dict[str, object], x: str) -> str:
    panel = f" ({row['panel']})" if row["panel"] else ""
    place = f"{row['x']:.3g} devices" if x == DEVICES else f"{short_name(x).replace('_', ' ')} {row['x']:.3g}"
    return f"{row['series']} is below {row['label']} from {place} on{panel}"


def _unequal_batch_notes(rows: pl.DataFrame, x: str) -> list[str]:
    """Lines whose steps take different batches are no race."""
    has_axis = has_numeric_axis(rows, x)
    batches = rows.group_by(["panel", x] if has_axis else ["panel"]).agg(
        pl.col("global_batch_size").n_unique().alias("count")
    )
    if not (batches["count"] > 1).any():
        return []
    return [
        f"{'lines' if has_axis else 'bars'} differ in their global batch on as many devices: throughput compares them"
    ]


_TOLERANCE = 0.1
_MAX_READ = 500
_IMPLAUSIBLE_SECONDS = 1e9
_MEASURED_BLOCKS = '"measured"'
"""Text in the options of runs that have measured their blocks; results of other runs contain no prediction of their
own."""


def measured_over_predicted_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """A point for each configuration, on the line where both are equal, in the band where they are within 10 %.

    From ``request.predicted`` (columns ``strategy, predicted, measured`` in seconds, and perhaps ``panel, label, low,
    high``), else from results of pipelines that have predicted their own step.

    Raises:
        NothingToDraw: there is no prediction.
    """
    shared, notes = "", list[str]()
    if request.predicted is not None:
        named = request.predicted.rename({"strategy": "series", "predicted": "x", "measured": "y"})
        rows = with_printable_names(named, "series")
        defaults = {"panel": pl.lit(""), "label": pl.col("series")}
        rows = rows.with_columns(value.alias(name) for name, value in defaults.items() if name not in rows.columns)
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
    tolerance = format_percent(_TOLERANCE)
    summary = (
        f"{inside} of {pluralize(len(off), 'configuration')} predicted within {tolerance}; the median is off by "
        f"{format_percent(statistics.median(off), 1)}, the worst by {format_percent(max(off), 1)}"
    )
    return Plot(
        subtitle=shared, alt=f"Measured over predicted step times: {summary}.",
        drawing=LineChart(x, y, joined=False, from_zero=False, ideal="equal", band=f"within {tolerance}",
                          legend=legend_title(request.by)),
        frame=pl.concat([rows, *_equality_rows(rows)]),
        notes=[summary, *whisker_notes(rows), *notes],
    )  # fmt: skip


def _rows_from_results(frame: pl.DataFrame, request: PlotRequest) -> tuple[pl.DataFrame, str, list[str]]:
    """Rows from results that have predicted their own step; what they share; and notes."""
    self_predicted = frame.filter(pl.col("spec.options").str.contains(_MEASURED_BLOCKS, literal=True))
    if self_predicted.is_empty() or request.whole is None:
        raise NothingToDraw("no run has a prediction: add --predict (in Python: predict=True)")
    points = plot_points(self_predicted, request.by, STEP_TIME, every=True)
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
