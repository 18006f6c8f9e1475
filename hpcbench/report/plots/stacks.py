"""Bars of parts that add up, one for each configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from hpcbench.report.plots import theme
from hpcbench.report.plots.grid import cut, flowed
from hpcbench.report.plots.rows import margin, row_axis, row_panels
from hpcbench.report.plots.scales import Axis, figures

if TYPE_CHECKING:
    import polars

COLUMNS = ("panel", "series", "row", "part", "value", "begin", "end", "total", "label")
_WIDTH = 480
_READABLE = 0.07
"""A part of this share of the longest bar has room for its share of its own."""


class Part(NamedTuple):
    """One part: its colour, the text on it, and its characters in a terminal (any, or ASCII alone)."""

    colour: str
    ink: str
    character: str
    plain: str


@dataclass(frozen=True)
class Stacks:
    """Rows of ``COLUMNS``: a part from ``begin`` to ``end``; ``total`` is what they should add up to, a mark."""

    x: Axis
    parts: dict[str, Part]
    """In the order in which they are stacked."""
    total: str
    """What the mark is."""

    def vega(self, frame: polars.DataFrame) -> dict[str, Any]:
        """As ``Drawing``."""
        used = self._used(frame)
        longest = max(figures(frame, "end"))
        ends = {(panel, row): end for panel, row, end in frame["panel", "row", "end"].iter_rows()}
        values = [
            {
                **{name: row[name] for name in ("panel", "row", "part", "label")},
                **{name: self.x.shown(row[name]) for name in ("value", "begin", "end", "total")},
                "ink": self.parts[row["part"]].ink,
                "middle": self.x.shown((row["begin"] + row["end"]) / 2),
                "share": f"{row['value'] / ends[row['panel'], row['row']]:.0%}"
                if row["value"] >= _READABLE * longest
                else "",
            }
            for row in frame.iter_rows(named=True)
        ]
        colour = {"domain": used, "range": [self.parts[name].colour for name in used]}
        tooltip = [
            *({"field": name, "type": "nominal", "title": name} for name in ("row", "part", "share")),
            {"field": "value", "type": "quantitative", "title": self.x.heading, "format": "~g"},
            {"field": "total", "type": "quantitative", "title": self.total, "format": "~g"},
        ]
        x = {"type": "quantitative", "title": self.x.heading}
        part = {"field": "part", "type": "nominal", "title": None}
        layers: list[dict[str, Any]] = [
            {"mark": {"type": "bar", "stroke": "#000000", "strokeWidth": 0.6, "height": {"band": 0.72}},
             "encoding": {"x": {"field": "begin", **x}, "x2": {"field": "end"}, "tooltip": tooltip,
                          "color": {**part, "scale": colour}}},
            {"mark": {"type": "text", "fontSize": 11, "aria": False},
             "encoding": {"x": {"field": "middle", **x}, "text": {"field": "share", "type": "nominal"},
                          "fill": {"field": "ink", "type": "nominal", "scale": None}}},
            {"mark": {"type": "tick", "thickness": 2.5, "color": "#000000", "height": {"band": 1}, "aria": False},
             "encoding": {"x": {"field": "total", **x}}},
        ]  # fmt: skip
        unit = {"layer": layers, "encoding": {"y": row_axis(frame["row"].to_list())}}
        return row_panels(values, unit, frame["panel"].unique(maintain_order=True).to_list(), _WIDTH)

    def text(self, frame: polars.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """As ``Drawing``."""
        names = frame["row"].unique(maintain_order=True).to_list()
        left = margin(names, width)
        totals = {value: _amount(self.x, value) for value in figures(frame, "total")}
        right = max(map(len, totals.values())) + 1
        cells = max(6, width - left - right - 1)
        longest = max(figures(frame, "end"))
        lines: list[Text] = []
        last: object = None
        for (panel, row), parts in frame.group_by(["panel", "row"], maintain_order=True):
            if panel and panel != last:
                lines += [Text(""), cut(str(panel), width, "bold")]
            last = panel
            line = cut(str(row), left)
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
            if name in self._used(frame)
        ]
        return [*lines, Text(""), *flowed([*entries, Text(f"at the end: {self.total}")], width)]

    def _used(self, frame: polars.DataFrame) -> list[str]:
        there = set(frame["part"].to_list())
        return [name for name in self.parts if name in there]


def _amount(axis: Axis, value: float) -> str:
    return f"{value / axis.factor:.3g} {axis.unit}".rstrip()
