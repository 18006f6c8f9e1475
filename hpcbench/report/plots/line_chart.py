"""Line charts over a numeric axis, and their drawing as a grid of characters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import polars as pl
from rich.cells import cell_len
from rich.text import Text

from hpcbench.report.plots import theme
from hpcbench.report.plots.theme import PlotAxis, column_values, format_tick, linear_ticks, log_ticks

_LINE_NUMBERS = ("x", "y", "low", "high")
LINE_COLUMNS = ("panel", "series", "role", *_LINE_NUMBERS, "label", "launches")
MEASURED, PREDICTED, IDEAL, CROSSOVER, BAND = "measured", "predicted", "ideal", "crossing", "band"
"""Roles of rows. An ideal is a thin line, a crossover a ring where two lines meet, a band the space around an ideal."""


@dataclass(frozen=True)
class LineChart:
    """Rows of ``COLUMNS``; ``low`` and ``high`` are whiskers of what was measured, a band of what was predicted."""

    x: PlotAxis
    y: PlotAxis
    joined: bool = True
    """Whether lines join what was measured; where something is predicted they join that."""
    from_zero: bool = True
    legend: str = "strategy"
    ideal: str = "ideal"
    """Name of the thin line."""

    def text(self, frame: pl.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """A grid for each panel with its axes, and the meaning of the characters below the last one."""
        drawn = frame.filter(frame["role"].is_in([MEASURED, PREDICTED]))
        styles = theme.series_styles(drawn["series"].unique(maintain_order=True).to_list())
        marks = {
            name: (_ASCII_MARKS[number % len(_ASCII_MARKS)] if plain else style.character,
                   theme.terminal_colour(style.colour))
            for number, (name, style) in enumerate(styles.items())
        }  # fmt: skip
        lines: list[Text] = []
        for panel in frame["panel"].unique(maintain_order=True):
            if panel:
                lines += [Text(""), truncated_text(panel, width, "bold")]
            lines += _panel_lines(self, frame.filter(frame["panel"] == panel), frame, marks, width, plain=plain)
        entries = [Text.assemble(mark, f" {name}") for name, mark in marks.items()]
        if any(_OVERLAP_MARK[plain] in line.plain for line in lines):
            entries.append(Text(f"{_OVERLAP_MARK[plain]} several"))
        if CROSSOVER in frame["role"]:
            entries.append(Text("X lines cross"))
        if IDEAL in frame["role"]:
            entries.append(Text(f"{_IDEAL_CHARACTER[plain]} {self.ideal}", style="dim"))
        return [*lines, Text(""), *flow_entries(entries, width)]


def line_rows(rows: pl.DataFrame, role: str) -> pl.DataFrame:
    """``rows`` with ``panel``, ``x`` and ``y`` at least, as ``COLUMNS``; what they lack is null, a name the role's."""
    lacking = [
        pl.lit(role).alias(name) if name in ("series", "label") else pl.lit(None).alias(name)
        for name in LINE_COLUMNS
        if name not in (*rows.columns, "role")
    ]
    return rows.with_columns(*lacking, pl.lit(role).alias("role")).select(
        *(
            pl.col(name).cast(pl.Float64 if name in _LINE_NUMBERS else pl.Int64 if name == "launches" else pl.String)
            for name in LINE_COLUMNS
        )
    )


_GRID_HEIGHT = 14
_MAX_GRID_WIDTH = 72
"""Columns of the grid itself."""
MAX_INTEGER_TICKS = 10
"""Maximum number of different whole numbers on an axis that all are ticks."""
_ASCII_MARKS = "ox+*@%&=~$^v"
_OVERLAP_MARK = {False: "▣", True: "#"}
_IDEAL_CHARACTER = {False: "╌", True: "-"}


class _CellScale(NamedTuple):
    """Figures in the axis's unit to places from 0 to ``cells - 1``."""

    low: float
    high: float
    cells: int
    log: bool

    def place(self, value: float) -> int:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return round((value - low) / (high - low) * (self.cells - 1)) if high > low else (self.cells - 1) // 2


