"""Plots in a terminal, drawn by plotext: every chart is strokes of characters on panels with two axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotext
import polars as pl
from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from hpcbench.report.plots import charts, theme
from hpcbench.report.plots.plot_model import Plot
from hpcbench.report.plots.theme import PlotAxis, column_values, format_tick, linear_ticks, log_ticks

_MAX_WIDTH, _MIN_WIDTH, _ROWS = 80, 24, 14
"""Columns of a plot, and rows of a panel with numbers on both axes."""
_MARGIN = 10
"""Columns that names and numbers at the left of a panel take; only for the distance of ticks."""
_IN_ASCII = str.maketrans("─│└┤┬╌╎·█▓▒░µ", "-|+|+-:.#%=:u")
_MARKS_IN_ASCII = "ox+*@%&=~$^v"
_UNNAMED = PlotAxis("")

Stroke = tuple[str, str, Sequence[float], Sequence[float]]
"""A character, its colour, and in SI units x and y of points that a line joins."""
Key = list[tuple[str, str]]
"""Texts that explain characters, and their colours."""


@dataclass
class _Panel:
    """A canvas. ``rows`` have a name and a figure, the first on top and at y = 0; without rows y has numbers."""

    title: str
    x: PlotAxis
    x_span: Sequence[float]
    """Values that the axis contains."""
    y: PlotAxis = _UNNAMED
    y_span: Sequence[float] = ()
    rows: list[tuple[str, str]] = field(default_factory=list)
    strokes: list[Stroke] = field(default_factory=list)
    labels: list[tuple[str, str, float, float, int]] = field(default_factory=list)
    """Text, colour, begin and end of the room for it, row."""

    def draw(self, width: int) -> str:
        """Return the panel with codes for colours. plotext has one figure, which is cleared before."""
        figure = plotext.figure.clear().plot_size(width, (len(self.rows) or _ROWS) + 2).theme("colorless")
        figure.axes(False, axis="x", side="upper").axes(False, axis="y", side="right")
        _set_scale(figure.ruler("x"), self.x, self.x_span, width)
        if self.rows:
            names = [name[: width // 2 - 1 - len(more)] + more for name, more in self.rows]
            figure.ruler("y").lim(-0.5, len(names) - 0.5).alignment(lim="edge").direction(-1)
            figure.ruler("y").ticks(list(range(len(names))), names)
        else:
            _set_scale(figure.ruler("y"), self.y, self.y_span, _ROWS, are_rows=True)
        for character, colour, x, y in self.strokes:
            points = [_place(self.x, value) for value in x], [_place(self.y, value) for value in y]
            figure.draw(figure.signal(*points, marker=plotext.marker(character, _rgb(colour))).lines())
        for text, colour, begin, end, row in self.labels:
            cut = text if (end - begin) / max(self.x_span) * width >= len(text) else text[:1]
            figure.draw(figure.text(_place(self.x, begin), row, plotext.colorize(cut, _rgb(colour))))
        return str(figure.build().string()).replace("┤", "│").rstrip("\n")


def _rgb(colour: str) -> tuple[int, ...] | None:
    """The colour for plotext; ``None``, the terminal's own, for what is as dark or as light as its ground."""
    return None if colour in ("", theme.BLACK, theme.LIGHT_GREY, theme.WHITE) else tuple(bytes.fromhex(colour[1:]))


def _place(axis: PlotAxis, value: float) -> float:
    """Return where a value in SI units is on the axis. Logarithms are taken here, since labels of ticks are ours."""
    return math.log10(max(value / axis.factor, 1e-30)) if axis.log else value / axis.factor


def _set_scale(ruler: Any, axis: PlotAxis, span: Sequence[float], room: int, *, are_rows: bool = False) -> None:
    """Set limits and ticks of a numeric axis of ``room`` characters; labels of ticks have a blank between them."""
    each = sorted({value / axis.factor for value in span if value > 0 or not axis.log})
    low, high = each[0], each[-1]
    if low == high:
        low, high = (low / 2, high * 2) if axis.log else (low - 0.5, high + 0.5)
    are_counts = len(each) <= charts.MAX_INTEGER_TICKS and all(value == int(value) for value in each)
    ticks = each if are_counts else log_ticks(low, high) if axis.log else linear_ticks(low, high)
    unit = axis._replace(factor=1.0)
    first, last = _place(unit, low), _place(unit, high)
    ruler.lim(first, last)
    kept: list[float] = []
    end = -math.inf
    for tick in ticks:
        length = 1 if are_rows else len(format_tick(tick))
        middle = (_place(unit, tick) - first) / max(last - first, 1e-30) * (room - (1 if are_rows else _MARGIN))
        if middle - length / 2 >= end + (0 if are_rows else 1):
            kept.append(tick)
            end = middle + length / 2
    ruler.ticks([_place(unit, tick) for tick in kept], [format_tick(tick) for tick in kept])


