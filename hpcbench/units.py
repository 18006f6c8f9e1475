"""Parsing and printing of physical quantities with units, and phrases with counts and lists of words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

MAX_NUMBER = 2**63 - 1
"""Largest number of a setting: JSON has no infinity, and msgspec and torch no larger integers."""
MAX_COUNT = 2**31 - 1
"""Largest count; SLURM's fields have 32 bits."""
MAX_TIME_S = 1.2e9
"""Longest time; clocks and timers of Python and SLURM hold longer ones only in part."""

_QUANTITY_PATTERN = re.compile(r"\s*(?P<number>[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(?P<unit>[^\s0-9.].*?)\s*")

_DECIMAL_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY_PREFIXES = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_PREFIX_FACTORS = {**_DECIMAL_PREFIXES, **_BINARY_PREFIXES}

_TIME_UNITS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0, "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip
_SIZE_UNITS = {f"{prefix}B": factor for prefix, factor in _PREFIX_FACTORS.items()}
_RATE_UNITS = {f"{prefix}B/s": factor for prefix, factor in _PREFIX_FACTORS.items()} | {
    f"{prefix}{bit}": factor / 8 for prefix, factor in _PREFIX_FACTORS.items() for bit in ("bit/s", "bps", "b/s")
}
_SPEED_UNITS = {
    f"{prefix}{flop}": factor for prefix, factor in _DECIMAL_PREFIXES.items() for flop in ("FLOP/s", "FLOPS", "flop/s")
}
_SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d{1,3})(?::(?P<minutes>\d\d)(?::(?P<seconds>\d\d))?)?")
_SLURM_SIZE = re.compile(r"(?P<number>\d+)(?P<prefix>[KMGT])")
_SI_UNITS = {"time": "s", "size": "B", "rate": "B/s", "computing speed": "FLOP/s"}
_FACTORS_BY_KIND = {"time": _TIME_UNITS, "size": _SIZE_UNITS, "rate": _RATE_UNITS, "computing speed": _SPEED_UNITS}
_EXAMPLES = {
    "time": "'30 min' or '5 us', or as SLURM: D-HH, D-HH:MM, D-HH:MM:SS or HH:MM:SS", "size": "'94 GiB' or '512G'",
    "rate": "'200 Gbit/s'", "computing speed": "'312 TFLOP/s'",
}  # fmt: skip


_OTHER_UNITS = frozenset({
    "", "%", "°C", "1", "bytes", "J", "kJ", "MJ", "W", "kW", "Wh", "kWh", "Hz", "MHz", "GHz",
    "step", "sample", "token", "device", "GPU", "rank", "node", *(f"{prefix}FLOP" for prefix in _DECIMAL_PREFIXES),
    *(f"{prefix}bit" for prefix in _DECIMAL_PREFIXES), *_TIME_UNITS, *_SIZE_UNITS, *_RATE_UNITS, *_SPEED_UNITS,
})  # fmt: skip
_WRONG_UNITS = {
    **dict.fromkeys(("secs", "second", "seconds"), "s"), **dict.fromkeys(("msecs", "milliseconds"), "ms"),
    **dict.fromkeys(("usecs", "microseconds"), "us"), "minutes": "min", "kilobytes": "kB", "megabytes": "MB",
    "gigabytes": "GB", "joules": "J", "watts": "W", "flops": "FLOP/s",
}  # fmt: skip


def check_unit(text: str) -> str:
    """Return ``text`` if it is a unit: a known one, a plural noun (tokens), or a quotient of both; else ``ValueError``.

    >>> check_unit("tokens/s")
    'tokens/s'
    """
    for part in [] if text in _OTHER_UNITS else text.split("/"):
        if part in _WRONG_UNITS:
            raise ValueError(f"{part!r} is not a unit: write {_WRONG_UNITS[part]!r}")
        if part not in _OTHER_UNITS - {""} and not re.fullmatch("[a-z]{3,}s", part):
            raise ValueError(
                f"{part!r} is not a unit: for instance s, ms, bytes, GB/s, J, %, or a count such as tokens/s"
            )
    return text


