"""Spreads, one for each configuration: a box of the middle half, whiskers, and the single figures on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hpcbench.report.plots import theme
from hpcbench.report.plots.grid import cut, flowed, tick_line
from hpcbench.report.plots.rows import margin, row_axis, row_panels
from hpcbench.report.plots.scales import Axis, figures

if TYPE_CHECKING:
    import polars

_NUMBERS = ("low", "quarter", "median", "three_quarters", "high", "value")
COLUMNS = ("panel", "series", "row", "role", *_NUMBERS, "note")
BOX, DOT, LOST = "box", "dot", "lost"
"""A row's summary, one of its figures (``value``), or a row that has none but a ``note`` why."""
MOST_DOTS = 40
"""Figures drawn of a row: more are thinned evenly by size, the ends kept."""
_WIDTH = 480


def summary(values: Sequence[float], ends: tuple[float, float] = (0.0, 1.0)) -> dict[str, float]:
    """``low`` and ``high`` at the shares ``ends``, ``quarter``, ``median`` and ``three_quarters`` of ``values``."""
    ordered = sorted(values)
    shares = (ends[0], 0.25, 0.5, 0.75, ends[1])
    return dict(zip(_NUMBERS, (_at(ordered, share) for share in shares), strict=False))


def _at(ordered: Sequence[float], share: float) -> float:
    """Linear between the figures, as NumPy's and polars' quantiles are."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def thinned(values: Sequence[float], most: int = MOST_DOTS) -> list[float]:
    """At most ``most`` of ``values``, evenly by size."""
    ordered = sorted(values)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / (most - 1))] for place in range(most)]


def table(rows: list[dict[str, Any]]) -> polars.DataFrame:
    """``rows`` as ``COLUMNS``; what they lack is null."""
    import polars as pl

    schema = {name: pl.Float64 if name in _NUMBERS else pl.String for name in COLUMNS}
    return pl.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows], schema=schema)


@dataclass(frozen=True)
class Boxes:
    """Rows of ``COLUMNS``."""

    x: Axis
    whiskers: str
    """Where they end."""
    bars: bool = False
    """Bars from zero to the most rather than boxes, for what adds up from nothing."""

    def vega(self, frame: polars.DataFrame) -> dict[str, Any]:
        """As ``Drawing``."""
        values = []
        for row in frame.iter_rows(named=True):
            shown = {name: self.x.shown(row[name]) for name in _NUMBERS}
            values.append({name: value for name, value in {**row, **shown}.items() if value is not None})
        roles = set(frame["role"].to_list())
        layers = [layer for role, layer in self._layers(frame) if role in roles]
        unit = {"layer": layers, "encoding": {"y": row_axis(frame["row"].to_list())}}
        return row_panels(values, unit, frame["panel"].unique(maintain_order=True).to_list(), _WIDTH)

    def _layers(self, frame: polars.DataFrame) -> list[tuple[str, dict[str, Any]]]:
        """Each with the role that it is for, the lowest first."""
        known = theme.styles(frame["series"].unique(maintain_order=True).to_list())
        scale = {"domain": list(known), "range": [style.colour for style in known.values()]}
        colour = {"field": "series", "type": "nominal", "legend": None, "scale": scale}
        told = [
            {"field": name, "type": "quantitative", "title": name.replace("_", " "), "format": "~g"}
            for name in _NUMBERS[:5]
        ]
        tooltip = [{"field": "row", "type": "nominal", "title": "run"}, *told]
        body = {"type": "bar", "height": {"band": 0.6}, "fillOpacity": 0.3, "strokeWidth": 1.5}
        line, middle, dot = (
            {"type": kind, "aria": False, **more}
            for kind, more in (
                ("rule", {}), ("tick", {"thickness": 3, "height": {"band": 0.75}}),
                ("tick", {"thickness": 1, "opacity": 0.7, "height": {"band": 0.35}, "color": "#000000"}),
            )
        )  # fmt: skip
        filled = {"color": colour, "stroke": colour, "tooltip": tooltip}
        dots = _of(DOT, dot, {"x": self._x("value")})
        words = {"text": {"field": "note", "type": "nominal"}, "color": {"value": "#000000"}}
        lost = _of(LOST, {"type": "text", "align": "left", "fontSize": 12, "x": 4}, words)
        if self.bars:
            return [
                (BOX, _of(BOX, body, {"x": self._x("high"), "x2": {"datum": 0}, **filled})),
                (DOT, dots),
                (LOST, lost),
            ]
        box = {"x": self._x("quarter"), "x2": {"field": "three_quarters"}, **filled}
        whiskers = {"x": self._x("low"), "x2": {"field": "high"}, "color": colour}
        return [
            (BOX, _of(BOX, line, whiskers)), (BOX, _of(BOX, body, box)), (DOT, dots),
            (BOX, _of(BOX, middle, {"x": self._x("median"), "color": colour})), (LOST, lost),
        ]  # fmt: skip

    def _x(self, field: str) -> dict[str, Any]:
        scale = {"zero": self.bars}
        return {"field": field, "type": "quantitative", "title": self.x.heading, "scale": scale}

    def text(self, frame: polars.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """As ``Drawing``."""
        left = margin(frame["row"].to_list(), width)
        cells = max(8, width - left - 1)
        ends = [value / self.x.factor for name in _NUMBERS for value in figures(frame, name)]
        low, high = (min([0.0, *ends]) if self.bars or not ends else min(ends)), max(ends, default=1.0)
        high = high if high > low else low + (abs(low) or 1.0)
        known = theme.styles(frame["series"].unique(maintain_order=True).to_list())
        lines: list[Text] = []
        last: object = None
        for (panel, row), inside in frame.group_by(["panel", "row"], maintain_order=True):
            if panel and panel != last:
                lines += [Text(""), cut(str(panel), width, "bold")]
            last = panel
            line = cut(str(row), left)
            line.pad_right(left + 1 - line.cell_len)
            lines.append(line.append_text(self._drawn(inside, (low, high), cells, known, plain=plain)))
        axis, labels = tick_line(low, high, cells, plain=plain)
        blank = " " * (left + 1)
        lines += [Text(blank + axis, style="dim"), Text(blank + labels, style="dim")]
        lines.append(cut(self.x.heading.rjust(left + 1 + cells), width, "dim"))
        box, rule, median = _CHARACTERS[plain]
        key = [f"{box} middle half", f"{median} median", f"{rule} {self.whiskers}"]
        if self.bars:
            key = [f"{_BAR[plain]} up to the least", f"{box} {self.whiskers}"]
        return [*lines, Text(""), *flowed([Text(one) for one in key], width)]

    def _drawn(
        self, inside: polars.DataFrame, ends: tuple[float, float], cells: int, known: dict[str, theme.Style], *,
        plain: bool,
    ) -> Text:  # fmt: skip
        """One row: whiskers, over them the box, over that the median."""
        lost = inside.filter(inside["role"] == LOST)
        if len(lost):
            return cut(str(lost["note"][0]), cells)
        box, rule, median = _CHARACTERS[plain]
        line = [" "] * cells

        def place(value: float) -> int:
            return round((value / self.x.factor - ends[0]) / (ends[1] - ends[0]) * (cells - 1))

        one = inside.filter(inside["role"] == BOX).row(0, named=True)
        style = theme.terminal_colour(known[one["series"]].colour)
        if self.bars:
            least = place(one["low"]) + 1
            return Text(_BAR[plain] * least + box * (place(one["high"]) + 1 - least), style=style)
        for start, end, character in (("low", "high", rule), ("quarter", "three_quarters", box)):
            for cell in range(place(one[start]), place(one[end]) + 1):
                line[cell] = character
        line[place(one["median"])] = median
        return Text("".join(line).rstrip(), style=style)


_CHARACTERS = {False: ("▒", "─", "█"), True: ("=", "-", "|")}
"""The box, the whiskers, the median."""
_BAR = {False: "█", True: "#"}


def _of(role: str, mark: dict[str, Any], encoding: dict[str, Any]) -> dict[str, Any]:
    return {"transform": [{"filter": {"field": "role", "equal": role}}], "mark": mark, "encoding": encoding}


def medians(frame: polars.DataFrame) -> list[tuple[str, float]]:
    """Rows' names, with their panel where they have one, and medians."""
    rows = frame.filter(frame["role"] == BOX)["panel", "row", "median"].iter_rows()
    return [(f"{panel}, {row}" if panel else row, value) for panel, row, value in rows]
