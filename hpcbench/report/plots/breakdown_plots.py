"""Plots of single configurations: parts of a step, peak memory per rank, distribution of step times, and the timeline
of a pipeline's step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import polars as pl

from hpcbench.report.configurations import STEP_TIME
from hpcbench.report.plots import charts, theme
from hpcbench.report.plots.plot_model import NothingToDraw, Plot, PlotRequest, join_texts, typed_frame
from hpcbench.report.plots.point_data import plot_points, printable_name, row_name_column, select_rows, with_labels
from hpcbench.report.plots.theme import make_axis
from hpcbench.results.schema import PipelineTimeline, RunResult
from hpcbench.units import format_bytes, format_percent, format_seconds, pluralize

COMPUTE, HIDDEN_COMM, EXPOSED_COMM, BUBBLE, REST = (
    "computation", "computation over communication", "communication", "bubble", "rest",
)  # fmt: skip
STEP_PARTS = {
    COMPUTE: charts.StackPart(theme.BLUE, "#FFFFFF", "█"),
    HIDDEN_COMM: charts.StackPart(theme.SKY, "#000000", "▓"),
    EXPOSED_COMM: charts.StackPart(theme.VERMILLION, "#000000", "▒"),
    BUBBLE: charts.StackPart(theme.LIGHT_GREY, "#000000", "░"),
    REST: charts.StackPart("#FFFFFF", "#000000", "·"),
}  # fmt: skip
_MAX_ROWS_IN_ALT_TEXT = 6
_PHASES = ("compute_s", "comm_s", "exposed_comm_s", "step_s")
_ROUNDING = 0.005
_IMPLAUSIBLE_SECONDS = 1e9
"""Larger values cannot have been measured."""
_Results = dict[tuple[str, str], RunResult]


def step_parts_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The parts of the profiled steps, beside the median of the timed ones: of the rank that computes longest.

    Of pipelines, whose ranks wait in turn, the mean of all ranks, as their bubble is; it is waited for with messages
    and is taken out of what else were communication.
    """
    points = plot_points(frame, request.by, "metrics.compute_s")
    rows, notes = select_rows(points, request.by)
    results = request.read_results(rows.filter(rows["metrics.bubble_fraction"].is_not_null()))
    parts = [
        {**row, **part}
        for row in rows.iter_rows(named=True) if row[STEP_TIME]
        for part in _split_step({**row, **_mean_phases(row, results)})
    ]  # fmt: skip
    if not parts:
        raise NothingToDraw("no run has both its parts and its step time", notes)
    drawn = typed_frame(parts, charts.STACK_COLUMNS, charts.STACK_NUMBERS)
    explanations = ["computation, communication: of the profiled steps, the rank's that computes longest"]
    if BUBBLE in drawn["part"]:
        explanations.append(
            "pipelines: the mean of all ranks; the bubble is taken out of communication, where it is waited for"
        )
    if rows["launches"].max() != 1:
        explanations.append("of several launches the median of each part")
    beyond = ""
    if (drawn["end"] > drawn["total"] * (1 + _ROUNDING)).any():
        beyond = "the profiled steps took longer than the timed ones, by the cost of the profiler"
        explanations.append(f"a bar that ends beyond its step time: {beyond}")
    chart = charts.StackedBarChart(
        make_axis("time", "s", charts.unit_values(drawn, "end")), STEP_PARTS, "step time", beyond
    )
    return Plot("", "", points.shared, _parts_alt_text(drawn), chart, drawn, [*explanations, *notes])


def _mean_phases(row: dict[str, Any], results: _Results) -> dict[str, float]:
    """The parts of a pipeline's step: the means over ranks, of several launches the median."""
    launches = []
    for result in _results_of(row, results):
        phases = [_read_phases(rank.get("phases")) for rank in result.ranks]
        measured = [rank for rank in phases if rank is not None]
        if measured and len(measured) == len(phases):
            launches.append([statistics.fmean(values) for values in zip(*measured, strict=True)])
    medians = map(statistics.median, zip(*launches, strict=True))
    return {f"metrics.{name}": value for name, value in zip(_PHASES, medians, strict=False)}


