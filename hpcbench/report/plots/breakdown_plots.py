"""Plots with one row per configuration: parts of a step, peak memory per rank, distribution of step times."""

from __future__ import annotations

import statistics
from typing import Any

import polars as pl

from hpcbench.report.configurations import STEP_TIME
from hpcbench.report.phrases import pluralize
from hpcbench.report.plots import theme
from hpcbench.report.plots.bar_charts import (
    BOX_ROLE,
    DOT_ROLE,
    MAX_DOTS,
    MISSING_ROLE,
    STACK_COLUMNS,
    BoxChart,
    StackedBarChart,
    StackPart,
    box_frame,
    five_number_summary,
    row_medians,
    thin_evenly,
)
from hpcbench.report.plots.plot_model import Plot, PlotRequest, join_texts
from hpcbench.report.plots.point_data import plot_points, printable_name, row_name_column, select_rows, with_labels
from hpcbench.report.plots.theme import make_axis
from hpcbench.units import format_bytes, format_seconds

PARTS_NAME, PARTS_TITLE = "parts", "Where a step's time goes"
COMPUTE, HIDDEN_COMM, EXPOSED_COMM, BUBBLE, REST = (
    "computation", "computation over communication", "communication", "bubble", "rest",
)  # fmt: skip
STEP_PARTS = {
    COMPUTE: StackPart(theme.BLUE, "#FFFFFF", "█", "#"), HIDDEN_COMM: StackPart(theme.SKY, "#000000", "▓", "="),
    EXPOSED_COMM: StackPart(theme.VERMILLION, "#000000", "▒", "+"),
    BUBBLE: StackPart(theme.LIGHT_GREY, "#000000", "░", "."),
    REST: StackPart("#FFFFFF", "#000000", "·", " "),
}  # fmt: skip
_MAX_ROWS_IN_ALT_TEXT = 6
_PHASES = ("compute_s", "comm_s", "exposed_comm_s", "step_s")
_IMPLAUSIBLE_SECONDS = 1e9


def step_parts_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The parts of the profiled steps, beside the median of the timed ones: of the rank that computes longest.

    Of pipelines, whose ranks wait in turn, the mean of all ranks, as their bubble is; it is waited for with messages
    and is taken out of what else were communication.
    """
    points = plot_points(frame, request.by, "metrics.compute_s")
    if points.nothing:
        return Plot(PARTS_NAME, PARTS_TITLE, nothing=points.nothing, notes=points.notes)
    rows, notes = select_rows(points, request.by)
    piped = _pipeline_parts(rows, request)
    split = [
        {**row, **one}
        for row in rows.iter_rows(named=True)
        if row[STEP_TIME]
        for one in _split_step({**row, **piped.get(row["row"] + row["panel"], {})})
    ]
    schema = {name: pl.Float64 if name in ("value", "begin", "end", "total") else pl.String for name in STACK_COLUMNS}
    drawn = pl.DataFrame([{name: one[name] for name in STACK_COLUMNS} for one in split], schema=schema)
    if drawn.is_empty():
        return Plot(PARTS_NAME, PARTS_TITLE, nothing="no run has both its parts and its step time", notes=notes)
    more = ["computation, communication: of the profiled steps, the rank's that computes longest"]
    if BUBBLE in drawn["part"].to_list():
        more.append(
            "pipelines: the mean of all ranks; the bubble is taken out of communication, where it is waited for"
        )
    if rows["launches"].max() != 1:
        more.append("of several launches the median of each part")
    return Plot(
        PARTS_NAME, PARTS_TITLE, points.shared, _parts_alt_text(drawn),
        StackedBarChart(make_axis("time", "s", drawn["total"]), STEP_PARTS, "step time"), drawn,
        [*more, *notes],
    )  # fmt: skip


def _pipeline_parts(rows: pl.DataFrame, request: PlotRequest) -> dict[str, dict[str, float]]:
    """By row and panel the parts of pipelines: the means over ranks, of several launches the median."""
    piped = rows.filter(rows["metrics.bubble_fraction"].is_not_null())
    keys = {
        (cluster, one): row + panel
        for row, panel, cluster, ids in piped["row", "panel", "cluster", "run_ids"].iter_rows()
        for one in ids
    }
    launches: dict[str, list[dict[str, float]]] = {}
    for result in request.whole(list(keys)) if request.whole and keys else ():
        phases = [rank.get("phases") for rank in result.ranks]
        read = [one for one in map(_read_phases, phases) if one is not None]
        if read and len(read) == len(phases):
            means = {name: statistics.fmean(one[name] for one in read) for name in _PHASES}
            launches.setdefault(keys[result.cluster, result.run_id], []).append(means)
    return {
        key: {f"metrics.{name}": statistics.median(one[name] for one in found) for name in _PHASES}
        for key, found in launches.items()
    }


def _read_phases(phases: Any) -> dict[str, float] | None:
    """What a rank's profile says, in seconds; ``None`` where somebody has written something else."""
    if not isinstance(phases, dict):
        return None
    values = {name: phases.get(name, 0.0) for name in _PHASES}
    if not all(isinstance(one, (int, float)) and 0 <= one < _IMPLAUSIBLE_SECONDS for one in values.values()):
        return None
    return values if values["step_s"] else None