def _draw_lines(chart: charts.LineChart, frame: pl.DataFrame, marks: str) -> tuple[list[_Panel], Key]:
    """``marks`` stand for the characters of series in ASCII; empty: their own ones."""
    roles = set(frame["role"])
    drawn = frame.filter(frame["role"].is_in([charts.MEASURED, charts.PREDICTED]))["series"].unique(maintain_order=True)
    named = {name: (marks[number % len(marks)] if marks else style.character, style.colour)
             for number, (name, style) in enumerate(theme.series_styles(drawn.to_list()).items())}  # fmt: skip
    x_span = column_values(frame.filter(frame["role"] != charts.CROSSOVER), "x")
    joined = charts.PREDICTED if charts.PREDICTED in roles else charts.MEASURED if chart.joined else ""
    panels = []
    for (title,), inside in frame.group_by(["panel"], maintain_order=True):
        lines, whiskers, dots = list[Stroke](), list[Stroke](), list[Stroke]()
        y_span = [value for name in ("y", "low", "high")
                  for value in column_values(inside if chart.own_scales else frame, name)]  # fmt: skip
        y_span += [0.0] if chart.from_zero and not chart.y.log else []
        measured = set(inside.filter(inside["role"] == charts.MEASURED)["series"])
        for (role, name), rows in inside.sort("x").group_by(["role", "series"], maintain_order=True):
            mark, colour = ("X", "") if role == charts.CROSSOVER else named.get(str(name), ("╌", ""))
            if role in (charts.IDEAL, joined):
                lines.append((mark if role == charts.IDEAL else "·", colour, rows["x"].to_list(), rows["y"].to_list()))
            for x, y, low, high in rows.select("x", "y", "low", "high").iter_rows():
                if role == charts.CHANGE:
                    lines.append(("╎", "", [x, x], [low, high]))
                if role == charts.MEASURED and low is not None:
                    whiskers.append(("│", colour, [x, x], [low, high]))
                if role in (charts.MEASURED, charts.CROSSOVER) or (role == charts.PREDICTED and name not in measured):
                    dots.append((mark, colour, [x], [y]))
        panels.append(_Panel(str(title or ""), chart.x, x_span, chart.y, y_span, [], [*lines, *whiskers, *dots]))
    return panels, [(f"{mark} {name}", colour) for name, (mark, colour) in named.items()]


def _rows(
    panels: list[_Panel], frame: pl.DataFrame, keys: list[str], axis: PlotAxis,
    span: Callable[[pl.DataFrame], list[float]], *, own: bool = False,
) -> Iterator[Any]:  # fmt: skip
    """Add a panel for each ``panel`` of ``frame``; the panel, number, values of ``keys`` and lines of every row.

    Args:
        panels: is added to.
        frame: the rows of a chart.
        keys: columns that are equal in all lines of a row.
        axis: of the panels' x.
        span: the values that it contains, of rows.
        own: whether each panel has a span of its own.
    """
    for (title,), inside in frame.group_by(["panel"], maintain_order=True):
        panels.append(_Panel(str(title or ""), axis, span(inside if own else frame)))
        for number, (key, rows) in enumerate(inside.group_by(keys, maintain_order=True)):
            yield panels[-1], number, key, rows


def _draw_boxes(chart: charts.BoxChart, frame: pl.DataFrame, _: str) -> tuple[list[_Panel], Key]:
    styles = theme.series_styles(frame["series"].unique(maintain_order=True).to_list())
    parts = [("─", "low", "high"), ("▒", "quarter", "three_quarters"), ("█", "median", "median")]
    if chart.bars:
        parts = [("▒", "low", "high"), ("█", "", "low")]

    def span(rows: pl.DataFrame) -> list[float]:
        values = [value for name in charts.BOX_NUMBERS for value in column_values(rows, name)] + [0.0] * chart.bars
        return values if any(values) else [0.0, 1.0]

    panels: list[_Panel] = []
    for panel, number, (name,), rows in _rows(panels, frame, ["row"], chart.x, span, own=chart.own_scales):
        row = rows.filter(rows["role"] != charts.DOT_ROLE).row(0, named=True)
        panel.rows.append((name, ""))
        if row["role"] == charts.MISSING_ROLE:
            panel.labels.append((row["note"], "", min(panel.x_span), math.inf, number))
        else:
            ends = [(character, [row.get(begin, 0.0), row[end]]) for character, begin, end in parts]
            panel.strokes += [(character, styles[row["series"]].colour, x, [number] * 2) for character, x in ends]
    return panels, []


def _draw_bars(chart: charts.BarChart, frame: pl.DataFrame, _: str) -> tuple[list[_Panel], Key]:
    measured = frame.filter(frame["role"] == charts.MEASURED)
    styles = theme.series_styles(measured["series"].unique(maintain_order=True).to_list())

    def span(rows: pl.DataFrame) -> list[float]:
        return [0.0, *column_values(rows, "y"), *column_values(rows, "high")]

    panels: list[_Panel] = []
    for panel, number, (name, role), rows in _rows(
        panels, frame, ["label", "role"], chart.x, span, own=chart.own_scales
    ):
        y, low, high, series = rows.select("y", "low", "high", "series").row(0)
        if role == charts.IDEAL:
            panel.strokes.insert(0, ("╎", "", [y, y], [-0.5, len(panel.rows) - 0.5]))
            continue
        panel.rows.append((name, f" {y / chart.x.factor:.4g}"))
        colour = styles[series].colour
        panel.strokes.append(("█", colour, [0.0, y if low is None else low], [number] * 2))
        if low is not None:
            panel.strokes.append(("▒", colour, [low, high], [number] * 2))
    return panels, []


