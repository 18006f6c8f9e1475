"""The kinds of plots: what the command, the report and the documentation read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report.plots import points
from hpcbench.report.plots.picture import Asked, Picture

if TYPE_CHECKING:
    import polars


class Kind(NamedTuple):
    """``make`` is ``module:function``, resolved when drawn; ``columns`` it reads of a frame beside ``COLUMNS``."""

    summary: str
    make: str
    columns: tuple[str, ...] = ()
    whole: bool = False
    """Whether it needs ``Asked.whole``: figures that are in result files alone."""


COLUMNS = points.COLUMNS
_HERE = "hpcbench.report.plots"
PLOTS: dict[str, Kind] = {
    "throughput": Kind("samples per second over devices", f"{_HERE}.throughput:throughput"),
    "efficiency": Kind("speed-up per device over devices", f"{_HERE}.efficiency:efficiency"),
    "scaling": Kind("step time over devices, and where lines cross", f"{_HERE}.scaling:scaling"),
    "predicted": Kind("measured over predicted step time", f"{_HERE}.predicted:predicted", ("spec.options",)),
    "energy": Kind(
        "energy per sample over devices",
        f"{_HERE}.energy:energy",
        (
            "metrics.energy_j",
            "metrics.energy_source",
            "metrics.step_time_s.mean",
            "spec.steps",
        ),
    ),
}


def kind(name: str) -> Kind:
    """The entry of ``name``; ``ConfigError`` with the nearest where there is none."""
    if name not in PLOTS:
        raise ConfigError(f"no plot {name!r}", hint=did_you_mean(name, PLOTS))
    return PLOTS[name]


def draw(name: str, frame: polars.DataFrame, asked: Asked | None = None) -> Picture:
    """The picture ``name`` of a frame of ``report.load.gather`` with ``columns_of(name)`` at least."""
    module, _, function = kind(name).make.partition(":")
    picture: Picture = getattr(importlib.import_module(module), function)(frame, asked or Asked())
    return picture


def columns_of(name: str) -> list[str]:
    """The columns of a results frame that the picture ``name`` is made from."""
    return [*COLUMNS, *kind(name).columns]
