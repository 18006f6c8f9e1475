"""The timeline plot of a pipeline's step: measured and planned actions of every rank over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl
from rich.text import Text

from hpcbench.report.phrases import pluralize
from hpcbench.report.plots import theme
from hpcbench.report.plots.line_chart import axis_lines, flow_entries, styled_line, truncated_text
from hpcbench.report.plots.plot_model import NothingToDraw, Plot, PlotRequest, typed_frame
from hpcbench.report.plots.point_data import plot_points, printable_name, select_rows
from hpcbench.report.plots.theme import PlotAxis, column_values, make_axis
from hpcbench.results.schema import PipelineTimeline
from hpcbench.units import format_seconds

SPAN_COLUMNS = ("panel", "source", "rank", "kind", "name", "chunk", "micro_batch", "begin_s", "end_s")
"""``panel`` is the run, ``source`` whether a span was measured or planned, ``name`` the action and its micro-batch."""


class ActionStyle(NamedTuple):
    """The label and colours of an action."""

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
    """Time axis of each run."""

    def text(self, frame: pl.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """Return the lines of the chart, see ``Chart.text``."""
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
            lines += axis_lines(0.0, longest / axis.factor, cells, left + 1, plain=plain)
            lines.append(truncated_text(axis.heading.rjust(width), width, "dim"))
        styles = {kind: style for kind, style in ACTION_STYLES.items() if kind in frame["kind"]}
        entries = [Text.assemble((kind, style.colour), f" {style.title}") for kind, style in styles.items()]
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
    return styled_line(line)


_MAX_TIMELINES = 4
_MAX_SPANS = 3000
"""A step of more actions than a reader can distinguish is cut after so many."""
_IMPLAUSIBLE_SECONDS, _IMPLAUSIBLE_COUNT = 1e9, 10**9
"""Larger values cannot have been measured."""
_BUBBLE_COLUMN = "metrics.bubble_fraction"


def timeline_plot(frame: pl.DataFrame, request: PlotRequest) -> Plot:
    """The untimed step whose actions were noted, of one launch of up to four configurations each."""
    try:
        points = plot_points(frame, request.by, _BUBBLE_COLUMN)
    except NothingToDraw as empty:
        reason = str(empty).replace("none has it measured", "none is a pipeline whose step was noted")
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
    numbers = [name for name in SPAN_COLUMNS if name.endswith("_s")]
    every_span = [span for spans in drawn.values() for span in spans]
    return Plot(
        subtitle=", ".join(filter(None, [*(drawn if len(drawn) == 1 else ()), points.shared])),
        alt=f"Timelines of {pluralize(len(drawn), 'pipeline')}. {'. '.join(summaries)}.", drawing=GanttChart(axes),
        frame=typed_frame(every_span, SPAN_COLUMNS, numbers, integers=("rank", "chunk", "micro_batch")),
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
        f"{source} {format_seconds(seconds)}, bubble {bubble:.0%}"
        for source, seconds, bubble in phases
        if seconds is not None and bubble is not None
    ]
    return f"{run}: {'; '.join(texts)}" if texts else run
