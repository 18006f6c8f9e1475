"""Styles of series (colours, shapes, dashes that stay distinguishable in print) and of axes (units, ticks).

The colours are those of Okabe and Ito (2008), "Color Universal Design", without yellow (illegible on white)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import polars as pl

from hpcbench.strategies.catalog import STRATEGIES

BLACK, BLUE, VERMILLION, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
PURPLE, SKY, ORANGE = "#CC79A7", "#56B4E9", "#E69F00"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
GREY, LIGHT_GREY, WHITE = "#6B6B6B", "#D9D9D9", "#FFFFFF"

_STAR = ((0, -1), (0.26, -0.36), (0.95, -0.31), (0.42, 0.14), (0.59, 0.81), (0, 0.44), (-0.59, 0.81), (-0.42, 0.14),
         (-0.95, -0.31), (-0.26, -0.36))  # fmt: skip
_CROSS = ((-0.3, -0.9), (0.3, -0.9), (0.3, -0.3), (0.9, -0.3), (0.9, 0.3), (0.3, 0.3), (0.3, 0.9), (-0.3, 0.9),
          (-0.3, 0.3), (-0.9, 0.3), (-0.9, -0.3), (-0.3, -0.3))  # fmt: skip
_SHAPES: dict[str, tuple[Sequence[tuple[float, float]], str, str]] = {
    "circle": ([(math.sin(n * math.pi / 12), -math.cos(n * math.pi / 12)) for n in range(24)], "●", "○"),
    "square": (((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)), "■", "□"),
    "up": (((0, -1), (1, 0.8), (-1, 0.8)), "▲", "△"), "down": (((0, 1), (-1, -0.8), (1, -0.8)), "▼", "▽"),
    "left": (((-1, 0), (0.8, -1), (0.8, 1)), "◀", "◁"), "right": (((1, 0), (-0.8, 1), (-0.8, -1)), "▶", "▷"),
    "diamond": (((0, -1.1), (0.9, 0), (0, 1.1), (-0.9, 0)), "◆", "◇"), "cross": (_CROSS, "✚", "╬"),
    "star": (_STAR, "★", "☆"),
}  # fmt: skip
"""The outline of each, clockwise, and its character in a terminal, filled and hollow."""
_VEGA_SHAPES = {
    **{name: name for name in ("circle", "square", "diamond", "cross")},
    **{name: f"triangle-{name}" for name in ("up", "down", "left", "right")},
}
"""Names of shapes that Vega draws itself, filled."""
_DASHES: dict[str, list[float]] = {
    "solid": [1, 0], "long": [9, 3], "short": [4, 2.5], "dots": [1.5, 2.5], "dash-dot": [9, 2.5, 2, 2.5],
}  # fmt: skip


class SeriesStyle(NamedTuple):
    """The colour, shape and dash of a series, equal in all plots."""

    colour: str
    shape: str
    """Vega's name of the shape, or its SVG path."""
    character: str
    dash: list[float]


def _make_style(colour: str, shape: str, dash: str, *, hollow: bool = False) -> SeriesStyle:
    outline, filled, empty = _SHAPES[shape]
    if not hollow:
        return SeriesStyle(colour, _VEGA_SHAPES.get(shape) or _svg_path(outline), filled, _DASHES[dash])
    # The other way round within: what both enclose is left out.
    inner = [(x * _HOLLOW_RATIO, y * _HOLLOW_RATIO) for x, y in reversed(outline)]
    return SeriesStyle(colour, _svg_path(outline) + _svg_path(inner), empty, _DASHES[dash])


_HOLLOW_RATIO = 0.6


def _svg_path(outline: Sequence[tuple[float, float]]) -> str:
    return f"M{'L'.join(f'{x:.3g},{y:.3g}' for x, y in outline)}Z"


