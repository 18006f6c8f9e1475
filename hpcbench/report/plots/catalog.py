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
    """``module`` of this package and the function of that name in it; ``columns`` it reads beside ``COLUMNS``."""

    summary: str
    module: str
    columns: tuple[str, ...] = ()
    whole: bool = False
    """Whether it needs ``Asked.whole``: figures that are in result files alone."""


COLUMNS = points.COLUMNS
_PARTS = ("metrics.compute_s", "metrics.comm_s", "metrics.exposed_comm_s", "metrics.bubble_fraction")
_ENERGY = ("metrics.energy_j", "metrics.energy_source", "metrics.step_time_s.mean", "spec.steps")
PLOTS: dict[str, Kind] = {
    "throughput": Kind("samples per second over devices", "throughput"),
    "efficiency": Kind("speed-up per device over devices", "efficiency"),
    "scaling": Kind("step time over devices, and where lines cross", "scaling"),
    "parts": Kind("computation, communication and bubble of a step", "parts", _PARTS, whole=True),
    "memory": Kind("peak memory of every rank", "memory", ("metrics.peak_memory_bytes",), whole=True),
    "distribution": Kind("single steps of every configuration", "distribution", whole=True),
    "timeline": Kind("a pipeline's step, rank by rank", "timeline", ("metrics.bubble_fraction",), whole=True),
    "predicted": Kind("measured over predicted step time", "predicted", ("spec.options",), whole=True),
    "energy": Kind("energy per sample over devices", "energy", _ENERGY),
}


def kind(name: str) -> Kind:
    """The entry of ``name``; ``ConfigError`` with the nearest where there is none."""
    if name not in PLOTS:
        raise ConfigError(f"no plot {name!r}", hint=did_you_mean(name, PLOTS))
    return PLOTS[name]


def draw(name: str, frame: polars.DataFrame, asked: Asked | None = None) -> Picture:
    """The picture ``name`` of a frame of ``report.load.gather`` with ``columns_of(name)`` at least."""
    module = kind(name).module
    make = getattr(importlib.import_module(f"hpcbench.report.plots.{module}"), module)
    picture: Picture = make(frame, asked or Asked())
    return picture


def columns_of(name: str) -> list[str]:
    """The columns of a results frame that the picture ``name`` is made from."""
    return [*COLUMNS, *kind(name).columns]
