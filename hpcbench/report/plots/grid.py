"""Lines and points on a grid of characters."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from hpcbench.report.plots import theme
from hpcbench.report.plots.scales import Axis, figures, log_ticks, number, ticks

if TYPE_CHECKING:
    import polars

    from hpcbench.report.plots.lines import Lines

_HEIGHT = 14
_WIDEST = 72
"""Columns of the grid itself."""
MOST_VALUES = 10
"""On an axis each of so many whole numbers is a tick."""
_PLAIN = "ox+*@%&=~$^v"
_SEVERAL, _SEVERAL_PLAIN = "▣", "#"
_IDEAL = {False: "╌", True: "-"}


class _Scale(NamedTuple):
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


class _Grid:
    """Characters with styles; what has been put somewhere stays unless something stronger comes."""

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

    def row(self, number_: int) -> Text:
        text = Text()
        for character, style in self.cells[number_]:
            text.append(character, style)
        text.rstrip()
        return text


def grid_text(drawing: Lines, frame: polars.DataFrame, width: int, *, plain: bool) -> list[Text]:
    """A grid for each panel with its axes, and the meaning of the characters below the last one."""
    from hpcbench.report.plots.lines import CROSSING, IDEAL, MEASURED, PREDICTED

    series = frame.filter(frame["role"].is_in([MEASURED, PREDICTED]))["series"].unique(maintain_order=True).to_list()
    known = theme.styles(series)
    marks = {
        name: (_PLAIN[place % len(_PLAIN)] if plain else style.character, theme.terminal_colour(style.colour))
        for place, (name, style) in enumerate(known.items())
    }
    lines: list[Text] = []
    for panel in frame["panel"].unique(maintain_order=True).to_list():
        if panel:
            lines += [Text(""), cut(panel, width, "bold")]
        lines += _panel(drawing, frame.filter(frame["panel"] == panel), frame, marks, (width, plain))
    entries = [Text.assemble((mark, colour), f" {name}") for name, (mark, colour) in marks.items()]
    several = _SEVERAL_PLAIN if plain else _SEVERAL
    if any(several in line.plain for line in lines):
        entries.append(Text(f"{several} several"))
    if CROSSING in frame["role"].to_list():
        entries.append(Text("X lines cross"))
    if IDEAL in frame["role"].to_list():
        entries.append(Text(f"{_IDEAL[plain]} {drawing.ideal}", style="dim"))
    return [*lines, Text(""), *flowed(entries, width)]


def _panel(
    drawing: Lines, inside: polars.DataFrame, frame: polars.DataFrame, marks: dict[str, tuple[str, str]],
    form: tuple[int, bool],
) -> list[Text]:  # fmt: skip
    """One grid: every panel has the same scales."""
    width, plain = form
    y_values = [one / drawing.y.factor for name in ("y", "low", "high") for one in figures(frame, name)]
    bottom, top, y_marks = _ends(drawing.y, y_values, from_zero=drawing.from_zero)
    margin = max(cell_len(number(one)) for one in y_marks) + 1
    cells = max(8, min(width - margin - 2, _WIDEST))
    x_values = [one / drawing.x.factor for one in figures(frame.filter(frame["role"] != "crossing"), "x")]
    # A point on the very edge would sit on the axis.
    room = 2 if min(x_values) < max(x_values) else 0
    across = _Scale(min(x_values), max(x_values), cells - 2 * room, bool(drawing.x.log))
    up = _Scale(bottom, top, _HEIGHT, bool(drawing.y.log))
    grid = _Grid(cells, _HEIGHT)
    _draw(grid, drawing, inside, marks, (across, up, room, plain))
    labels = {_HEIGHT - 1 - up.place(one): number(one) for one in y_marks}
    side, corner, flat = ("|", "+", "-") if plain else ("│", "└", "─")
    lines = [cut(drawing.y.heading, width)]
    for row in range(_HEIGHT):
        lines.append(Text.assemble((f"{labels.get(row, ''):>{margin}}{side}", "dim"), grid.row(row)))
    lines.append(Text(" " * margin + corner + flat * cells, style="dim"))
    each = sorted(set(x_values))
    counts = len(each) <= MOST_VALUES and all(value == int(value) for value in each)
    shown = each if counts else _ends(drawing.x, x_values, from_zero=False)[2]
    lines.append(Text(" " * (margin + 1) + _below(shown, across, room, cells), style="dim"))
    lines.append(cut(drawing.x.heading.rjust(margin + 1 + cells), width, "dim"))
    return lines


def _draw(
    grid: _Grid, drawing: Lines, inside: polars.DataFrame, marks: dict[str, tuple[str, str]],
    form: tuple[_Scale, _Scale, int, bool],
) -> None:  # fmt: skip
    from hpcbench.report.plots.lines import CROSSING, IDEAL, MEASURED, PREDICTED

    across, up, room, plain = form

    def place(x: float, y: float) -> tuple[int, int]:
        return across.place(x / drawing.x.factor) + room, up.place(y / drawing.y.factor)

    dot, bar = (".", "|") if plain else ("·", "│")
    roles = set(inside["role"].to_list())
    joined = [IDEAL, *([PREDICTED] if PREDICTED in roles else [MEASURED] if drawing.joined else [])]
    for role in joined:
        for (name,), rows in inside.filter(inside["role"] == role).group_by(["series"], maintain_order=True):
            ends = [place(x, y) for x, y in rows.sort("x").select("x", "y").iter_rows()]
            for x, y in _between(ends):
                grid.put(x, y, *((_IDEAL[plain], "dim") if role == IDEAL else (dot, marks[str(name)][1])))
    points = inside.filter(inside["role"] == MEASURED)
    for row in points.filter(points["low"].is_not_null()).iter_rows(named=True):
        x, low = place(row["x"], max(row["low"], up.low * drawing.y.factor))
        for y in range(low, place(row["x"], row["high"])[1] + 1):
            grid.put(x, y, bar, marks[row["series"]][1])
    # Where nothing was measured of a series its line has the marks.
    alone = (inside["role"] == PREDICTED) & ~inside["series"].is_in(points["series"].to_list())
    for row in [*points.iter_rows(named=True), *inside.filter(alone).iter_rows(named=True)]:
        character, colour = marks[row["series"]]
        several = _SEVERAL_PLAIN if plain else _SEVERAL
        grid.mark(*place(row["x"], row["y"]), row["series"], character, colour, several=several)
    for row in inside.filter(inside["role"] == CROSSING).iter_rows(named=True):
        grid.put(*place(row["x"], row["y"]), "X", "bold")


def _between(ends: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The cells of straight lines through ``ends``."""
    found = []
    for (x1, y1), (x2, y2) in pairwise(ends):
        steps = max(abs(x2 - x1), abs(y2 - y1), 1)
        found += [
            (round(x1 + (x2 - x1) * step / steps), round(y1 + (y2 - y1) * step / steps)) for step in range(steps + 1)
        ]
    return found


