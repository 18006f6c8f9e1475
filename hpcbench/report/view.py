"""A table before it is shown: raw figures in SI units, the same as text, headings and notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcbench.report.names import short_of
from hpcbench.units import format_bytes, format_count, format_rate, format_seconds


@dataclass(frozen=True)
class Column:
    """``is_key``: it says what a row is and is repeated where a wide table is folded.

    ``can_go``: a terminal where it does not fit does without it.
    """

    name: str
    heading: str
    is_key: bool = False
    is_number: bool = True
    can_go: bool = False


@dataclass
class View:
    """``raw[row][column]`` are figures in SI units, ``cells`` what people read."""

    title: str
    columns: list[Column]
    raw: list[list[Any]]
    cells: list[list[str]]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What marks in the cells mean."""


HEADINGS = {
    "metrics.samples_per_s": "samples/s",
    "speedup": "speed-up",
    "efficiency": "eff.",
    "prediction_error": "error",
}
_SHARES = ("efficiency", "metrics.mfu", "metrics.bubble_fraction", "metrics.accuracy", "metrics.drift")


def heading_of(column: str) -> str:
    """``metrics.step_time_s.median -> step time``: the unit is in the cells."""
    if column in HEADINGS:
        return HEADINGS[column]
    name = short_of(column)
    if not column.startswith(("metrics.", "predicted_")):
        return name
    for unit in ("_s", "_bytes", "_j"):
        name = name.removesuffix(unit)
    return name.replace("_", " ").replace(".", " ")


def format_value(column: str, value: Any) -> str:
    """``value`` of ``column`` with a unit that suits its size; nothing for what was not measured."""
    if value is None:
        return ""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or column.startswith("spec."):
        return str(value)
    if column in _SHARES:
        return f"{value:.1%}" if column == "metrics.mfu" else f"{value:.0%}"
    if column == "prediction_error":
        return f"{value:+.1%}"
    if column == "speedup":
        return f"{value:.2f}"
    return _with_unit(column.removesuffix(".median"), value)


def _with_unit(column: str, value: float) -> str:
    name = column.rpartition(".")[2] if ".step_time_s." not in column else "step_time_s"
    if name == "flops_per_s":
        return f"{format_count(value)}FLOP/s"
    if name.endswith("_per_s"):
        return format_rate(value)
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_j"):
        return f"{format_count(value)}J"
    return f"{value:.4g}"


def format_spread(column: str, value: float, low: float | None, high: float | None) -> str:
    """``12.3 [12.1 12.6] ms``: the unit once where it is the same; without bounds the value alone."""
    texts = [format_value(column, one) for one in (value, low, high)]
    if low is None or high is None:
        return texts[0]
    numbers, units = zip(*((text.partition(" ")[0], text.partition(" ")[2]) for text in texts), strict=True)
    if len(set(units)) == 1:
        return f"{numbers[0]} [{numbers[1]} {numbers[2]}] {units[0]}".rstrip()
    return f"{texts[0]} [{texts[1]} {texts[2]}]"
