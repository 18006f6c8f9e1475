"""Bar charts: box plots of spreads and stacked bars of parts, one row per configuration, and actions over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl
from rich.cells import cell_len
from rich.text import Text

from hpcbench.report.plots import theme
from hpcbench.report.plots.line_chart import axis_lines, flow_entries, styled_line, truncated_text
from hpcbench.report.plots.theme import PlotAxis, column_values

BOX_NUMBERS = ("low", "quarter", "median", "three_quarters", "high", "value")
BOX_COLUMNS = ("panel", "series", "row", "role", *BOX_NUMBERS, "note")
BOX_ROLE, DOT_ROLE, MISSING_ROLE = "box", "dot", "lost"
"""A row's summary, one of its figures (``value``), or a row that has none but a ``note`` why."""
MAX_DOTS = 40
"""Figures drawn of a row: more are thinned evenly by size, the ends kept."""


def box_rows(
    row: dict[str, Any], values: Sequence[float], ends: tuple[float, float] = (0.0, 1.0)
) -> list[dict[str, Any]]:
    """Rows of a ``BoxChart`` for one configuration: its summary, and at most ``MAX_DOTS`` of ``values``.

    Args:
        row: ``panel``, ``series`` and ``row``.
        values: at least one figure.
        ends: the shares of figures below ``low`` and ``high``.
    """
    ordered = pl.Series(sorted(values), dtype=pl.Float64)
    shares = (ends[0], 0.25, 0.5, 0.75, ends[1])
    summary = {name: ordered.quantile(share, "linear") for name, share in zip(BOX_NUMBERS, shares, strict=False)}
    last = len(ordered) - 1
    dots = (
        [round(number * last / (MAX_DOTS - 1)) for number in range(MAX_DOTS)] if last >= MAX_DOTS else range(last + 1)
    )
    return [{**row, "role": BOX_ROLE, **summary}, *({**row, "role": DOT_ROLE, "value": ordered[dot]} for dot in dots)]


def _row_lines(frame: pl.DataFrame, width: int, left: int, draw: Callable[[pl.DataFrame], Text]) -> list[Text]:
    """A line for each row, its name before what ``draw`` makes of its part of ``frame``; headings of panels between."""
    lines: list[Text] = []
    last: object = None
    for (panel, row), inside in frame.group_by(["panel", "row"], maintain_order=True):
        if panel and panel != last:
            lines += [Text(""), truncated_text(str(panel), width, "bold")]
        last = panel
        name = truncated_text(str(row), left)
        name.pad_right(left + 1 - name.cell_len)
        lines.append(name.append_text(draw(inside)))
    return lines


def _name_width(frame: pl.DataFrame, width: int) -> int:
    """Characters for rows' names in a terminal of ``width``: half of it at most."""
    return min(max(map(cell_len, frame["row"])), width // 2 - 1)


@dataclass(frozen=True)
class BoxChart:
    """Rows of ``COLUMNS``."""

    x: PlotAxis
    whiskers: str
    """Range of the whiskers, as text."""
    bars: bool = False
    """Bars from zero to the most rather than boxes, for what adds up from nothing."""

    def text(self, frame: pl.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """Return the lines of the chart, see ``Chart.text``."""
        left = _name_width(frame, width)
        cells = max(8, width - left - 1)
        ends = [value / self.x.factor for name in BOX_NUMBERS for value in column_values(frame, name)]
        low, high = (min([0.0, *ends]) if self.bars or not ends else min(ends)), max(ends, default=1.0)
        high = high if high > low else low + (abs(low) or 1.0)
        styles = theme.series_styles(frame["series"].unique(maintain_order=True).to_list())
        box, rule, median = _BOX_CHARACTERS[plain]

        def cell(value: float) -> int:
            return round((value / self.x.factor - low) / (high - low) * (cells - 1))

        def draw(inside: pl.DataFrame) -> Text:
            """Whiskers, over them the box, over that the median."""
            row = inside.filter(inside["role"] != DOT_ROLE).row(0, named=True)
            if row["role"] == MISSING_ROLE:
                return truncated_text(row["note"], cells)
            style = theme.terminal_colour(styles[row["series"]].colour)
            if self.bars:
                least = cell(row["low"]) + 1
                return Text(_BAR_CHARACTER[plain] * least + box * (cell(row["high"]) + 1 - least), style=style)
            line = [" "] * cells
            for start, end, character in (("low", "high", rule), ("quarter", "three_quarters", box)):
                begin, count = cell(row[start]), cell(row[end]) + 1 - cell(row[start])
                line[begin : begin + count] = character * count
            line[cell(row["median"])] = median
            return Text("".join(line).rstrip(), style=style)

        lines = [*_row_lines(frame, width, left, draw), *axis_lines(low, high, cells, left + 1, plain=plain)]
        lines.append(truncated_text(self.x.heading.rjust(left + 1 + cells), width, "dim"))
        key = [f"{box} middle half", f"{median} median", f"{rule} {self.whiskers}"]
        if self.bars:
            key = [f"{_BAR_CHARACTER[plain]} up to the least", f"{box} {self.whiskers}"]
        return [*lines, Text(""), *flow_entries(map(Text, key), width)]


_BOX_CHARACTERS = {False: ("▒", "─", "█"), True: ("=", "-", "|")}
"""The box, the whiskers, the median."""
_BAR_CHARACTER = {False: "█", True: "#"}

STACK_NUMBERS = ("value", "begin", "end", "total")
STACK_COLUMNS = ("panel", "series", "row", "part", *STACK_NUMBERS, "label")


class StackPart(NamedTuple):
    """One part: its colour, the text on it, and its characters in a terminal (any, or ASCII alone)."""

    colour: str
    ink: str
    character: str
    plain: str


@dataclass(frozen=True)
class StackedBarChart:
    """Rows of ``COLUMNS``: a part from ``begin`` to ``end``; ``total`` is what they should add up to, a mark."""

    x: PlotAxis
    parts: dict[str, StackPart]
    """Parts in the order in which they are stacked."""
    total: str
    """Name of the quantity that the mark shows."""

    def text(self, frame: pl.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """Return the lines of the chart, see ``Chart.text``."""
        left = _name_width(frame, width)
        totals = {
            value: f"{value / self.x.factor:.3g} {self.x.unit}".rstrip() for value in column_values(frame, "total")
        }
        right = max(map(len, totals.values())) + 1
        cells = max(6, width - left - right - 1)
        longest = max(column_values(frame, "end"))

        def bar(name: str, count: int) -> tuple[str, str]:
            part = self.parts[name]
            return (part.plain if plain else part.character) * count, theme.terminal_colour(part.colour)

        def draw(inside: pl.DataFrame) -> Text:
            parts = inside.select("part", "begin", "end").iter_rows()
            bars = [
                bar(name, round(end / longest * cells) - round(begin / longest * cells)) for name, begin, end in parts
            ]
            line = Text.assemble(*bars)
            line.pad_right(cells - line.cell_len)
            return line.append(f"{totals[inside['total'][0]]:>{right}}")

        entries = [Text.assemble(bar(name, 2), f" {name}") for name in self.used_parts(frame)]
        entries.append(Text(f"at the end: {self.total}"))
        return [*_row_lines(frame, width, left, draw), Text(""), *flow_entries(entries, width)]

    def used_parts(self, frame: pl.DataFrame) -> list[str]:
        """The names of ``parts`` that ``frame`` has."""
        used = set(frame["part"])
        return [name for name in self.parts if name in used]


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