def _split_step(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of one configuration, one after another; what is not there is left out."""
    compute, exposed = row["metrics.compute_s"], row["metrics.exposed_comm_s"] or 0.0
    # With the profiler a step takes longer than without; the bubble is a share of the one that the parts are of.
    step = row.get("metrics.step_s") or row[STEP_TIME]
    waiting = max(0.0, step - compute)
    bubble = min((row["metrics.bubble_fraction"] or 0.0) * step, waiting)
    hidden = min(max(0.0, (row["metrics.comm_s"] or 0.0) - exposed), compute)
    exposed = max(0.0, exposed - bubble)
    rest = max(0.0, waiting - bubble - exposed)
    found, begin = [], 0.0
    for part, value in zip(STEP_PARTS, (compute - hidden, hidden, exposed, bubble, rest), strict=True):
        if value > 0:
            found.append({"part": part, "value": value, "begin": begin, "end": begin + value, "total": row[STEP_TIME]})
            begin += value
    return found


def _parts_alt_text(drawn: pl.DataFrame) -> str:
    said = []
    groups = list(drawn.group_by(["panel", "row"], maintain_order=True))
    for (panel, row), inside in groups[-_MAX_ROWS_IN_ALT_TEXT:]:
        whole = inside["end"][-1]
        shares = [f"{value / whole:.0%} {part}" for part, value in inside["part", "value"].iter_rows()]
        where = f"{panel}, " if panel else ""
        said.append(f"{where}{row}: {format_seconds(inside['total'][0])}, {', '.join(shares)}.")
    more = f" {len(groups) - _MAX_ROWS_IN_ALT_TEXT} more." if len(groups) > _MAX_ROWS_IN_ALT_TEXT else ""
    return f"Parts of a step of {pluralize(len(groups), 'configuration')}. {' '.join(said)}{more}"


MEMORY_NAME, MEMORY_TITLE = "memory", "Peak memory per rank"
_PEAK_MEMORY = "metrics.peak_memory_bytes"
_OOM_STATUS = "oom"
_MAX_OOM_ROWS = 8


def memory_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The peak of each rank, the most of its launches; below them what ran out of memory."""
    points = plot_points(frame, request.by, _PEAK_MEMORY)
    if points.nothing:
        return Plot(MEMORY_NAME, MEMORY_TITLE, nothing=points.nothing, notes=points.notes)
    rows, notes = select_rows(points, request.by)
    ranks = _rank_peaks(rows, request)
    made: list[dict[str, Any]] = []
    for row in rows.iter_rows(named=True):
        peaks = _row_peaks(row, ranks) or [row[_PEAK_MEMORY]]
        made.append({**row, "role": BOX_ROLE, **five_number_summary(peaks)})
        made += [{**row, "role": DOT_ROLE, "value": value} for value in thin_evenly(peaks)]
    lost = _oom_rows(frame, request, {row["panel"] for row in made})
    drawn = box_frame([*made, *lost[:_MAX_OOM_ROWS]])
    boxes = drawn.filter(drawn["role"] == BOX_ROLE)
    told = join_texts([
        f"{f'{panel}, ' if panel else ''}{row} {format_bytes(high)}"
        for panel, row, high in boxes["panel", "row", "high"].iter_rows()
    ])  # fmt: skip
    alt = f"Peak memory of {pluralize(len(boxes), 'configuration')}, the fullest rank: {told}."
    if lost:
        alt += f" Out of memory: {join_texts([row['row'] for row in lost])}."
        notes = [*notes, f"out of memory: {pluralize(len(lost), 'configuration')}"]
    unread = [] if ranks else ["the fullest rank alone: single ranks were not read"]
    return Plot(
        MEMORY_NAME, MEMORY_TITLE, points.shared, alt,
        BoxChart(make_axis("peak memory", "B", drawn["high"]), "from the emptiest rank to the fullest", bars=True),
        drawn,
        ["bar: the fullest rank; thin marks (of files): single ranks", *unread, *notes],
    )  # fmt: skip


def _rank_peaks(rows: pl.DataFrame, request: PlotRequest) -> dict[tuple[str, str], dict[int, float]]:
    """Of every launch that is drawn the peaks of its ranks, in bytes."""
    if request.whole is None:
        return {}
    wanted = [(cluster, one) for cluster, ids in rows["cluster", "run_ids"].iter_rows() for one in ids]
    return {(one.cluster, one.run_id): _read_peaks(one.ranks) for one in request.whole(wanted)}


def _read_peaks(ranks: list[dict[str, Any]]) -> dict[int, float]:
    """What somebody else wrote into a result need not be numbers."""
    found = {}
    for one in ranks:
        rank, peak = one.get("rank"), one.get("peak_memory_bytes")
        if isinstance(rank, int) and isinstance(peak, (int, float)) and 0 < peak < 1e18:
            found[rank] = float(peak)
    return found


def _row_peaks(row: dict[str, Any], ranks: dict[tuple[str, str], dict[int, float]]) -> list[float]:
    most: dict[int, float] = {}
    for one in row["run_ids"]:
        for rank, peak in ranks.get((row["cluster"], one), {}).items():
            most[rank] = max(peak, most.get(rank, 0.0))
    return list(most.values())


def _oom_rows(frame: pl.DataFrame, request: PlotRequest, panels: set[str]) -> list[dict[str, Any]]:
    """Rows of what ran out of memory, in the panels that are drawn."""
    oom = frame.filter(pl.col("status") == _OOM_STATUS)
    if oom.is_empty():
        return []
    rows = with_labels(oom, request.by)
    rows = rows.with_columns(row_name_column(request.by)).sort("devices", maintain_order=True)
    different = rows.unique(["cluster", "spec.model", "row", "spec.batch_size"], keep="first", maintain_order=True)
    panel = next(iter(panels)) if len(panels) == 1 else "out of memory"
    return [
        {
            "panel": panel,
            "series": row["series"],
            "role": MISSING_ROLE,
            "note": "out of memory",
            "row": f"{row['row']}, batch {row['spec.batch_size']}"
            + (
                "" if len(panels) == 1 else f", {printable_name(row['spec.model'])} on {printable_name(row['cluster'])}"
            ),
        }
        for row in different.iter_rows(named=True)
    ]


DISTRIBUTION_NAME, DISTRIBUTION_TITLE = "distribution", "Distribution of step times"
_MAX_DISTRIBUTION_ROWS = 16
_WHISKER_SHARES = (0.1, 0.9)


def distribution_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """Every timed step of the slowest rank, of all launches of a configuration together.

    Steps that were found to be still warming up are left out, as they are of every figure.
    """
    points = plot_points(frame, request.by, STEP_TIME)
    if points.nothing:
        return Plot(DISTRIBUTION_NAME, DISTRIBUTION_TITLE, nothing=points.nothing, notes=points.notes)
    rows, notes = select_rows(points, request.by, _MAX_DISTRIBUTION_ROWS)
    steps = _timed_steps(rows, request)
    made: list[dict[str, Any]] = []
    for row in rows.iter_rows(named=True):
        times = [time for one in row["run_ids"] for time in steps.get((row["cluster"], one), ())]
        if times:
            made.append({**row, "role": BOX_ROLE, **five_number_summary(times, _WHISKER_SHARES)})
            made += [{**row, "role": DOT_ROLE, "value": time} for time in thin_evenly(times)]
    if not made:
        return Plot(DISTRIBUTION_NAME, DISTRIBUTION_TITLE, nothing="no result holds its single steps", notes=notes)
    drawn = box_frame(made)
    counts = [len(one) for one in steps.values()]
    told = join_texts([f"{name} {format_seconds(value)}" for name, value in row_medians(drawn)])
    alt = f"Step times of {pluralize(len(row_medians(drawn)), 'configuration')}, medians: {told}."
    more = [
        f"box: the middle half of {sum(counts)} steps of {pluralize(len(counts), 'launch', 'launches')}; whiskers: "
        f"from "
        "10 % to 90 % of them",
        f"thin marks (of files): single steps, at most {MAX_DOTS} a row, the fastest and the slowest among them",
    ]
    return Plot(
        DISTRIBUTION_NAME, DISTRIBUTION_TITLE, points.shared, alt,
        BoxChart(make_axis("step time", "s", drawn["median"]), "10 % to 90 % of the steps"),
        drawn, [*more, *notes],
    )  # fmt: skip


def _timed_steps(rows: pl.DataFrame, request: PlotRequest) -> dict[tuple[str, str], list[float]]:
    """The seconds of the steps that count, of every launch that is drawn."""
    if request.whole is None:
        return {}
    wanted = [(cluster, one) for cluster, ids in rows["cluster", "run_ids"].iter_rows() for one in ids]
    found = {}
    for one in request.whole(wanted):
        times = one.step_times_s[one.metrics.warmup_found_steps or 0 :]
        found[one.cluster, one.run_id] = [time for time in times if 0 < time < 1e9]
    return {key: times for key, times in found.items() if times}