def _ends(axis: Axis, values: list[float], *, from_zero: bool) -> tuple[float, float, list[float]]:
    """The least and the most of an axis, in its unit, and its ticks."""
    low, high = min(values), max(values)
    if axis.log:
        low = min(value for value in values if value > 0)
        return low, high, log_ticks(low, high)
    low = min(0.0, low) if from_zero else low
    high = high if high > low else low + (abs(low) or 1.0)
    marks = ticks(low, high)
    return min(low, marks[0]), max(high, marks[-1]), marks


def _below(values: list[float], across: _Scale, room: int, cells: int) -> str:
    """Labels below their places, as many as there is room for."""
    line = ""
    for value in values:
        label = number(value)
        start = max(0, min(across.place(value) + room - (len(label) - 1) // 2, cells - len(label)))
        if not line or start > len(line):
            line = line.ljust(start) + label
    return line


def tick_line(low: float, high: float, cells: int, *, plain: bool) -> tuple[str, str]:
    """A horizontal axis and the labels below it, for a linear scale whose ends are the first and the last cell."""
    across = _Scale(low, high, cells, log=False)
    marks = [value for value in ticks(low, high) if low <= value <= high]
    flat, tick = ("-", "+") if plain else ("─", "┴")
    places = {across.place(value) for value in marks}
    axis = "".join(tick if place in places else flat for place in range(cells))
    return axis, _below(marks, across, 0, cells)


def cut(text: str, width: int, style: str = "") -> Text:
    """``text`` in one line of at most ``width`` characters."""
    made = Text(text, style=style)
    made.truncate(width, overflow="crop")
    return made


def flowed(entries: list[Text], width: int) -> list[Text]:
    """``entries`` beside each other, in as many lines as they need."""
    lines: list[Text] = []
    for entry in entries:
        entry.truncate(width, overflow="crop")
        if lines and lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(Text().append_text(entry))
    return lines
