"""Axes: the unit that suits the figures on it, and round numbers for its ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import polars

_UNITS: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "B": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "J": ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ")),
    "/s": ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")),
    "%": ((0.01, "%"),),
    "": ((1.0, ""),),
}
_LOG_FROM = 5.0
"""An axis whose largest figure is so many times its smallest is logarithmic, where the other one is."""


class Axis(NamedTuple):
    """``factor`` SI units are one of the axis's unit; ``log`` is the base of its logarithm or 0."""

    title: str
    factor: float = 1.0
    unit: str = ""
    log: int = 0

    def shown(self, value: float | None) -> float | None:
        """``value`` in the axis's unit, as exactly as anybody can see."""
        return None if value is None or not math.isfinite(value) else float(f"{value / self.factor:.5g}")

    @property
    def heading(self) -> str:
        """``step time (ms)``."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def axis(title: str, kind: str, values: Iterable[float | None], *, log: bool = False) -> Axis:
    """An axis for ``values`` of ``kind`` (a key of ``_UNITS``): the largest unit that one of them reaches.

    ``title`` may hold ``{}`` where the unit belongs (``{}samples/s``). ``log`` where they are spread widely.
    """
    known = sorted(value for value in values if value is not None and math.isfinite(value) and value > 0)
    most = known[-1] if known else 1.0
    factor, unit = next((one for one in _UNITS[kind] if most >= one[0]), _UNITS[kind][-1])
    base = 10 if log and known and known[-1] / known[0] >= _LOG_FROM else 0
    if "{}" in title:
        return Axis(title.format(f"{unit} " if unit else ""), factor, "", base)
    return Axis(title, factor, unit, base)


def counted(title: str, counts: Iterable[float]) -> Axis:
    """An axis of whole numbers: logarithmic where they double."""
    known = sorted(set(counts))
    doubles = len(known) > 1 and known[0] > 0 and known[-1] / known[0] >= 4
    return Axis(title, log=2 if doubles else 0)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most ``most`` of them, 1, 2, 2.5 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= rough * 0.999999)
    first = math.ceil(low / step - 1e-9)
    found = []
    while first * step <= high + step * 1e-9:
        found.append(float(f"{first * step:.10g}"))
        first += 1
    return found


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """1, 2 and 5 times powers of ten from ``low`` to ``high``; fewer of them where that is too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{part}e{power}") for power in powers for part in parts]
        inside = [one for one in found if low * 0.999999 <= one <= high * 1.000001]
        if len(inside) <= most:
            return inside or [low]
    return inside[:: math.ceil(len(inside) / most)]


def figures(frame: polars.DataFrame, column: str) -> list[float]:
    """The numbers in ``column`` that are there."""
    return [float(value) for value in frame[column].drop_nulls().to_list()]


def number(value: float) -> str:
    """A tick's label: as few digits as it takes."""
    return f"{value:,.10g}" if abs(value) < 1e6 else f"{value:.3g}"
