"""Plots over the number of devices: throughput, efficiency, energy per sample, step time and its crossovers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import polars as pl

from hpcbench.report.configurations import HIGH, LOW, STEP_TIME, THROUGHPUT
from hpcbench.report.plots.line_chart import CROSSOVER, IDEAL, MEASURED, PREDICTED, LineChart, line_rows
from hpcbench.report.plots.plot_model import Plot, PlotRequest, legend_title, lines_alt_text, whisker_notes
from hpcbench.report.plots.point_data import plot_points, printable_name
from hpcbench.report.plots.theme import count_axis, make_axis
from hpcbench.units import format_seconds


class Crossover(NamedTuple):
    """``below`` is lower than ``above`` from ``x`` on; ``y`` is what both have there."""

    x: float
    y: float
    below: str
    above: str


LinePoints = Sequence[tuple[float, float]]


def find_crossovers(lines: Mapping[str, LinePoints]) -> list[Crossover]:
    """Where the lines of each two series cross, in the order of ``x``; straight between points in log-log scales.

    Points are positive; a line that only touches another does not cross it.
    """
    found = [
        crossing for (one, first), (other, second) in combinations(lines.items(), 2)
        for crossing in _crossovers_of_two(one, sorted(first), other, sorted(second))
    ]  # fmt: skip
    return sorted(found)


def _crossovers_of_two(one: str, first: LinePoints, other: str, second: LinePoints) -> list[Crossover]:
    start, end = max(first[0][0], second[0][0]), min(first[-1][0], second[-1][0])
    places = sorted({x for x, _ in (*first, *second) if start <= x <= end})
    apart = [(math.log(x), _log_height(first, x) - _log_height(second, x)) for x in places]
    # Where they are equal nobody leads: the crossing is there, if the lead changes.
    leads = [(x, gap) for x, gap in apart if gap]
    found = []
    for (x1, gap1), (x2, gap2) in pairwise(leads):
        if gap1 * gap2 > 0:
            continue
        equal = [x for x, gap in apart if not gap and x1 < x < x2]
        place = math.exp(equal[0] if equal else x1 + (x2 - x1) * gap1 / (gap1 - gap2))
        below, above = (one, other) if gap2 < 0 else (other, one)
        found.append(Crossover(place, math.exp(_log_height(first, place)), below, above))
    return found


def _log_height(line: LinePoints, x: float) -> float:
    """The logarithm of the line's height at ``x``."""
    for (x1, y1), (x2, y2) in pairwise(line):
        if x1 <= x <= x2:
            share = math.log(x / x1) / math.log(x2 / x1) if x2 > x1 else 0.0
            return math.log(y1) + share * math.log(y2 / y1)
    # Beyond the ends by rounding alone, or a line of one point.
    return math.log(line[0][1] if x <= line[0][0] else line[-1][1])


THROUGHPUT_NAME, THROUGHPUT_TITLE = "throughput", "Throughput over devices"


def throughput_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """Samples/s of all ranks, the median of launches; the ideal is a baseline's rate times its devices' number."""
    points = plot_points(frame, request.by)
    if points.nothing:
        return Plot(THROUGHPUT_NAME, THROUGHPUT_TITLE, nothing=points.nothing, notes=points.notes)
    rows = _measured_rows(points.frame, THROUGHPUT)
    ideal = _ideal_throughput(points.frame)
    x = count_axis("devices", rows["x"])
    y = make_axis("{}samples/s", "/s", rows["y"], log=bool(x.log))
    drawn = pl.concat([rows, ideal])
    notes = [
        *whisker_notes(rows),
        *(["ideal: as many times one device's rate as there are devices"] if len(ideal) else []),
    ]
    return Plot(
        THROUGHPUT_NAME, THROUGHPUT_TITLE, points.shared,
        lines_alt_text(rows, "throughput", lambda value: f"{value:.4g} samples/s", most=True),
        LineChart(x, y, legend=legend_title(request.by)), drawn, [*notes, *points.notes],
    )  # fmt: skip


