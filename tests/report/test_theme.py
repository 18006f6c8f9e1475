"""Colours are told apart by people who see no red or no green, and without any colour by what else is drawn."""

from __future__ import annotations

import itertools

import pytest

from hpcbench.report.plots import theme
from hpcbench.report.plots.breakdown_plots import STEP_PARTS
from hpcbench.report.plots.charts import ACTION_STYLES
from hpcbench.strategies.catalog import STRATEGIES

Colour = tuple[float, float, float]

# Machado, Oliveira, Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency",
# table 1 at full severity: linear RGB as it is seen.
SEEN = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def linear(colour: str) -> Colour:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels)
    return red, green, blue


def lab(rgb: Colour) -> Colour:
    """CIE L*a*b* of linear sRGB under D65."""
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    scaled = [sum(a * b for a, b in zip(row, rgb, strict=True)) / w for row, w in zip(matrix, white, strict=True)]
    x, y, z = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in scaled)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: str, other: str, seen: tuple[tuple[float, ...], ...]) -> float:
    labs = []
    for colour in (one, other):
        rgb = linear(colour)
        red, green, blue = (min(1.0, max(0.0, sum(a * b for a, b in zip(row, rgb, strict=True)))) for row in seen)
        labs.append(lab((red, green, blue)))
    return float(sum((a - b) ** 2 for a, b in zip(*labs, strict=True)) ** 0.5)


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN.keys())
def test_colours_are_apart_for_everybody(seen: tuple[tuple[float, ...], ...]) -> None:
    for one, other in itertools.combinations((*theme.COLOURS, "#FFFFFF"), 2):
        # Differences of 2.3 are just seen side by side.
        assert distance(one, other, seen) > 10, (one, other)


@pytest.mark.parametrize(
    "colours", [[one.colour for one in STEP_PARTS.values()], [ACTION_STYLES[kind].colour for kind in "BFIWB"]]
)
def test_neighbours_in_a_bar_differ_in_lightness(colours: list[str]) -> None:
    lightness = [lab(linear(colour))[0] for colour in colours]
    assert all(abs(one - other) > 8 for one, other in itertools.pairwise(lightness)), lightness


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2.1."""
    light, dark = sorted((0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other))), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_labels_on_bars_have_enough_contrast() -> None:
    drawn = [
        *((one.colour, one.ink) for one in STEP_PARTS.values()),
        *((one.colour, one.ink) for one in ACTION_STYLES.values()),
    ]
    assert [pair for pair in drawn if contrast(*pair) < 4.5] == []


def test_every_strategy_has_a_distinct_style_without_colour() -> None:
    assert set(theme.STRATEGY_STYLES) == set(STRATEGIES)
    without_colour = [(style.shape, tuple(style.dash)) for style in theme.STRATEGY_STYLES.values()]
    assert len(set(without_colour)) == len(without_colour)
    families = (("ddp", "horovod", "zero1", "fsdp"), ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "pipedream"))
    for family in (*families, ("filter", "channel", "spatial", "tensor")):
        for place in (0, 1, 3):
            drawn = [str(theme.STRATEGY_STYLES[name][place]) for name in family]
            assert len(set(drawn)) == len(drawn), family


def test_styles_stay_where_others_come_and_go() -> None:
    alone = theme.series_styles(["fsdp"])["fsdp"]
    assert theme.series_styles(["zz", "ddp", "fsdp", "filter dp tp"])["fsdp"] == alone
    hybrid = theme.series_styles(["filter dp tp", "filter"])
    assert hybrid["filter dp tp"].colour == hybrid["filter"].colour
    assert (hybrid["filter"].character, hybrid["filter dp tp"].character) == ("★", "☆")
    two = theme.series_styles(["1f1b dp pp", "1f1b dp tp pp"])
    assert two["1f1b dp pp"].dash != two["1f1b dp tp pp"].dash
    assert list(theme.series_styles(["zz", "fsdp", "ddp"])) == ["ddp", "fsdp", "zz"]
    many = theme.series_styles([f"s{number}" for number in range(20)])
    assert len({style[:3] for style in many.values()}) == 20
