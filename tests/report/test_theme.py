"""Plots are readable for people who see no red or no green, and without any colour."""

from __future__ import annotations

import itertools

import pytest

from hpcbench.report.plots import theme
from hpcbench.report.plots.breakdown_plots import STEP_PARTS
from hpcbench.report.plots.charts import ACTION_STYLES
from hpcbench.strategies.catalog import STRATEGIES

Colour = tuple[float, float, float]


def linear(colour: str) -> Colour:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels)
    return red, green, blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2.1."""
    light, dark = sorted((0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other))), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    "colours", [[one.colour for one in STEP_PARTS.values()], [ACTION_STYLES[kind].colour for kind in "BFIWB"]]
)
def test_neighbours_in_a_bar_differ_in_lightness(colours: list[str]) -> None:
    """Who sees no red or no green tells them apart by it."""
    assert all(contrast(one, other) > 1.4 for one, other in itertools.pairwise(colours)), colours


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