class _CharacterGrid:
    """Characters with styles, the row at the top first."""

    def __init__(self, width: int, height: int) -> None:
        self.cells: list[list[tuple[str, str]]] = [[(" ", "")] * width for _ in range(height)]
        self._owner: dict[tuple[int, int], str] = {}

    def put(self, x: int, y: int, character: str, style: str = "") -> None:
        """``y`` counts from below; beyond the edges nothing is seen."""
        if 0 <= y < len(self.cells) and 0 <= x < len(self.cells[0]):
            self.cells[-1 - y][x] = (character, style)

    def mark(self, x: int, y: int, owner: str, character: str, style: str, *, several: str) -> None:
        """A series' point; where another's is already, ``several``."""
        if self._owner.setdefault((x, y), owner) != owner:
            character, style = several, ""
        self.put(x, y, character, style)


def _panel_lines(
    drawing: LineChart, inside: pl.DataFrame, frame: pl.DataFrame, marks: dict[str, tuple[str, str]], width: int, *,
    plain: bool,
) -> list[Text]:  # fmt: skip
    """One grid: every panel has the same scales."""
    y_values = [value / drawing.y.factor for name in ("y", "low", "high") for value in column_values(frame, name)]
    bottom, top, y_marks = _axis_range(drawing.y, y_values, from_zero=drawing.from_zero)
    margin = max(cell_len(format_tick(y_mark)) for y_mark in y_marks) + 1
    cells = max(8, min(width - margin - 2, _MAX_GRID_WIDTH))
    x_values = [value / drawing.x.factor for value in column_values(frame.filter(frame["role"] != "crossing"), "x")]
    # A point on the very edge would sit on the axis.
    room = 2 if min(x_values) < max(x_values) else 0
    across = _CellScale(min(x_values), max(x_values), cells - 2 * room, bool(drawing.x.log))
    up = _CellScale(bottom, top, _GRID_HEIGHT, bool(drawing.y.log))
    grid = _CharacterGrid(cells, _GRID_HEIGHT)
    _draw_series(grid, drawing, inside, marks, across, up, room, plain=plain)
    labels = {_GRID_HEIGHT - 1 - up.place(y_mark): format_tick(y_mark) for y_mark in y_marks}
    side, corner, flat = ("|", "+", "-") if plain else ("│", "└", "─")
    lines = [truncated_text(drawing.y.heading, width)]
    for row in range(_GRID_HEIGHT):
        lines.append(Text.assemble((f"{labels.get(row, ''):>{margin}}{side}", "dim"), styled_line(grid.cells[row])))
    lines.append(Text(" " * margin + corner + flat * cells, style="dim"))
    each = sorted(set(x_values))
    counts = len(each) <= MAX_INTEGER_TICKS and all(value == int(value) for value in each)
    shown = each if counts else _axis_range(drawing.x, x_values, from_zero=False)[2]
    lines.append(Text(" " * (margin + 1) + _tick_labels(shown, across, room, cells), style="dim"))
    lines.append(truncated_text(drawing.x.heading.rjust(margin + 1 + cells), width, "dim"))
    return lines


