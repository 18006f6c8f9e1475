"""The plots of a page: a picture that needs no script, and the specification that a script makes explorable."""

from __future__ import annotations

import base64
import importlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from hpcbench.errors import ConfigError
from hpcbench.fileio import ascii_escapes, brief
from hpcbench.report.page.grid import Grid, grid
from hpcbench.report.plots.catalog import PLOTS, draw
from hpcbench.report.plots.picture import Asked, Picture
from hpcbench.report.plots.save import encoded

if TYPE_CHECKING:
    import polars

PREDICTED, SCALING = "predicted", "scaling"
_MOST_ROWS = 300
_LARGEST_SPECIFICATION = 500_000
"""Characters; a larger plot is shown as a picture only."""


@dataclass(frozen=True)
class Figure:
    """``source`` is the picture as an address that holds it, ``specification`` JSON that may stand in a script."""

    ident: str
    title: str
    alt: str
    source: str
    specification: str
    notes: list[str]
    data: Grid


@dataclass(frozen=True)
class Figures:
    """Those that could be drawn, and why others were not."""

    drawn: list[Figure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    scripts: str = ""
    """The library that makes them explorable; nothing where there are none."""


def figures(
    frame: polars.DataFrame,
    asked: Asked,
    predicted: polars.DataFrame | None = None,
    lines: polars.DataFrame | None = None,
) -> Figures:
    """Every kind of plot of a results frame that has something to show; none where a package is missing.

    ``predicted`` is for the plot of that name alone, ``lines`` for ``scaling``.
    """
    foretold = {PREDICTED: predicted, SCALING: lines}
    pictures = [draw(name, frame, replace(asked, predicted=foretold.get(name))) for name in PLOTS]
    left_out = [brief(f"{one.name}: {one.nothing}") for one in pictures if one.drawing is None]
    try:
        drawn = [figure(one) for one in pictures if one.drawing is not None]
        scripts = _library() if any(one.specification for one in drawn) else ""
    except ConfigError as error:
        return Figures(left_out=[f"no plots: {error.message}; {error.hint}"])
    return Figures(drawn, left_out, scripts)


def figure(picture: Picture) -> Figure:
    """``picture`` for a page. Raises ``ConfigError`` where altair or vl-convert is missing."""
    image = base64.b64encode(encoded(picture, ".svg")).decode()
    text = script_json(picture.specification)
    names = list(picture.frame.columns) if picture.frame is not None else []
    rows = [[_plain(row[name]) for name in names] for row in picture.rows]
    notes = [f"the first {_MOST_ROWS} of {len(rows)} points"] if len(rows) > _MOST_ROWS else []
    data = grid(
        f"data-{picture.name}",
        f"Points of {brief(picture.title)}",
        names,
        rows[:_MOST_ROWS],
        notes=notes,
        filters=False,
    )
    return Figure(
        picture.name, brief(picture.title), brief(picture.alt), f"data:image/svg+xml;base64,{image}",
        text if len(text) <= _LARGEST_SPECIFICATION else "", [brief(note) for note in picture.notes], data,
    )  # fmt: skip


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, str)) or value is None else str(value)


def script_json(value: object) -> str:
    """JSON that may stand in a script element: nothing in it ends that, opens a comment, or hides."""
    text = ascii_escapes(msgspec.json.encode(value).decode())
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _library() -> str:
    # There is one: the pictures were made with it.
    scripts: str = importlib.import_module("vl_convert").javascript_bundle()
    assert "</script" not in scripts.lower(), "the library cannot stand in a page"
    return scripts
