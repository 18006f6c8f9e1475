"""The timeline plot of a pipeline's step: measured and planned actions of every rank over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl
from rich.text import Text

from hpcbench.report.phrases import pluralize
from hpcbench.report.plots import theme
from hpcbench.report.plots.line_chart import axis_lines, flow_entries, truncated_text
from hpcbench.report.plots.plot_model import Plot, PlotRequest
from hpcbench.report.plots.point_data import plot_points, printable_name, select_rows
from hpcbench.report.plots.theme import PlotAxis, column_values, make_axis
from hpcbench.results.schema import PipelineTimeline, RunResult, TimelineSpan
from hpcbench.units import format_seconds

SPAN_COLUMNS = ("panel", "source", "rank", "kind", "name", "chunk", "micro_batch", "begin_s", "end_s")
"""``panel`` is the run, ``source`` whether a span was measured or planned, ``name`` the action and its micro-batch."""


class ActionStyle(NamedTuple):
    """How an action is called and drawn."""

    title: str
    colour: str
    ink: str


ACTION_STYLES = {
    "F": ActionStyle("forward", theme.SKY, "#000000"),
    "B": ActionStyle("backward", theme.BLUE, "#FFFFFF"),
    "I": ActionStyle("backward of inputs", theme.GREEN, "#000000"),
    "W": ActionStyle("backward of weights", theme.ORANGE, "#000000"),
}
OTHER_ACTION = ActionStyle("other", theme.LIGHT_GREY, "#000000")


@dataclass(frozen=True)
class GanttChart:
    """Rows of ``COLUMNS``; every run has a time axis of its own."""

    axes: dict[str, PlotAxis]
    """Of each run."""

    def text(self, frame: pl.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """As ``Drawing``."""
        left = len("rank ") + max(len(str(rank)) for rank in frame["rank"].to_list()) + 1
        cells = max(8, width - left - 1)
        lines: list[Text] = []
        for run, axis in self.axes.items():
            inside = frame.filter(frame["panel"] == run)
            longest = max(column_values(inside, "end_s"))
            if len(self.axes) > 1:
                lines += [*([Text("")] if lines else []), truncated_text(run, width, "bold")]
            for (source,), half in inside.group_by(["source"], maintain_order=True):
                lines.append(truncated_text(str(source), width, "dim"))
                for (rank,), spans in half.group_by(["rank"], maintain_order=True):
                    name = Text(f"{f'rank {rank}':<{left}}{'|' if plain else '│'}")
                    lines.append(name.append_text(_rank_line(spans, longest, cells)))
            ticks, labels = axis_lines(0.0, longest / axis.factor, cells, plain=plain)
            blank = " " * (left + 1)
            lines += [Text(blank + ticks, style="dim"), Text(blank + labels, style="dim")]
            lines.append(truncated_text(axis.heading.rjust(width), width, "dim"))
        there = set(frame["kind"].to_list())
        entries = [
            Text.assemble((kind, one.colour), f" {one.title}") for kind, one in ACTION_STYLES.items() if kind in there
        ]
        return [*lines, Text(""), *flow_entries([*entries, Text("and its micro-batch")], width)]


def _rank_line(spans: pl.DataFrame, longest: float, cells: int) -> Text:
    """Names where actions begin, dots while they go on, blanks while the rank waits."""
    line: list[tuple[str, str]] = [(" ", "")] * cells
    for name, kind, begin, end in spans["name", "kind", "begin_s", "end_s"].iter_rows():
        first = min(round(begin / longest * cells), cells - 1)
        count = max(1, round(end / longest * cells) - first)
        shown = name if len(name) <= count else name[:1]
        colour = theme.terminal_colour(ACTION_STYLES.get(kind, OTHER_ACTION).colour)
        for place, character in enumerate(shown.ljust(count, ".")[: cells - first]):
            line[first + place] = (character, colour)
    text = Text()
    for character, colour in line:
        text.append(character, colour)
    text.rstrip()
    return text


TIMELINE_NAME, TIMELINE_TITLE = "timeline", "Timeline of a pipeline's step"
_MAX_TIMELINES = 4
_MAX_SPANS = 3000
"""A step of more actions than anybody can tell apart is cut after so many."""
_IMPLAUSIBLE_SECONDS, _IMPLAUSIBLE_COUNT = 1e9, 10**9
"""Beyond them somebody has written what nobody measured."""
_BUBBLE_COLUMN = "metrics.bubble_fraction"


def timeline_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The untimed step whose actions were noted, of one launch of up to four configurations each."""
    points = plot_points(frame, request.by, _BUBBLE_COLUMN)
    if points.nothing:
        nothing = points.nothing.replace("none has it measured", "none is a pipeline whose step was noted")
        return Plot(TIMELINE_NAME, TIMELINE_TITLE, nothing=nothing, notes=points.notes)
    rows, notes = select_rows(points, request.by, _MAX_TIMELINES)
    wanted = [(cluster, ids[0]) for cluster, ids in rows["cluster", "run_ids"].iter_rows()]
    read = {(one.cluster, one.run_id): one for one in request.whole(wanted)} if request.whole else {}
    drawn: dict[str, list[dict[str, Any]]] = {}
    said = []
    for key, row in zip(wanted, rows.iter_rows(named=True), strict=True):
        result = read.get(key)
        if result is None or result.timeline is None or not result.timeline.ranks:
            continue
        run = ", ".join(filter(None, [row["row"], row["panel"], _micro_batches_text(result)]))
        spans = [{"panel": run, **one} for one in _timeline_spans(result.timeline)]
        if len(spans) > _MAX_SPANS:
            notes = [*notes, f"{run}: the first {_MAX_SPANS} of {len(spans)} actions"]
        if spans:
            drawn[run] = spans[:_MAX_SPANS]
            said.append(_timeline_text(run, result.timeline))
    if not drawn:
        return Plot(TIMELINE_NAME, TIMELINE_TITLE, nothing="no result holds a timeline", notes=notes)
    axes = {run: make_axis("time", "s", [span["end_s"] for span in spans]) for run, spans in drawn.items()}
    more = [
        "measured: one untimed step of the first replica; planned: the same schedule, every action as long as the "
        "median of its kind, messages at no cost",
        *said,
    ]
    subtitle = next(iter(drawn)) + (f", {points.shared}" if points.shared else "") if len(drawn) == 1 else points.shared
    alt = f"Timelines of {pluralize(len(drawn), 'pipeline')}. {'. '.join(said)}."
    return Plot(TIMELINE_NAME, TIMELINE_TITLE, subtitle, alt, GanttChart(axes), _span_frame(drawn), [*more, *notes])