def _draw_series(
    grid: _CharacterGrid, drawing: LineChart, inside: pl.DataFrame, marks: dict[str, tuple[str, str]],
    across: _CellScale, up: _CellScale, room: int, *, plain: bool,
) -> None:  # fmt: skip
    def place(x: float, y: float) -> tuple[int, int]:
        return across.place(x / drawing.x.factor) + room, up.place(y / drawing.y.factor)

    dot, bar = (".", "|") if plain else ("·", "│")
    roles = set(inside["role"].to_list())
    joined = [IDEAL, *([PREDICTED] if PREDICTED in roles else [MEASURED] if drawing.joined else [])]
    for role in joined:
        for (name,), rows in inside.filter(inside["role"] == role).group_by(["series"], maintain_order=True):
            ends = [place(x, y) for x, y in rows.sort("x").select("x", "y").iter_rows()]
            for x, y in _cells_between(ends):
                grid.put(x, y, *((_IDEAL_CHARACTER[plain], "dim") if role == IDEAL else (dot, marks[str(name)][1])))
    points = inside.filter(inside["role"] == MEASURED)
    for row in points.filter(points["low"].is_not_null()).iter_rows(named=True):
        x, low = place(row["x"], max(row["low"], up.low * drawing.y.factor))
        for y in range(low, place(row["x"], row["high"])[1] + 1):
            grid.put(x, y, bar, marks[row["series"]][1])
    # Where nothing was measured of a series its line has the marks.
    alone = (inside["role"] == PREDICTED) & ~inside["series"].is_in(points["series"].to_list())
    for row in [*points.iter_rows(named=True), *inside.filter(alone).iter_rows(named=True)]:
        character, colour = marks[row["series"]]
        grid.mark(*place(row["x"], row["y"]), row["series"], character, colour, several=_OVERLAP_MARK[plain])
    for row in inside.filter(inside["role"] == CROSSOVER).iter_rows(named=True):
        grid.put(*place(row["x"], row["y"]), "X", "bold")


def _cells_between(ends: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The cells of straight lines through ``ends``."""
    cells = []
    for (x1, y1), (x2, y2) in pairwise(ends):
        steps = max(abs(x2 - x1), abs(y2 - y1), 1)
        x_step, y_step = x2 - x1, y2 - y1
        cells += [(round(x1 + x_step * n / steps), round(y1 + y_step * n / steps)) for n in range(steps + 1)]
    return cells


def _axis_range(axis: PlotAxis, values: list[float], *, from_zero: bool) -> tuple[float, float, list[float]]:
    """Minimum and maximum of an axis, in its unit, and its ticks."""
    low, high = min(values), max(values)
    if axis.log:
        low = min(value for value in values if value > 0)
        return low, high, log_ticks(low, high)
    low = min(0.0, low) if from_zero else low
    high = high if high > low else low + (abs(low) or 1.0)
    marks = linear_ticks(low, high)
    return min(low, marks[0]), max(high, marks[-1]), marks


def _tick_labels(values: list[float], across: _CellScale, room: int, cells: int) -> str:
    """Labels below their places, as many as there is room for."""
    line = ""
    for value in values:
        label = format_tick(value)
        start = max(0, min(across.place(value) + room - (len(label) - 1) // 2, cells - len(label)))
        if not line or start > len(line):
            line = line.ljust(start) + label
    return line


def axis_lines(low: float, high: float, cells: int, margin: int, *, plain: bool) -> list[Text]:
    """A horizontal axis and the labels below it, for a linear scale whose ends are the first and the last cell.

    ``margin`` blanks stand before both.
    """
    across = _CellScale(low, high, cells, log=False)
    marks = [value for value in linear_ticks(low, high) if low <= value <= high]
    flat, tick = ("-", "+") if plain else ("─", "┴")
    places = {across.place(value) for value in marks}
    axis = "".join(tick if place in places else flat for place in range(cells))
    return [Text(" " * margin + line, style="dim") for line in (axis, _tick_labels(marks, across, 0, cells))]


def truncated_text(text: str, width: int, style: str = "") -> Text:
    """``text`` in one line of at most ``width`` characters."""
    line = Text(text, style=style)
    line.truncate(width, overflow="crop")
    return line


def styled_line(cells: Iterable[tuple[str, str]]) -> Text:
    """Characters with their styles as a line without blanks at its end."""
    line = Text.assemble(*cells)
    line.rstrip()
    return line


def flow_entries(entries: Iterable[Text], width: int) -> list[Text]:
    """``entries`` beside each other, in as many lines as they need."""
    lines: list[Text] = []
    for entry in entries:
        entry.truncate(width, overflow="crop")
        if lines and lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(Text().append_text(entry))
    return lines