def _results_of(row: dict[str, Any], results: _Results) -> list[RunResult]:
    return [results[row["cluster"], run_id] for run_id in row["run_ids"] if (row["cluster"], run_id) in results]


def _read_phases(phases: Any) -> list[float] | None:
    """A rank's ``_PHASES`` in seconds; ``None`` if its profile holds something else."""
    values: list[Any] = [phases.get(name, 0.0) for name in _PHASES] if isinstance(phases, dict) else [None]
    if not all(isinstance(value, (int, float)) and 0 <= value < _IMPLAUSIBLE_SECONDS for value in values):
        return None
    return values if values[-1] else None


def _split_step(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of one configuration, one after another, without those that it does not have."""
    compute, exposed = row["metrics.compute_s"], row["metrics.exposed_comm_s"] or 0.0
    # With the profiler a step takes longer than without; the bubble is a share of the one that the parts are of.
    step = row.get("metrics.step_s") or row[STEP_TIME]
    waiting = max(0.0, step - compute)
    bubble = min((row["metrics.bubble_fraction"] or 0.0) * step, waiting)
    hidden = min(max(0.0, (row["metrics.comm_s"] or 0.0) - exposed), compute)
    exposed = max(0.0, exposed - bubble)
    rest = max(0.0, waiting - bubble - exposed)
    parts, begin = [], 0.0
    for part, value in zip(STEP_PARTS, (compute - hidden, hidden, exposed, bubble, rest), strict=True):
        if value > 0:
            parts.append({"part": part, "value": value, "begin": begin, "end": begin + value, "total": row[STEP_TIME]})
            begin += value
    return parts


def _parts_alt_text(drawn: pl.DataFrame) -> str:
    sentences = []
    groups = list(drawn.group_by(["panel", "row"], maintain_order=True))
    for (panel, row), inside in groups[-_MAX_ROWS_IN_ALT_TEXT:]:
        whole = inside["end"][-1]
        shares = [f"{format_percent(value / whole)} {part}" for part, value in inside["part", "value"].iter_rows()]
        where = f"{panel}, " if panel else ""
        sentences.append(f"{where}{row}: {format_seconds(inside['total'][0])}, {', '.join(shares)}.")
    more = f" {len(groups) - _MAX_ROWS_IN_ALT_TEXT} more." if len(groups) > _MAX_ROWS_IN_ALT_TEXT else ""
    return f"Parts of a step of {pluralize(len(groups), 'configuration')}. {' '.join(sentences)}{more}"


_PEAK_MEMORY = "metrics.peak_memory_bytes"
_OOM_STATUS = "oom"
_MAX_OOM_ROWS = 8


def memory_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The peak of each rank, the most of its launches; below them what ran out of memory."""
    points = plot_points(frame, request.by, _PEAK_MEMORY)
    rows, notes = select_rows(points, request.by)
    results = request.read_results(rows)
    boxes: list[dict[str, Any]] = []
    for row in rows.iter_rows(named=True):
        boxes += charts.box_rows(row, _rank_peaks(_results_of(row, results)) or [row[_PEAK_MEMORY]])
    oom = _oom_rows(frame, request, {row["panel"] for row in boxes})
    drawn = typed_frame([*boxes, *oom[:_MAX_OOM_ROWS]], charts.BOX_COLUMNS, charts.BOX_NUMBERS)
    fullest = [f"{name} {format_bytes(value)}" for name, value in _named_figures(drawn, "high")]
    alt = f"Peak memory of {pluralize(len(fullest), 'configuration')}, the largest rank: {join_texts(fullest)}."
    if oom:
        alt += f" Out of memory: {join_texts([row['row'] for row in oom])}."
        notes = [*notes, f"out of memory: {pluralize(len(oom), 'configuration')}"]
    if not results:
        notes = ["the largest rank alone: single ranks were not read", *notes]
    axis = make_axis("peak memory", "B", charts.unit_values(drawn, "high"))
    chart = charts.BoxChart(axis, "from the smallest rank to the largest", "single ranks", bars=True)
    notes = ["bar: the largest rank; thin marks (of files): single ranks", *notes]
    return Plot("", "", points.shared, alt, chart, drawn, notes)


def _named_figures(drawn: pl.DataFrame, column: str) -> list[tuple[str, float]]:
    """The rows' names, with their panel where they have one, and their figure in ``column``."""
    rows = drawn.filter(drawn["role"] == charts.BOX_ROLE)["panel", "row", column].iter_rows()
    return [(f"{panel}, {row}" if panel else row, value) for panel, row, value in rows]


def _rank_peaks(results: list[RunResult]) -> list[float]:
    """The peak of each rank in bytes, the most of its launches; other values are left out."""
    peaks: dict[int, float] = {}
    for entry in (entry for result in results for entry in result.ranks):
        rank, peak = entry.get("rank"), entry.get("peak_memory_bytes")
        if isinstance(rank, int) and isinstance(peak, (int, float)) and 0 < peak < 1e18:
            peaks[rank] = max(float(peak), peaks.get(rank, 0.0))
    return list(peaks.values())


def _oom_rows(frame: pl.DataFrame, request: PlotRequest, panels: set[str]) -> list[dict[str, Any]]:
    """Rows of configurations that ran out of memory, in the panels that are drawn."""
    oom = frame.filter(pl.col("status") == _OOM_STATUS)
    if oom.is_empty():
        return []
    rows = with_labels(oom, request.by)
    rows = rows.with_columns(row_name_column(request.by)).sort("devices", maintain_order=True)
    different = rows.unique(["cluster", "spec.model", "row", "spec.batch_size"], keep="first", maintain_order=True)
    oom_rows = []
    for row in different.iter_rows(named=True):
        name = f"{row['row']}, batch {row['spec.batch_size']}"
        if len(panels) > 1:
            name += f", {printable_name(row['spec.model'])} on {printable_name(row['cluster'])}"
        oom_rows.append({"series": row["series"], "role": charts.MISSING_ROLE, "note": "out of memory", "row": name})
    panel = next(iter(panels)) if len(panels) == 1 else "out of memory"
    return [{"panel": panel, **row} for row in oom_rows]


_MAX_DISTRIBUTION_ROWS = 16
_WHISKER_SHARES = (0.1, 0.9)


def distribution_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """Return the distribution of the slowest rank's timed steps, of all launches of a configuration together.

    Steps that were found to be still warming up are left out, as they are of every figure.

    Raises:
        NothingToDraw: no result has step times.
    """
    points = plot_points(frame, request.by, STEP_TIME)
    rows, notes = select_rows(points, request.by, _MAX_DISTRIBUTION_ROWS)
    results = request.read_results(rows)
    boxes: list[dict[str, Any]] = []
    counts: list[int] = []
    for row in rows.iter_rows(named=True):
        launches = [times for result in _results_of(row, results) if (times := _timed_steps(result))]
        counts += map(len, launches)
        if launches:
            every_step = [time for times in launches for time in times]
            boxes += charts.box_rows(row, every_step, _WHISKER_SHARES)
    if not boxes:
        raise NothingToDraw("no result holds its single steps", notes)
    drawn = typed_frame(boxes, charts.BOX_COLUMNS, charts.BOX_NUMBERS)
    medians = [f"{name} {format_seconds(value)}" for name, value in _named_figures(drawn, "median")]
    alt = f"Step times of {pluralize(len(medians), 'configuration')}, medians: {join_texts(medians)}."
    launch_count = pluralize(len(counts), "launch", "launches")
    explanations = [
        f"box: the middle half of {sum(counts)} steps of {launch_count}; whiskers: from 10 % to 90 % of them",
        f"thin marks (of files): single steps, at most {charts.MAX_DOTS} a row, the fastest and the slowest among them",
    ]
    chart = charts.BoxChart(
        make_axis("step time", "s", charts.unit_values(drawn, "high")), "10 % to 90 % of the steps", "single steps"
    )
    return Plot("", "", points.shared, alt, chart, drawn, [*explanations, *notes])


def _timed_steps(result: RunResult) -> list[float]:
    """The seconds of the steps that count."""
    times = result.step_times_s[result.metrics.warmup_found_steps or 0 :]
    return [time for time in times if 0 < time < _IMPLAUSIBLE_SECONDS]


_MAX_TIMELINES = 4
_MAX_SPANS = 3000
"""A step of more actions than a reader can distinguish is cut after so many."""
_IMPLAUSIBLE_COUNT = 10**9
_BUBBLE_COLUMN = "metrics.bubble_fraction"


def timeline_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """Return the timeline of the untimed step whose actions were recorded, of a launch of up to four configurations.

    Raises:
        NothingToDraw: no result has a timeline.
    """
    try:
        points = plot_points(frame, request.by, _BUBBLE_COLUMN)
    except NothingToDraw as empty:
        reason = str(empty).replace("has a measured bubble_fraction", "is a pipeline whose step was noted")
        raise NothingToDraw(reason, empty.notes) from None
    rows, notes = select_rows(points, request.by, _MAX_TIMELINES)
    first_launches = rows.with_columns(pl.col("run_ids").list.head(1))
    results = request.read_results(first_launches)
    drawn: dict[str, list[dict[str, Any]]] = {}
    summaries = []
    for row in rows.iter_rows(named=True):
        result = results.get((row["cluster"], row["run_ids"][0]))
        if result is None or result.timeline is None or not result.timeline.ranks:
            continue
        micro_batches = pluralize(result.spec.micro_batches, "micro-batch", "micro-batches")
        run = ", ".join(filter(None, [row["row"], row["panel"], micro_batches]))
        spans = [{"panel": run, **span} for span in _timeline_spans(result.timeline)]
        if len(spans) > _MAX_SPANS:
            notes = [*notes, f"{run}: the first {_MAX_SPANS} of {len(spans)} actions"]
        if spans:
            drawn[run] = spans[:_MAX_SPANS]
            summaries.append(_timeline_text(run, result.timeline))
    if not drawn:
        raise NothingToDraw("no result holds a timeline", notes)
    axes = {run: make_axis("time", "s", [span["end_s"] for span in spans]) for run, spans in drawn.items()}
    explanation = (
        "measured: one untimed step of the first replica; planned: the same schedule, every action as long as the "
        "median of its kind, messages at no cost"
    )
    numbers = [name for name in charts.SPAN_COLUMNS if name.endswith("_s")]
    every_span = [span for spans in drawn.values() for span in spans]
    return Plot(
        subtitle=", ".join(filter(None, [*(drawn if len(drawn) == 1 else ()), points.shared])),
        alt=f"Timelines of {pluralize(len(drawn), 'pipeline')}. {'. '.join(summaries)}.",
        drawing=charts.GanttChart(axes),
        frame=typed_frame(every_span, charts.SPAN_COLUMNS, numbers, integers=("rank", "chunk", "micro_batch")),
        notes=[explanation, *summaries, *notes],
    )  # fmt: skip


def _timeline_spans(timeline: PipelineTimeline) -> Iterator[dict[str, Any]]:
    """The measured spans first, then the planned ones, rank by rank."""
    for source in ("measured", "planned"):
        for rank in sorted(timeline.ranks, key=lambda rank: rank.rank):
            for span in getattr(rank, source):
                largest = max(abs(value) for value in (rank.rank, span.chunk, span.micro_batch))
                if 0 <= span.begin_s <= span.end_s < _IMPLAUSIBLE_SECONDS and largest < _IMPLAUSIBLE_COUNT:
                    kind = printable_name(span.kind)[:1]
                    yield {
                        **span._asdict(), "kind": kind, "name": f"{kind}{span.micro_batch}",
                        "source": source, "rank": rank.rank,
                    }  # fmt: skip


def _timeline_text(run: str, timeline: PipelineTimeline) -> str:
    phases = (
        ("measured", timeline.measured_s, timeline.bubble_fraction),
        ("planned", timeline.planned_s, timeline.planned_bubble_fraction),
    )
    texts = [
        f"{source} {format_seconds(seconds)}, bubble {format_percent(bubble)}"
        for source, seconds, bubble in phases
        if seconds is not None and bubble is not None
    ]
    return f"{run}: {'; '.join(texts)}" if texts else run
