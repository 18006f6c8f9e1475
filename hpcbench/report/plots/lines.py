"""Points over a number, joined to lines: throughput, efficiency and step time over devices, and what was predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcbench.report.plots import theme
from hpcbench.report.plots.grid import MOST_VALUES, grid_text
from hpcbench.report.plots.panels import facets
from hpcbench.report.plots.scales import Axis, figures, log_ticks

if TYPE_CHECKING:
    import polars
    from rich.text import Text

_NUMBERS = ("x", "y", "low", "high")
COLUMNS = ("panel", "series", "role", *_NUMBERS, "label", "launches")
MEASURED, PREDICTED, IDEAL, CROSSING, BAND = "measured", "predicted", "ideal", "crossing", "band"
"""What a row is. An ideal is a thin line, a crossing a ring where two lines meet, a band the space around an ideal."""
_WIDTH, _HEIGHT = 560, 340
_SMALL = 24
"""Area of the points that tell predicted lines apart in print."""


@dataclass(frozen=True)
class Lines:
    """Rows of ``COLUMNS``; ``low`` and ``high`` are whiskers of what was measured, a band of what was predicted."""

    x: Axis
    y: Axis
    joined: bool = True
    """Whether lines join what was measured; where something is predicted they join that."""
    from_zero: bool = True
    legend: str = "strategy"
    ideal: str = "ideal"
    """What a thin line is."""

    def vega(self, frame: polars.DataFrame) -> dict[str, Any]:
        """As ``Drawing``."""
        roles = set(frame["role"])
        known = theme.styles(
            frame.filter(frame["role"].is_in([MEASURED, PREDICTED]))["series"].unique(maintain_order=True).to_list()
        )
        layers = []
        if BAND in roles:
            layers.append(_of(BAND, {"type": "area", "color": theme.LIGHT, "opacity": 0.5}, self._ends(), plain=True))
        if IDEAL in roles:
            mark = {"type": "line", "color": theme.GREY, "strokeWidth": 1.2, "strokeDash": [3, 3]}
            layers.append(_of(IDEAL, mark, {"detail": {"field": "series"}}, plain=True))
        if PREDICTED in roles:
            band = {"type": "area", "opacity": 0.15}
            small = {"type": "point", "filled": True, "size": _SMALL}
            layers += [
                _of(PREDICTED, band, self._ends()), _of(PREDICTED, {"type": "line"}, _dashed(known)),
                _of(PREDICTED, small, {"shape": _scaled("shape", known)}),
            ]  # fmt: skip
        elif self.joined:
            layers.append(_of(MEASURED, {"type": "line"}, _dashed(known)))
        layers.append(_of(MEASURED, {"type": "rule", "strokeWidth": 1.5}, self._ends()))
        layers.append(_of(MEASURED, {"type": "point", "filled": True}, {"shape": _scaled("shape", known)}))
        if CROSSING in roles:
            ring = {"type": "point", "shape": "circle", "size": 260, "filled": False, "color": "#000000"}
            layers.append(_of(CROSSING, ring, {}, plain=True))
        for layer in layers:
            layer["encoding"].setdefault("y", self._y(frame))
            if "color" not in layer["encoding"]:
                layer["encoding"]["color"] = _scaled("color", known, self.legend)
        unit = {
            "layer": layers, "encoding": {"x": self._x(frame), "tooltip": self._tooltip()},
            "resolve": {"legend": {"strokeDash": "independent"}},
        }  # fmt: skip
        return facets(self._values(frame), unit, frame["panel"].unique(maintain_order=True).to_list(), _WIDTH, _HEIGHT)

    def text(self, frame: polars.DataFrame, width: int, *, plain: bool) -> list[Text]:
        """As ``Drawing``."""
        return grid_text(self, frame, width, plain=plain)

    def _values(self, frame: polars.DataFrame) -> list[dict[str, Any]]:
        rows = []
        for row in frame.iter_rows(named=True):
            shown = {name: self.y.shown(row[name]) for name in ("y", "low", "high")}
            rows.append(
                {
                    name: value
                    for name, value in {**row, **shown, "x": self.x.shown(row["x"])}.items()
                    if value is not None
                }
            )
        return rows

    def _x(self, frame: polars.DataFrame) -> dict[str, Any]:
        given: dict[str, Any] = {"field": "x", "type": "quantitative", "title": self.x.heading}
        values = sorted({value / self.x.factor for value in figures(frame.filter(frame["role"] != CROSSING), "x")})
        whole = all(value == int(value) for value in values)
        scale: dict[str, Any] = {"padding": 14, "nice": False, "zero": False}
        if self.x.log:
            scale = {"type": "log", "base": self.x.log, "padding": 14, "nice": False}
        if whole and len(values) <= MOST_VALUES:
            return {**given, "scale": scale, "axis": {"values": values, "format": "d"}}
        marks = {"values": log_ticks(values[0], values[-1])} if self.x.log else {}
        return {**given, "scale": scale, "axis": {**marks, "format": "~g"}}

    def _y(self, frame: polars.DataFrame) -> dict[str, Any]:
        given: dict[str, Any] = {"field": "y", "type": "quantitative", "title": self.y.heading}
        if not self.y.log:
            return {**given, "scale": {"zero": self.from_zero}}
        known = [value for name in ("y", "low", "high") for value in figures(frame, name) if value > 0]
        marks = log_ticks(min(known) / self.y.factor, max(known) / self.y.factor)
        scale = {"type": "log", "padding": 10, "nice": False}
        return {**given, "scale": scale, "axis": {"values": marks, "format": "~g"}}

    def _ends(self) -> dict[str, Any]:
        return {"y": {"field": "low", "type": "quantitative", "title": self.y.heading}, "y2": {"field": "high"}}

    def _tooltip(self) -> list[dict[str, Any]]:
        named = [("label", "run"), ("role", "")]
        numbers = [("x", self.x.heading), ("y", self.y.heading), ("low", "low"), ("high", "high")]
        return [
            *({"field": field, "type": "nominal", "title": title or field} for field, title in named),
            *({"field": field, "type": "quantitative", "title": title, "format": "~g"} for field, title in numbers),
            {"field": "launches", "type": "quantitative", "title": "launches"},
        ]


def rows_for(rows: polars.DataFrame, role: str) -> polars.DataFrame:
    """``rows`` with ``panel``, ``x`` and ``y`` at least, as ``COLUMNS``; what they lack is null, a name the role's."""
    import polars as pl

    lacking = [
        pl.lit(role).alias(name) if name in ("series", "label") else pl.lit(None).alias(name)
        for name in COLUMNS
        if name not in (*rows.columns, "role")
    ]
    return rows.with_columns(*lacking, pl.lit(role).alias("role")).select(
        *(
            pl.col(name).cast(pl.Float64 if name in _NUMBERS else pl.Int64 if name == "launches" else pl.String)
            for name in COLUMNS
        )
    )


def _of(role: str, mark: dict[str, Any], encoding: dict[str, Any], *, plain: bool = False) -> dict[str, Any]:
    """A layer of the rows of one role; ``plain`` ones have no series' colour."""
    layer: dict[str, Any] = {
        "transform": [{"filter": {"field": "role", "equal": role}}],
        "mark": mark,
        "encoding": {**encoding},
    }
    if plain:
        layer["encoding"]["color"] = {"value": mark["color"]}
    return layer


def _scaled(channel: str, known: dict[str, theme.Style], legend: str = "strategy") -> dict[str, Any]:
    place = {"color": 0, "shape": 1, "strokeDash": 3}[channel]
    scale = {"domain": list(known), "range": [style[place] for style in known.values()]}
    return {"field": "series", "type": "nominal", "title": legend, "scale": scale, "sort": None}


def _dashed(known: dict[str, theme.Style]) -> dict[str, Any]:
    # The legend shows the shape; dashes around a small symbol would only spoil it.
    return {"strokeDash": {**_scaled("strokeDash", known), "legend": None}}