def _strategy_style_parts() -> dict[str, tuple[str, str, str]]:
    """Colour, shape and dash of each strategy by its place in the registry.

    Dashes skip two places after every six strategies: those of a family differ in each of the three.
    """
    shapes, dashes = list(_SHAPES), list(_DASHES)
    return {
        key: (
            COLOURS[place % len(COLOURS)],
            shapes[place % len(shapes)],
            dashes[(place + 2 * (place // 6)) % len(dashes)],
        )
        for place, key in enumerate(STRATEGIES)
    }


_STRATEGY_STYLE_PARTS = _strategy_style_parts()
STRATEGY_STYLES = {name: _make_style(*parts) for name, parts in _STRATEGY_STYLE_PARTS.items()}
"""Colour, shape and dash of a strategy, the same in every plot; the shape of a hybrid is hollow."""
_DEGREE_NAMES = frozenset({"dp", "tp", "sp", "pp"})
_STRATEGY_STYLE_KEYS = {style[:3] for style in STRATEGY_STYLES.values()}
_FREE_STYLES = [
    style
    for turn, dash in enumerate(_DASHES)
    for place, colour in enumerate(COLOURS)
    if (style := _make_style(colour, tuple(_SHAPES)[(place + turn) % len(_SHAPES)], dash))[:3]
    not in _STRATEGY_STYLE_KEYS
]


def series_styles(series: Sequence[str]) -> dict[str, SeriesStyle]:
    """The style of each of ``series``: a strategy's own, a hybrid's, for anything else the first that is free.

    Strategies come first, in their order here, the others as they are given.
    """
    styles = {name: style for name, style in STRATEGY_STYLES.items() if name in series}
    for name in [name for name in series if name not in styles]:
        used = list(styles.values())
        hybrid = _hybrid_style(name)
        free = [style for style in _FREE_STYLES if style not in used] or _FREE_STYLES
        styles[name] = hybrid if hybrid and hybrid not in used else free[0]
    return styles


def _hybrid_style(name: str) -> SeriesStyle | None:
    """The style of ``filter dp tp``: the strategy's, hollow."""
    base, *degrees = name.split(" ")
    if base not in _STRATEGY_STYLE_PARTS or not degrees or not _DEGREE_NAMES.issuperset(degrees):
        return None
    colour, shape, dash = _STRATEGY_STYLE_PARTS[base]
    return _make_style(colour, shape, "dots" if len(degrees) > 2 else dash, hollow=True)


_UNITS: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "B": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "J": ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ")),
    "/s": ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")),
    "%": ((0.01, "%"),),
    "": ((1.0, ""),),
}
_MIN_LOG_RATIO = 5.0
"""An axis whose largest figure is so many times its smallest is logarithmic, where the other one is."""


class PlotAxis(NamedTuple):
    """``factor`` SI units are one of the axis's unit; ``log`` is the base of its logarithm or 0."""

    title: str
    factor: float = 1.0
    unit: str = ""
    log: int = 0

    def shown(self, value: float | None) -> float | None:
        """Return ``value`` in the axis's unit with five digits; ``None`` for ``None``, infinity and NaN."""
        return None if value is None or not math.isfinite(value) else float(f"{value / self.factor:.5g}")

    @property
    def heading(self) -> str:
        """``step time (ms)``."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def make_axis(title: str, kind: str, values: Iterable[float | None], *, log: bool = False) -> PlotAxis:
    """An axis for ``values`` of ``kind`` (a key of ``_UNITS``): the largest unit that one of them reaches.

    ``title`` may hold ``{}`` where the unit belongs (``{}samples/s``). ``log`` where they are spread widely.
    """
    positive = sorted(value for value in values if value is not None and math.isfinite(value) and value > 0)
    most = positive[-1] if positive else 1.0
    factor, unit = next((entry for entry in _UNITS[kind] if most >= entry[0]), _UNITS[kind][-1])
    base = 10 if log and positive and positive[-1] / positive[0] >= _MIN_LOG_RATIO else 0
    if "{}" in title:
        return PlotAxis(title.format(f"{unit} " if unit else ""), factor, "", base)
    return PlotAxis(title, factor, unit, base)


def parameter_axis(title: str, values: Iterable[float]) -> PlotAxis:
    """An axis of a parameter, such as the number of devices: logarithmic where its values double."""
    distinct = sorted(set(values))
    doubles = len(distinct) > 1 and distinct[0] > 0 and distinct[-1] / distinct[0] >= 4
    return PlotAxis(title, log=2 if doubles else 0)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most ``most`` of them, 1, 2, 2.5 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= rough * 0.999999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """1, 2 and 5 times powers of ten from ``low`` to ``high``; fewer of them where that is too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{part}e{power}") for power in powers for part in parts]
        inside = [tick for tick in ticks if low * 0.999999 <= tick <= high * 1.000001]
        if len(inside) <= most:
            return inside or [low]
    return inside[:: math.ceil(len(inside) / most)]


def column_values(frame: pl.DataFrame, column: str) -> list[float]:
    """The numbers in ``column`` that are there."""
    return [float(value) for value in frame[column].drop_nulls().to_list()]


def format_tick(value: float) -> str:
    """A tick's label: as few digits as it takes."""
    return f"{value:,.10g}" if abs(value) < 1e6 else f"{value:.3g}"
