"""Bar charts with one row per configuration: box plots of spreads and stacked bars of parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl
from rich.text import Text

from hpcbench.report.plots import theme
from hpcbench.report.plots.line_chart import axis_lines, flow_entries, truncated_text
from hpcbench.report.plots.point_data import name_margin
from hpcbench.report.plots.theme import PlotAxis, column_values

BOX_NUMBERS = ("low", "quarter", "median", "three_quarters", "high", "value")
BOX_COLUMNS = ("panel", "series", "row", "role", *BOX_NUMBERS, "note")
BOX_ROLE, DOT_ROLE, MISSING_ROLE = "box", "dot", "lost"
"""A row's summary, one of its figures (``value``), or a row that has none but a ``note`` why."""
MAX_DOTS = 40
"""Figures drawn of a row: more are thinned evenly by size, the ends kept."""


def five_number_summary(values: Sequence[float], ends: tuple[float, float] = (0.0, 1.0)) -> dict[str, float]:
    """``low`` and ``high`` at the shares ``ends``, ``quarter``, ``median`` and ``three_quarters`` of ``values``."""
    ordered = sorted(values)
    shares = (ends[0], 0.25, 0.5, 0.75, ends[1])
    return dict(zip(BOX_NUMBERS, (_quantile(ordered, share) for share in shares), strict=False))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the figures, as NumPy's and polars' quantiles are."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def thin_evenly(values: Sequence[float], most: int = MAX_DOTS) -> list[float]:
    """At most ``most`` of ``values``, evenly by size."""
    ordered = sorted(values)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / (most - 1))] for place in range(most)]


def box_frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """``rows`` as ``COLUMNS``; what they lack is null."""
    schema = {name: pl.Float64 if name in BOX_NUMBERS else pl.String for name in BOX_COLUMNS}
    return pl.DataFrame([{name: row.get(name) for name in BOX_COLUMNS} for row in rows], schema=schema)


@dataclass(frozen=True)
class BoxChart:
    """Rows of ``COLUMNS``."""

    x: PlotAxis
    whiskers: str
    """Where they end."""
    bars: bool = False
    """Bars from zero to the most rather than boxes, for what adds up from nothing."""

    def text(self, frame: pl.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """As ``Drawing``."""
        left = name_margin(frame["row"].to_list(), width)
        cells = max(8, width - left - 1)
        ends = [value / self.x.factor for name in BOX_NUMBERS for value in column_values(frame, name)]
        low, high = (min([0.0, *ends]) if self.bars or not ends else min(ends)), max(ends, default=1.0)
        high = high if high > low else low + (abs(low) or 1.0)
        known = theme.series_styles(frame["series"].unique(maintain_order=True).to_list())
        lines: list[Text] = []
        last: object = None
        for (panel, row), inside in frame.group_by(["panel", "row"], maintain_order=True):
            if panel and panel != last:
                lines += [Text(""), truncated_text(str(panel), width, "bold")]
            last = panel
            line = truncated_text(str(row), left)
            line.pad_right(left + 1 - line.cell_len)
            lines.append(line.append_text(self._drawn(inside, (low, high), cells, known, plain=plain)))
        axis, labels = axis_lines(low, high, cells, plain=plain)
        blank = " " * (left + 1)
        lines += [Text(blank + axis, style="dim"), Text(blank + labels, style="dim")]
        lines.append(truncated_text(self.x.heading.rjust(left + 1 + cells), width, "dim"))
        box, rule, median = _BOX_CHARACTERS[plain]
        key = [f"{box} middle half", f"{median} median", f"{rule} {self.whiskers}"]
        if self.bars:
            key = [f"{_BAR_CHARACTER[plain]} up to the least", f"{box} {self.whiskers}"]
        return [*lines, Text(""), *flow_entries([Text(one) for one in key], width)]

    def _drawn(
        self, inside: pl.DataFrame, ends: tuple[float, float], cells: int, known: dict[str, theme.SeriesStyle], *,
        plain: bool,
    ) -> Text:  # fmt: skip
        """One row: whiskers, over them the box, over that the median."""
        lost = inside.filter(inside["role"] == MISSING_ROLE)
        if len(lost):
            return truncated_text(str(lost["note"][0]), cells)
        box, rule, median = _BOX_CHARACTERS[plain]
        line = [" "] * cells

        def place(value: float) -> int:
            return round((value / self.x.factor - ends[0]) / (ends[1] - ends[0]) * (cells - 1))

        one = inside.filter(inside["role"] == BOX_ROLE).row(0, named=True)
        style = theme.terminal_colour(known[one["series"]].colour)
        if self.bars:
            least = place(one["low"]) + 1
            return Text(_BAR_CHARACTER[plain] * least + box * (place(one["high"]) + 1 - least), style=style)
        for start, end, character in (("low", "high", rule), ("quarter", "three_quarters", box)):
            for cell in range(place(one[start]), place(one[end]) + 1):
                line[cell] = character
        line[place(one["median"])] = median
        return Text("".join(line).rstrip(), style=style)


_BOX_CHARACTERS = {False: ("▒", "─", "█"), True: ("=", "-", "|")}
"""The box, the whiskers, the median."""
_BAR_CHARACTER = {False: "█", True: "#"}


def row_medians(frame: pl.DataFrame) -> list[tuple[str, float]]:
    """Rows' names, with their panel where they have one, and medians."""
    rows = frame.filter(frame["role"] == BOX_ROLE)["panel", "row", "median"].iter_rows()
    return [(f"{panel}, {row}" if panel else row, value) for panel, row, value in rows]


STACK_COLUMNS = ("panel", "series", "row", "part", "value", "begin", "end", "total", "label")


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
    """In the order in which they are stacked."""
    total: str
    """What the mark is."""

    def text(self, frame: pl.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """As ``Drawing``."""
        names = frame["row"].unique(maintain_order=True).to_list()
        left = name_margin(names, width)
        totals = {value: _format_amount(self.x, value) for value in column_values(frame, "total")}
        right = max(map(len, totals.values())) + 1
        cells = max(6, width - left - right - 1)
        longest = max(column_values(frame, "end"))
        lines: list[Text] = []
        last: object = None
        for (panel, row), parts in frame.group_by(["panel", "row"], maintain_order=True):
            if panel and panel != last:
                lines += [Text(""), truncated_text(str(panel), width, "bold")]
            last = panel
            line = truncated_text(str(row), left)
            line.pad_right(left - line.cell_len)
            line.append(" ")
            for name, begin, end in parts.select("part", "begin", "end").iter_rows():
                part = self.parts[name]
                count = round(end / longest * cells) - round(begin / longest * cells)
                line.append((part.plain if plain else part.character) * count, theme.terminal_colour(part.colour))
            line.pad_right(left + 1 + cells - line.cell_len)
            lines.append(line.append(f"{totals[parts['total'][0]]:>{right}}"))
        entries = [
            Text.assemble(((one.plain if plain else one.character) * 2, theme.terminal_colour(one.colour)), f" {name}")
            for name, one in self.parts.items()
            if name in self.used_parts(frame)
        ]
        return [*lines, Text(""), *flow_entries([*entries, Text(f"at the end: {self.total}")], width)]

    def used_parts(self, frame: pl.DataFrame) -> list[str]:
        there = set(frame["part"].to_list())
        return [name for name in self.parts if name in there]


def _format_amount(axis: PlotAxis, value: float) -> str:
    return f"{value / axis.factor:.3g} {axis.unit}".rstrip()