def _ideal_throughput(rows: pl.DataFrame) -> pl.DataFrame:
    """In each panel where there is a baseline, its rate per device times the fewest and the most devices."""
    known = rows.filter(pl.col("efficiency") > 0).with_columns(
        (pl.col(THROUGHPUT) / pl.col("efficiency") / pl.col("devices")).alias("_each")
    )
    ends = known.group_by("panel", maintain_order=True).agg(
        pl.col("_each").first(), pl.concat_list(pl.col("devices").min(), pl.col("devices").max()).alias("x")
    )
    ends = ends.explode("x").unique(maintain_order=True)
    return line_rows(ends.with_columns((pl.col("_each") * pl.col("x")).alias("y")), IDEAL)


EFFICIENCY_NAME, EFFICIENCY_TITLE = "efficiency", "Efficiency over devices"


def efficiency_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The speed-up over one device with the same workload, per device, as tables compute it; 100 % is the ideal."""
    points = plot_points(frame, request.by, "efficiency")
    if points.nothing:
        return Plot(EFFICIENCY_NAME, EFFICIENCY_TITLE, nothing=points.nothing, notes=points.notes)
    per_speedup = pl.col("efficiency") / pl.col("speedup")
    rows = line_rows(
        points.frame.select(
            "panel", "series", "label", "launches", x="devices", y="efficiency",
            low=pl.col(f"speedup:{LOW}") * per_speedup, high=pl.col(f"speedup:{HIGH}") * per_speedup,
        ),
        MEASURED,
    )  # fmt: skip
    ends = rows.group_by("panel", maintain_order=True).agg(
        pl.concat_list(pl.col("x").min(), pl.col("x").max()).alias("x")
    )
    ideal = line_rows(ends.explode("x").unique(maintain_order=True).with_columns(y=pl.lit(1.0)), IDEAL)
    drawn = pl.concat([rows, ideal])
    notes = [
        *whisker_notes(rows, "the baseline's own is in them"),
        "ideal: the baseline's rate from each of its devices",
    ]
    alt = lines_alt_text(rows, "efficiency", lambda value: f"{value:.0%}", most=True)
    x, y = count_axis("devices", rows["x"]), make_axis("efficiency", "%", rows["y"])
    lines = LineChart(x, y, legend=legend_title(request.by))
    return Plot(EFFICIENCY_NAME, EFFICIENCY_TITLE, points.shared, alt, lines, drawn, [*notes, *points.notes])


ENERGY_NAME, ENERGY_TITLE = "energy", "Energy per sample over devices"
_ENERGY_PER_SAMPLE = "metrics.energy_per_sample_j"


def energy_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The devices' energy over the timed steps, over the samples in them: mean step time x steps x samples/s."""
    samples = pl.col("metrics.step_time_s.mean") * pl.col("spec.steps") * pl.col(THROUGHPUT)
    # Of every launch by itself: a slow one may well have drawn less power.
    points = plot_points(
        frame.with_columns((pl.col("metrics.energy_j") / samples).alias(_ENERGY_PER_SAMPLE)),
        request.by,
        _ENERGY_PER_SAMPLE,
    )
    if points.nothing:
        nothing = points.nothing.replace("energy_per_sample_j", ENERGY_NAME)
        return Plot(ENERGY_NAME, ENERGY_TITLE, nothing=nothing, notes=points.notes)
    rows = _measured_rows(points.frame, _ENERGY_PER_SAMPLE)
    sources = [
        printable_name(one) for one in points.frame["metrics.energy_source"].drop_nulls().unique().sort().to_list()
    ]
    y = make_axis("energy per sample", "J", rows["y"])
    alt = lines_alt_text(rows, "energy per sample", lambda value: f"{y.shown(value)} {y.unit}", most=False)
    notes = [*whisker_notes(rows), *([f"read from: {'; '.join(sources)}"] if sources else [])]
    lines = LineChart(count_axis("devices", rows["x"]), y, legend=legend_title(request.by))
    return Plot(ENERGY_NAME, ENERGY_TITLE, points.shared, alt, lines, rows, [*notes, *points.notes])


SCALING_NAME, SCALING_TITLE = "scaling", "Step time over devices"
_MAX_CROSSOVERS_NAMED = 5


