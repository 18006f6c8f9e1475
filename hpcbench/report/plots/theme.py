"""Colours, shapes and dashes: told apart by people who see no red or green, and in print without any colour.

The colours are those of Okabe and Ito (2008), "Color Universal Design", without the yellow that white paper swallows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

BLACK, BLUE, VERMILLION, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
PURPLE, SKY, ORANGE = "#CC79A7", "#56B4E9", "#E69F00"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
GREY, LIGHT = "#6B6B6B", "#D9D9D9"

_STAR = "M0,-1L.26,-.36L.95,-.31L.42,.14L.59,.81L0,.44L-.59,.81L-.42,.14L-.95,-.31L-.26,-.36Z"
_SHAPES = {
    "circle": ("circle", "●"), "square": ("square", "■"), "up": ("triangle-up", "▲"), "diamond": ("diamond", "◆"),
    "cross": ("cross", "✚"), "down": ("triangle-down", "▼"), "left": ("triangle-left", "◀"),
    "right": ("triangle-right", "▶"), "star": (_STAR, "★"),
}  # fmt: skip
"""Vega's name or path of each, and its character in a terminal."""
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


def _style(colour: str, shape: str, dash: str) -> Style:
    vega, character = _SHAPES[shape]
    return Style(colour, vega, character, _DASHES[dash])


STRATEGIES = {
    "single": _style(BLACK, "star", "solid"),
    "ddp": _style(BLUE, "circle", "solid"),
    "horovod": _style(VERMILLION, "square", "solid"),
    "zero1": _style(GREEN, "up", "long"),
    "fsdp": _style(PURPLE, "diamond", "solid"),
    "fairscale_oss": _style(ORANGE, "down", "long"),
    "fairscale_sddp": _style(SKY, "left", "short"),
    "fairscale_fsdp": _style(BLACK, "diamond", "short"),
    "filter": _style(ORANGE, "up", "solid"),
    "channel": _style(SKY, "down", "solid"),
    "spatial": _style(GREEN, "square", "dash-dot"),
    "tensor": _style(VERMILLION, "right", "solid"),
    "model": _style(BLACK, "square", "dots"),
    "gpipe": _style(ORANGE, "right", "long"),
    "fairscale_pipe": _style(SKY, "circle", "dots"),
    "1f1b": _style(VERMILLION, "left", "long"),
    "interleaved_1f1b": _style(PURPLE, "up", "short"),
    "zero_bubble": _style(GREEN, "cross", "dash-dot"),
    "pipedream": _style(BLUE, "star", "dash-dot"),
}
"""The same colour, shape and dash for a strategy in every plot."""

_OTHERS = [
    _style(colour, shape, dash)
    for dash in ("solid", "short", "dash-dot", "long", "dots")
    for colour, shape in zip(COLOURS, ("circle", "square", "up", "diamond", "cross", "down", "left"), strict=True)
]


def styles(series: Sequence[str]) -> dict[str, Style]:
    """The style of each of ``series``: a strategy's own, for anything else the first that is free.

    Strategies come first, in their order here, the others as they are given.
    """
    found = {name: STRATEGIES[name] for name in series if name in STRATEGIES}
    free = [style for style in _OTHERS if style[:3] not in {one[:3] for one in found.values()}]
    rest = [name for name in series if name not in found]
    found |= {name: (free or _OTHERS)[number % len(free or _OTHERS)] for number, name in enumerate(rest)}
    return {name: found[name] for name in [*(one for one in STRATEGIES if one in found), *rest]}


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
            "symbolStrokeWidth": 2, "labelLimit": 320, "labelColor": "#222222", "titleColor": "#222222",
        },
        "header": {"labelFontSize": 12, "labelFontWeight": "bold", "labelLimit": 380, "title": None},
        "title": {
            "fontSize": 15, "subtitleFontSize": 12, "anchor": "start", "offset": 12, "subtitleColor": "#444444",
            "limit": 900,
        },
        "line": {"strokeWidth": 2}, "point": {"size": 85, "opacity": 1},
    }  # fmt: skip
