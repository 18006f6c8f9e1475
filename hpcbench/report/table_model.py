"""The table model: a view holds raw values in SI units, formatted cells, headings, notes and warning footnotes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any, Protocol

from rich.table import Table
from rich.text import Text

from hpcbench.fileio import printable_excerpt
from hpcbench.report.column_names import short_name
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


COLUMN_HEADINGS = {
    "metrics.samples_per_s": "samples/s",
    "speedup": "speed-up",
    "efficiency": "eff.",
    "prediction_error": "error",
}
_PERCENT_COLUMNS = ("efficiency", "metrics.mfu", "metrics.bubble_fraction", "metrics.accuracy", "metrics.drift")


def column_heading(column: str) -> str:
    """``metrics.step_time_s.median -> step time``: the unit is in the cells."""
    if column in COLUMN_HEADINGS:
        return COLUMN_HEADINGS[column]
    name = short_name(column)
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
    if column in _PERCENT_COLUMNS:
        return f"{value:.1%}" if column == "metrics.mfu" else f"{value:.0%}"
    if column == "prediction_error":
        return f"{value:+.1%}"
    if column == "speedup":
        return f"{value:.2f}"
    return _format_with_unit(column.removesuffix(".median"), value)


def _format_with_unit(column: str, value: float) -> str:
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


_WARNING_STYLE = "yellow"
_MAX_LETTERS_PER_ROW = 3


class HasWarnings(Protocol):
    """A row or a cell."""

    @property
    def warnings(self) -> list[str]:
        """The texts, as results hold them."""


class WarningFootnotes:
    """The kinds of warnings that ``rows`` have, each with a letter as far as letters go."""

    def __init__(self, rows: Sequence[HasWarnings]) -> None:
        self._texts: dict[str, list[str]] = {}
        """By kind: of every row that has it, its first text."""
        for row in rows:
            first: dict[str, str] = {}
            for text in row.warnings:
                first.setdefault(message_pattern(text), text)
            for kind, text in first.items():
                self._texts.setdefault(kind, []).append(text)
        self._letters = dict(zip(self._texts, ascii_lowercase, strict=False))

    def of(self, row: HasWarnings) -> str:
        """``*a,c`` behind a row's status, ``+`` for more than three; nothing where it has no warnings."""
        letters = sorted({self._letters.get(message_pattern(text), "+") for text in row.warnings})
        shown = [letter for letter in letters if letter != "+"][:_MAX_LETTERS_PER_ROW]
        return "*" + ",".join([*shown, "+"] if len(shown) < len(letters) else shown) if letters else ""

    def kinds(self) -> list[tuple[str, list[str]]]:
        """Letter (``+`` where letters have ended) and the first texts of the rows that have it, for every kind."""
        return [(self._letters.get(kind, "+"), texts) for kind, texts in self._texts.items()]

    def explained(self) -> list[Table]:
        """A line or more for each letter, to be printed below the table."""
        if not self._texts:
            return []
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column()
        for kind, letter in self._letters.items():
            texts = self._texts[kind]
            rows = f"{len(texts)} row{'s' * (len(texts) > 1)}"
            note = rows if len(set(texts)) == 1 else f"the first of {rows} alike"
            table.add_row(
                Text(f"*{letter}", style=_WARNING_STYLE),
                Text(f"{printable_excerpt(texts[0])} ({note})", style=_WARNING_STYLE),
            )
        beyond = len(self._texts) - len(self._letters)
        if beyond > 0:
            table.add_row(
                Text("*+", style=_WARNING_STYLE),
                Text(f"{beyond} more kinds: see `hpcbench collect`", style=_WARNING_STYLE),
            )
        return [table]

    def texts(self) -> list[str]:
        """As ``explained``, a plain text for each letter."""
        return [f"*{letter}: {printable_excerpt(self._texts[kind][0])}" for kind, letter in self._letters.items()]


def message_pattern(text: str) -> str:
    """What warnings that differ in their figures alone have in common: the words before a colon, without numbers."""
    return re.sub(r"\d[\d.,]*", "#", text.partition(": ")[0])