def time_unit_s(unit: str) -> float | None:
    """Seconds of one ``unit`` of time; ``None`` for a unit of something else."""
    return _TIME_UNITS.get(unit)


def parse_quantity(text: str, kind: str) -> float:
    """The SI value of ``text`` such as ``"200 Gbit/s"``; ``kind`` is a key of the table of units.

    Times and sizes may be written as SLURM does: ``2-00:00:00``, ``1-12``, ``12:00:00``, ``512G`` (GiB).

    Raises ``ValueError`` with an example where the text is not a number and a known unit.
    """
    if kind == "time" and (slurm := _SLURM_TIME.fullmatch(text.strip())) and (slurm["days"] or slurm["seconds"]):
        days, hours, minutes, seconds = (int(part or 0) for part in slurm.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
    if kind == "size" and (slurm := _SLURM_SIZE.fullmatch(text.strip())):
        text = f"{slurm['number']} {slurm['prefix']}iB"
    units = _FACTORS_BY_KIND[kind]
    match = _QUANTITY_PATTERN.fullmatch(text)
    advice = f"write a number and a unit, for instance {_EXAMPLES[kind]}"
    noun = "duration" if kind == "time" else kind
    problem = f"{text!r} is not a {noun}: {advice}"
    if match is None or match["unit"] not in units:
        raise ValueError(problem)
    try:
        value = float(match["number"]) * units[match["unit"]]
    except ValueError:
        raise ValueError(problem) from None
    if value > MAX_NUMBER:
        raise ValueError(f"{text!r} is not a {noun} of at most {MAX_NUMBER:.3g} {_SI_UNITS[kind]}: {advice}")
    return value


def format_bytes(count: float) -> str:
    """``1536 -> '1.5 KiB'``: at most four characters before the unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """``0.0123 -> '12.3 ms'``: three significant digits below a minute, then ``m s`` and ``h m``."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns" if seconds else "0 s"


def format_rate(per_s: float) -> str:
    """``12345.6 -> '12.3 k'``: a count per second, without the unit."""
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if per_s >= factor * (10 if unit == " k" else 1):
            return f"{three_digits(per_s / factor)}{unit}"
    return three_digits(per_s)


def format_count(count: float) -> str:
    """``11689512 -> '11.7 M'``: three significant digits, whole numbers below a thousand."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor * 0.9995:
            return f"{three_digits(count / factor)} {unit}"
    return f"{count:.0f}"


def format_with_prefix(value: float, unit: str) -> str:
    """``(0.0000321, "J") -> '32.1 µJ'``: three significant digits."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= factor * 0.9995:
            return f"{three_digits(value / factor)} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def format_percent(share: float | None, digits: int = 0, sign: str = "") -> str:
    """``(0.123, 1) -> '12.3 %'``; an empty text for ``None``; with ``sign="+"`` positive values have a sign."""
    return "" if share is None else f"{share * 100:{sign}.{digits}f} %"


def format_figure(value: float, unit: str) -> str:
    """``(0.0123, "s") -> "12.3 ms"``, ``(412.5, "GB/s") -> "412.5 GB/s"``: a figure of a user's program."""
    if unit == "s":
        return format_seconds(value)
    if unit in ("B", "bytes"):
        return format_bytes(value)
    number = format_count(value) if value >= 1e5 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def format_slurm_time(seconds: float) -> str:
    """``5400 -> '0-01:30:00'``, rounded up to the next second."""
    whole = math.ceil(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{days}-{hours:02d}:{minutes:02d}:{secs:02d}"


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """``3 runs``, ``1 run``, ``2,000 launches``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def join_words(words: Sequence[str], most: int = 6) -> str:
    """``a, b and c``; beyond ``most`` words the first ones and the number of the rest."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def or_empty(value: object) -> str:
    """``str(value)``; an empty text for ``None``."""
    return "" if value is None else str(value)


def count_span(counts: Sequence[int]) -> str:
    """``3``, ``2 to 5``: the range of those above one, which are in order."""
    several = [count for count in counts if count > 1]
    return str(several[0]) if several[0] == several[-1] else f"{several[0]} to {several[-1]}"


def three_digits(value: float) -> str:
    """``123``, ``12.3``, ``1.23``, ``0.12``."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
