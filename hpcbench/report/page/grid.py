"""Tables of a page: cells as people read them, each with the value that it is sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcbench.fileio import brief
from hpcbench.report.view import format_value, heading_of

MOST_ROWS = 2000
"""A page with more would be slow to open; the whole is one ``table --out`` away."""
_MOST_CHOICES = 24
_LONGEST_CELL = 400


class Cell(NamedTuple):
    """``sort`` is a number, or empty where the text itself is compared."""

    text: str
    sort: str = ""


@dataclass(frozen=True)
class Column:
    """``choices``: the values that a reader can pick one of, where they are few."""

    name: str
    heading: str
    is_number: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """``ident`` is unique on its page; ``caption`` says what the rows are."""

    ident: str
    caption: str
    columns: list[Column]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    filters: bool = True
    """Whether a reader would want to narrow it."""


def grid(
    ident: str, caption: str, names: Sequence[str], rows: Sequence[Sequence[Any]], *,
    keys: Sequence[str] = (), notes: Sequence[str] = (), headings: dict[str, str] | None = None, filters: bool = True,
) -> Grid:  # fmt: skip
    """A table of plain values: columns named as in a results frame, figures in SI units; empty columns are left out.

    ``keys`` are columns whose few values can be picked from.
    """
    kept = [place for place, _ in enumerate(names) if any(row[place] not in (None, "") for row in rows)]
    shown = rows[:MOST_ROWS]
    given = headings or {}
    columns = [
        Column(
            names[place], brief(given.get(names[place]) or heading_of(names[place])),
            any(isinstance(row[place], (int, float)) for row in shown),
            _choices(shown, place) if names[place] in keys else (),
        )
        for place in kept
    ]  # fmt: skip
    cells = [[cell(names[place], row[place]) for place in kept] for row in shown]
    more = f"the first {MOST_ROWS} of {len(rows)} rows; `hpcbench table --out` writes all"
    told = [*([more] if len(rows) > MOST_ROWS else []), *notes]
    return Grid(ident, caption, columns, cells, told, filters and len(shown) > 1)


def cell(name: str, value: Any) -> Cell:
    """``value`` of the column ``name`` with a unit that suits it."""
    # Ends of an interval are told in the unit of what they are ends of.
    text = brief(format_value(name.removesuffix(".low").removesuffix(".high"), value))
    if len(text) > _LONGEST_CELL:
        text = f"{text[:_LONGEST_CELL]} ..."
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Cell(text, repr(value))
    return Cell(text)


def _choices(rows: Sequence[Sequence[Any]], place: int) -> tuple[str, ...]:
    values = list(dict.fromkeys(row[place] for row in rows if row[place] not in (None, "")))
    if not 1 < len(values) <= _MOST_CHOICES:
        return ()
    numbers = all(isinstance(value, (int, float)) for value in values)
    return tuple(brief(str(value)) for value in sorted(values, key=lambda one: one if numbers else str(one)))