def _micro_batches_text(result: RunResult) -> str:
    return pluralize(result.spec.micro_batches, "micro-batch", "micro-batches")


def _timeline_spans(timeline_: PipelineTimeline) -> list[dict[str, Any]]:
    """The measured spans first, then the planned ones, rank by rank."""
    return [
        {**_span_values(one), "source": source, "rank": rank.rank}
        for source in ("measured", "planned")
        for rank in sorted(timeline_.ranks, key=lambda one: one.rank)
        for one in getattr(rank, source)
        if 0 <= one.begin_s <= one.end_s < _IMPLAUSIBLE_SECONDS
        and max(abs(value) for value in (rank.rank, one.chunk, one.micro_batch)) < _IMPLAUSIBLE_COUNT
    ]


def _span_values(one: TimelineSpan) -> dict[str, Any]:
    kind = printable_name(one.kind)[:1]
    return {
        "kind": kind, "name": f"{kind}{one.micro_batch}", "chunk": one.chunk, "micro_batch": one.micro_batch,
        "begin_s": one.begin_s, "end_s": one.end_s,
    }  # fmt: skip


def _timeline_text(run: str, timeline_: PipelineTimeline) -> str:
    pairs = (
        ("measured", timeline_.measured_s, timeline_.bubble_fraction),
        ("planned", timeline_.planned_s, timeline_.planned_bubble_fraction),
    )
    told = [
        f"{source} {format_seconds(seconds)}, bubble {bubble:.0%}"
        for source, seconds, bubble in pairs
        if seconds is not None and bubble is not None
    ]
    return f"{run}: {'; '.join(told)}" if told else run


def _span_frame(drawn: dict[str, list[dict[str, Any]]]) -> pl.DataFrame:
    whole = ("rank", "chunk", "micro_batch")
    schema = {
        name: pl.Float64 if name.endswith("_s") else pl.Int64 if name in whole else pl.String for name in SPAN_COLUMNS
    }
    return pl.DataFrame(
        [{name: one[name] for name in SPAN_COLUMNS} for spans in drawn.values() for one in spans], schema=schema
    )