def scaling_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The median step time; points over predicted lines where ``request.predicted`` has some.

    Its columns: ``strategy, devices, step_time_s, step_time_low_s, step_time_high_s``, and ``panel`` (as the measured
    rows have it) where there are several. Without measurements it is drawn alone.
    """
    points = plot_points(frame, request.by, STEP_TIME)
    rows = _measured_rows(points.frame, STEP_TIME) if not points.nothing else None
    predicted, notes = _predicted_rows(request.predicted, rows)
    if rows is None and predicted is None:
        return Plot(SCALING_NAME, SCALING_TITLE, nothing=points.nothing, notes=points.notes)
    drawn = pl.concat([one for one in (rows, predicted) if one is not None])
    crossed = _crossover_rows(predicted if predicted is not None else drawn)
    x = count_axis("devices", drawn["x"])
    y = make_axis("step time", "s", drawn["y"], log=bool(x.log))
    alt = lines_alt_text(drawn, "step time", format_seconds, most=False)
    told = [_crossover_text(row) for row in crossed.head(_MAX_CROSSOVERS_NAMED).iter_rows(named=True)]
    if rows is not None:
        notes = [*whisker_notes(rows), *notes, *_unequal_batch_notes(points.frame)]
    if predicted is not None:
        notes.insert(0, "lines: predicted, with their interval; points: measured")
    if told:
        notes.append(f"lines cross ({'predicted' if predicted is not None else 'between medians'}): {'; '.join(told)}")
    return Plot(
        SCALING_NAME, SCALING_TITLE, points.shared, f"{alt} Lines cross: {'; '.join(told)}." if told else alt,
        LineChart(x, y, from_zero=False, legend=legend_title(request.by)), pl.concat([drawn, crossed]),
        [*notes, *points.notes],
    )  # fmt: skip


def _measured_rows(points: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Rows of ``metric`` over devices, with the ends of its interval."""
    ends = {"low": f"{metric}:{LOW}", "high": f"{metric}:{HIGH}"}
    return line_rows(points.select("panel", "series", "label", "launches", x="devices", y=metric, **ends), MEASURED)


def _predicted_rows(given: pl.DataFrame | None, measured: pl.DataFrame | None) -> tuple[pl.DataFrame | None, list[str]]:
    """The predicted rows and what is to be said of them."""
    if given is None or given.is_empty():
        return None, []
    panels = measured["panel"].unique().to_list() if measured is not None else [""]
    if "panel" not in given.columns:
        if len(panels) > 1:
            return None, ["predictions are not drawn: they do not say which panel they are for"]
        given = given.with_columns(pl.lit(panels[0]).alias("panel"))
    names = given["strategy"].unique().to_list()
    shown = pl.col("strategy").replace_strict(names, [printable_name(one) for one in names], return_dtype=pl.String)
    rows = given.filter(pl.col("step_time_s") > 0).select(
        "panel", shown.alias("series"), shown.alias("label"), x="devices", y="step_time_s", low="step_time_low_s",
        high="step_time_high_s",
    )  # fmt: skip
    return line_rows(rows.sort("panel", "series", "x"), PREDICTED), []


def _crossover_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """A row for each crossing of lines: ``series`` overtakes ``label``."""
    found = []
    for (panel,), inside in rows.group_by(["panel"], maintain_order=True):
        lines = {
            str(name): list(part.select("x", "y").iter_rows())
            for (name,), part in inside.group_by(["series"], maintain_order=True)
        }
        found += [
            {"panel": panel, "series": one.below, "label": one.above, "x": one.x, "y": one.y}
            for one in find_crossovers(lines)
        ]
    schema = {"panel": pl.String, "series": pl.String, "label": pl.String, "x": pl.Float64, "y": pl.Float64}
    return line_rows(pl.DataFrame(found, schema=schema), CROSSOVER)


def _crossover_text(row: dict[str, object]) -> str:
    where = f" ({row['panel']})" if row["panel"] else ""
    return f"{row['series']} is below {row['label']} from {row['x']:.3g} devices on{where}"


def _unequal_batch_notes(rows: pl.DataFrame) -> list[str]:
    """Lines whose steps take different batches are no race."""
    batches = rows.group_by("panel", "devices").agg(pl.col("global_batch_size").n_unique().alias("count"))
    if not (batches["count"] > 1).any():
        return []
    return ["lines differ in their global batch on as many devices: throughput compares them"]
