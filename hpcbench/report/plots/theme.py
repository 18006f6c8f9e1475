"""Colours, shapes and dashes: told apart by people who see no red or green, and in print without any colour.

The colours are those of Okabe and Ito (2008), "Color Universal Design", without the yellow that white paper swallows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

BLACK, BLUE, VERMILLION, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
PURPLE, SKY, ORANGE = "#CC79A7", "#56B4E9", "#E69F00"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
GREY, LIGHT = "#6B6B6B", "#D9D9D9"

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
_VEGA = {
    **{name: name for name in ("circle", "square", "diamond", "cross")},
    **{name: f"triangle-{name}" for name in ("up", "down", "left", "right")},
}
"""Names of shapes that Vega draws itself, filled."""
_DASHES: dict[str, list[float]] = {
    "solid": [1, 0], "long": [9, 3], "short": [4, 2.5], "dots": [1.5, 2.5], "dash-dot": [9, 2.5, 2, 2.5],
}  # fmt: skip


class Style(NamedTuple):
    """How a series is drawn, wherever it is."""

    colour: str
    shape: str
    """As Vega calls it."""
    character: str
    dash: list[float]


def _style(colour: str, shape: str, dash: str, *, hollow: bool = False) -> Style:
    outline, filled, empty = _SHAPES[shape]
    if not hollow:
        return Style(colour, _VEGA.get(shape) or _path(outline), filled, _DASHES[dash])
    # The other way round within: what both enclose is left out.
    inner = [(x * _HOLE, y * _HOLE) for x, y in reversed(outline)]
    return Style(colour, _path(outline) + _path(inner), empty, _DASHES[dash])


_HOLE = 0.6


def _path(outline: Sequence[tuple[float, float]]) -> str:
    return f"M{'L'.join(f'{x:.3g},{y:.3g}' for x, y in outline)}Z"


_STRATEGIES = {
    "single": (BLACK, "star", "solid"),
    "ddp": (BLUE, "circle", "solid"),
    "horovod": (VERMILLION, "square", "short"),
    "zero1": (GREEN, "up", "long"),
    "fsdp": (PURPLE, "diamond", "dash-dot"),
    "fairscale_oss": (ORANGE, "down", "dots"),
    "fairscale_sddp": (SKY, "left", "short"),
    "fairscale_fsdp": (BLACK, "diamond", "short"),
    "filter": (ORANGE, "up", "solid"),
    "channel": (SKY, "down", "long"),
    "spatial": (GREEN, "square", "dash-dot"),
    "tensor": (VERMILLION, "right", "short"),
    "model": (BLACK, "square", "dots"),
    "gpipe": (ORANGE, "right", "long"),
    "fairscale_pipe": (SKY, "circle", "dots"),
    "1f1b": (VERMILLION, "left", "solid"),
    "interleaved_1f1b": (PURPLE, "up", "short"),
    "zero_bubble": (GREEN, "cross", "dash-dot"),
    "pipedream": (BLUE, "star", "dots"),
}
STRATEGIES = {name: _style(*parts) for name, parts in _STRATEGIES.items()}
"""The same colour, shape and dash for a strategy in every plot; of a hybrid the shape is hollow."""
_DEGREES = frozenset({"dp", "tp", "sp", "pp"})
_OWN = {style[:3] for style in STRATEGIES.values()}
_OTHERS = [
    style
    for turn, dash in enumerate(_DASHES)
    for place, colour in enumerate(COLOURS)
    if (style := _style(colour, tuple(_SHAPES)[(place + turn) % len(_SHAPES)], dash))[:3] not in _OWN
]


def styles(series: Sequence[str]) -> dict[str, Style]:
    """The style of each of ``series``: a strategy's own, a hybrid's, for anything else the first that is free.

    Strategies come first, in their order here, the others as they are given.
    """
    found = {name: style for name, style in STRATEGIES.items() if name in series}
    rest = [name for name in series if name not in found]
    for name in rest:
        taken = list(found.values())
        hybrid = _hybrid(name)
        free = [style for style in _OTHERS if style not in taken] or _OTHERS
        found[name] = hybrid if hybrid and hybrid not in taken else free[0]
    return found


def _hybrid(name: str) -> Style | None:
    """The style of ``filter dp tp``: the strategy's, hollow."""
    base, *degrees = name.split(" ")
    if base not in _STRATEGIES or not degrees or not _DEGREES.issuperset(degrees):
        return None
    colour, shape, dash = _STRATEGIES[base]
    return _style(colour, shape, "dots" if len(degrees) > 2 else dash, hollow=True)


def terminal_colour(colour: str) -> str:
    """A style for rich: what is as dark or as light as a terminal's ground is left to the terminal."""
    return "" if colour in (BLACK, LIGHT, "#FFFFFF") else colour


def config() -> dict[str, Any]:
    """Vega-Lite's ``config``: type that can be read in a column of a paper, few lines, text never cut short unseen."""
    return {
        "background": "#FFFFFF", "font": "sans-serif", "view": {"stroke": None},
        "axis": {
            "labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal", "gridColor": "#E5E5E5",
            "domainColor": GREY, "tickColor": GREY, "labelColor": "#222222", "titleColor": "#222222",
            "labelLimit": 320, "titlePadding": 8,
        },
        "legend": {
            "labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal", "symbolSize": 110,
            "symbolStrokeWidth": 2, "symbolOpacity": 1, "labelLimit": 320, "labelColor": "#222222",
            "titleColor": "#222222",
        },
        "header": {"labelFontSize": 12, "labelFontWeight": "bold", "labelLimit": 380, "title": None},
        "title": {
            "fontSize": 15, "subtitleFontSize": 12, "anchor": "start", "offset": 12, "subtitleColor": "#444444",
            "limit": 900,
        },
        "line": {"strokeWidth": 2}, "point": {"size": 85, "opacity": 1},
    }  # fmt: skip