def _draw_stacks(chart: charts.StackedBarChart, frame: pl.DataFrame, _: str) -> tuple[list[_Panel], Key]:
    panels: list[_Panel] = []

    def span(rows: pl.DataFrame) -> list[float]:
        return [0.0, *column_values(rows, "end")]

    for panel, number, (name, total), rows in _rows(
        panels, frame, ["row", "total"], chart.x, span, own=chart.own_scales
    ):
        panel.rows.append((name, f" {total / chart.x.factor:.3g} {chart.x.unit}".rstrip()))
        for part, begin, end in rows.select("part", "begin", "end").iter_rows():
            panel.strokes.append((chart.parts[part].character, chart.parts[part].colour, [begin, end], [number] * 2))
    key = [(f"{chart.parts[name].character * 2} {name}", chart.parts[name].colour) for name in chart.used_parts(frame)]
    return panels, key


def _draw_actions(chart: charts.GanttChart, frame: pl.DataFrame, _: str) -> tuple[list[_Panel], Key]:
    panels: list[_Panel] = []
    for panel, number, (source, rank), rows in _rows(panels, frame, ["source", "rank"], _UNNAMED, lambda _: [0.0]):
        panel.x, panel.x_span = chart.axes[panel.title], [*panel.x_span, *column_values(rows, "end_s")]
        panel.rows.append((f"{source} rank {rank}", ""))
        for name, kind, begin, end in rows["name", "kind", "begin_s", "end_s"].iter_rows():
            colour = charts.ACTION_STYLES.get(kind, charts.OTHER_ACTION).colour
            panel.strokes.append((".", colour, [begin, end], [number] * 2))
            panel.labels.append((name, colour, begin, end, number))
    used = [(f"{kind} {one.title}", one.colour) for kind, one in charts.ACTION_STYLES.items() if kind in frame["kind"]]
    return panels, [*used, ("and its micro-batch", "")]


def _draw_heat(chart: charts.HeatChart, frame: pl.DataFrame, _: str) -> tuple[list[_Panel], Key]:
    """A row's name and its values, in the order of the rows."""
    names = sorted({*frame["row"], *frame["column"]})
    panels: list[_Panel] = []
    axis = PlotAxis(f"to the same nodes from left to right, {chart.value.heading}")
    for panel, number, (name,), rows in _rows(panels, frame, ["row"], axis, lambda _: [0.0, float(len(names))]):
        panel.rows.append((name, ""))
        for column, value in rows.select("column", "value").iter_rows():
            place = float(names.index(column))
            panel.labels.append((f"{value / chart.value.factor:.3g}", "", place, place + 1, number))
    return panels, []


_DRAW: dict[type, Callable[[Any, pl.DataFrame, str], tuple[list[_Panel], Key]]] = {
    charts.LineChart: _draw_lines, charts.BarChart: _draw_bars, charts.BoxChart: _draw_boxes,
    charts.StackedBarChart: _draw_stacks, charts.GanttChart: _draw_actions,
    charts.HeatChart: _draw_heat,
}  # fmt: skip


def print_plot(plot: Plot, console: Console) -> None:
    """Print ``plot`` as wide as the terminal, up to ``_MAX_WIDTH``; in ASCII where its encoding is no UTF."""
    width, is_ascii = max(_MIN_WIDTH, min(console.width, _MAX_WIDTH)), console.options.ascii_only

    def shown(text: str, style: str = "", make: Callable[..., Text] = Text) -> Text:
        plain = text.translate(_IN_ASCII).encode("ascii", "replace").decode() if is_ascii else text
        return make(plain, style=style)

    console.print(shown(plot.title, "bold"), *[shown(plot.subtitle, "dim")] * bool(plot.subtitle), sep="\n")
    if plot.drawing is None or plot.frame is None:
        console.print(shown(f"nothing to draw: {plot.nothing}"))
    else:
        panels, key = _DRAW[type(plot.drawing)](plot.drawing, plot.frame, _MARKS_IN_ASCII if is_ascii else "")
        for panel in panels:
            console.print(shown(f"\n{panel.title}" if len(panels) > 1 else "", "bold"))
            canvas, under = shown(panel.draw(width), make=Text.from_ansi), shown(panel.x.heading.rjust(width), "dim")
            console.print(*[shown(panel.y.heading)] * bool(panel.y.title), canvas, under, sep="\n")
        key += [(f"{mark.character} {mark.meaning}", "") for mark in plot.drawing.marks(plot.frame) if mark.character]
        entries = [shown(text, colour if _rgb(colour) else "") for text, colour in key]
        console.print("", Columns(entries, padding=(0, 3)), "")
    for note in plot.notes:
        console.print(shown(note))
