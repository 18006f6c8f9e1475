"""The table model: columns with the source of their values, views of rows, and footnotes for warnings.

A ``View`` has three renderers: ``table_output.render_view`` (terminal), ``table_files.write_view`` (files) and
the page's template (``html/template/page.html.j2``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

from hpcbench.fileio import printable_excerpt
from hpcbench.units import (
    format_bytes,
    format_count,
    format_figure,
    format_percent,
    format_rate,
    format_seconds,
    format_with_prefix,
)


def short_name(column: str) -> str:
    """``spec.strategy -> strategy``, ``metrics.step_time_s.median -> step_time_s``."""
    for prefix in ("spec.", "metrics."):
        if column.startswith(prefix):
            return column.removeprefix(prefix).removesuffix(".median")
    return column


@dataclass(frozen=True)
class Column:
    """One column of a view.

    Args:
        name: column of a results frame (``metrics.step_time_s.median``) or any other key; names the unit of ``value``.
        heading: text above the column.
        value: the SI figure (or text, or ``None``) of a row; columns of ``View.from_rows`` need it.
        text: the cell of a row; without it ``format_value(name, value(row))``.
        is_key: identifies the row and is repeated in each block of a folded table.
        is_number: aligned to the right.
        optional: left out on terminals where it does not fit; of several the one with the largest number goes first.
            In blocks below each other only those with 1 are left out.
        folds: its cells may be broken into lines on narrow terminals.
        wraps: a text of any length that takes the rest of the line and wraps; counts as 12 characters.
        compact_heading: heading with line breaks for narrow terminals.
        choices: a page offers a choice among its values.
    """

    name: str
    heading: str = ""
    value: Callable[[Any], Any] | None = None
    text: Callable[[Any], str] | None = None
    is_key: bool = False
    is_number: bool = True
    optional: int = 0
    folds: bool = False
    wraps: bool = False
    compact_heading: str = ""
    choices: bool = False

    def raw_of(self, row: Any) -> Any:
        assert self.value is not None, f"the column {self.name} has no values"
        return self.value(row)

    def cell_of(self, row: Any) -> str:
        return self.text(row) if self.text is not None else format_value(self.name, self.raw_of(row))


def text_column(name: str, text: Callable[[Any], str], **options: Any) -> Column:
    """Return a column whose value is its text; ``options`` are the fields of ``Column``, ``name`` is its heading."""
    return Column(name, options.pop("heading", name), text, text, **{"is_number": False, **options})


_MAX_CHOICES = 24


@dataclass
class View:
    """A table that a terminal, a file and a page show: values, formatted cells and notes.

    ``table_output.render_view`` prints it, ``table_files.write_view`` writes it to a file, the page's template shows
    it.

    Example::

        columns = [text_column("model", lambda row: row[0], is_key=True), Column("step_time_s", "step", itemgetter(1))]
        view = View.from_rows("Models", columns, [("resnet18", 0.012)])
        view.cells  # [["resnet18", "12.0 ms"]]
    """

    title: str
    """Heading; empty for none."""
    columns: list[Column]
    raw: list[list[Any]]
    """Values by row and column, in SI units; ``None`` for an empty cell."""
    cells: list[list[str]]
    """Formatted texts by row and column, with units."""
    notes: list[str] = field(default_factory=list)
    """Lines below the table about its figures."""
    warnings: list[str] = field(default_factory=list)
    """Reasons of failures and the meaning of marks in cells."""
    name: str = ""
    """Its address on a page."""

    @classmethod
    def from_rows(
        cls, title: str, columns: Sequence[Column], rows: Iterable[Any],
        notes: Iterable[str] = (), warnings: Iterable[str] = (),
    ) -> View:  # fmt: skip
        """Return a view with one line for each of ``rows``.

        Args:
            title: heading.
            columns: columns with ``value``; without it an ``AssertionError`` is raised.
            rows: any objects that the columns can read.
            notes: lines below the table.
            warnings: reasons of failures and the meaning of marks in cells.
        """
        rows = list(rows)
        raw = [[column.raw_of(row) for column in columns] for row in rows]
        cells = [[column.cell_of(row) for column in columns] for row in rows]
        return cls(title, list(columns), raw, cells, list(notes), list(warnings))

    @property
    def lines(self) -> Iterator[Iterator[tuple[str, Any]]]:
        """Cell and value by row and column."""
        return (zip(cells, raw, strict=True) for cells, raw in zip(self.cells, self.raw, strict=True))

    @property
    def numeric(self) -> list[bool]:
        """Whether each column has a number."""
        return [any(isinstance(row[index], (int, float)) for row in self.raw) for index in range(len(self.columns))]

    def choices(self, index: int) -> list[str]:
        """The values of a column with ``choices`` that a reader can select from; empty where they are one or many."""
        values = dict.fromkeys(row[index] for row in self.raw if row[index] not in (None, ""))
        if not self.columns[index].choices or not 1 < len(values) <= _MAX_CHOICES:
            return []
        are_numbers = all(isinstance(value, (int, float)) for value in values)
        return [printable_excerpt(str(value)) for value in sorted(values, key=None if are_numbers else str)]


COLUMN_HEADINGS = {
    "metrics.samples_per_s": "samples/s",
    "metrics.tokens_per_s": "tokens/s",
    "metrics.tokens_per_s_per_device": "tokens/s/device",
    "metrics.mfu": "MFU",
    "metrics.hfu": "HFU",
    "speedup": "speed-up",
    "efficiency": "eff.",
    "prediction_error": "error",
}
PERCENT_COLUMNS = (
    "efficiency", "metrics.mfu", "metrics.hfu", "metrics.bubble_fraction", "metrics.accuracy", "metrics.drift",
)  # fmt: skip


def column_heading(column: str) -> str:
    """``metrics.step_time_s.median -> step time``: the unit is in the cells."""
    if column in COLUMN_HEADINGS:
        return COLUMN_HEADINGS[column]
    name = short_name(column).removeprefix("own.")
    if not column.startswith(("metrics.", "predicted_")):
        return name
    for unit in ("_s", "_bytes", "_j", "_w"):
        name = name.removesuffix(unit)
    return name.replace("_", " ").replace(".", " ")


def format_value(column: str, value: Any, unit: str | None = None) -> str:
    """``value`` of ``column`` with a unit of suitable size; an empty text for ``None``.

    ``unit`` is that of a command's metric, whose name does not contain it.
    """
    if value is None:
        return ""
    if unit is not None:
        return format_figure(value, unit)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or column.startswith("spec."):
        return str(value)
    if column in PERCENT_COLUMNS:
        return format_percent(value, 1) if column in ("metrics.mfu", "metrics.hfu") else format_percent(value)
    if column == "prediction_error":
        return format_percent(value, 1, sign="+")
    if column == "speedup":
        return f"{value:.2f}"
    # The ends of an interval have the unit of the figure.
    return _format_with_unit(re.sub(r"\.(median|low|high)$", "", column), value)


def _format_with_unit(column: str, value: float) -> str:
    name = column.rpartition(".")[2] if ".step_time_s." not in column else "step_time_s"
    if name == "flops_per_s":
        return f"{format_count(value)}FLOP/s"
    if name.endswith(("_per_s", "_per_s_per_device")):
        return format_rate(value)
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith(("_j", "_w")):
        return format_with_prefix(value, name[-1].upper())
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def format_spread(column: str, value: float, low: float | None, high: float | None, unit: str | None = None) -> str:
    """``12.3 [12.1 12.6] ms``: the unit once if it is the same; without bounds the value alone."""
    texts = [format_value(column, number, unit) for number in (value, low, high)]
    if low is None or high is None:
        return texts[0]
    numbers, units = zip(*((text.partition(" ")[0], text.partition(" ")[2]) for text in texts), strict=True)
    if len(set(units)) == 1:
        return f"{numbers[0]} [{numbers[1]} {numbers[2]}] {units[0]}".rstrip()
    return f"{texts[0]} [{texts[1]} {texts[2]}]"


_MAX_LETTERS_PER_ROW = 3


class WarningFootnotes:
    """The kinds of ``warnings`` of ``rows``: up to 26 have a letter each, the others share ``+``.

    ``noun`` names one of ``rows`` in the counts of footnotes. With ``shared``, rows have no letter of a kind that all
    rows have.
    """

    def __init__(self, rows: Sequence[Any], noun: str = "row", *, shared: bool = False) -> None:
        self._noun = noun
        self._texts = {pattern: [text for _, text in having] for pattern, having in group_warnings(rows).items()}
        self._shared = {kind for kind, texts in self._texts.items() if shared and 1 < len(rows) == len(texts)}
        # Kinds without a mark use up no letter.
        self._letters = dict(
            zip((one for one in self._texts if one not in self._shared), ascii_lowercase, strict=False)
        )
        self._is_cut = any(self.marks(row).endswith("+") for row in rows)

    def marks(self, row: Any) -> str:
        """``*a,c`` behind a row's status, ``+`` for more than three; an empty text without warnings."""
        patterns = {message_pattern(text) for text in row.warnings} - self._shared
        letters = sorted({self._letters.get(pattern, "+") for pattern in patterns})
        shown = [letter for letter in letters if letter != "+"][:_MAX_LETTERS_PER_ROW]
        return "*" + ",".join([*shown, "+"] if len(shown) < len(letters) else shown) if letters else ""

    def kinds(self) -> list[tuple[str, list[str]]]:
        """Return for every kind its letter (``+`` after 26 kinds) and the first text of each row that has it."""
        return [(self._letters.get(pattern, "+"), texts) for pattern, texts in self._texts.items()]

    def footnotes(self) -> list[str]:
        """Return the explanation of every letter, and one of ``+`` if a row has it."""
        notes = []
        for kind in [one for one in self._texts if one in self._shared or one in self._letters]:
            texts = self._texts[kind]
            count = f"{len(texts)} {self._noun}s" if len(set(texts)) == 1 else f"first of {len(texts)} similar warnings"
            text = printable_excerpt(texts[0])
            if kind not in self._shared:
                notes.append(f"*{self._letters[kind]}: {text}{f' ({count})' if len(texts) > 1 else ''}")
                continue
            similar = "" if len(set(texts)) == 1 else f" ({count})"
            notes.append(f"all {len(texts)} {self._noun}s: {text}{similar}")
        beyond = len(self._texts) - len(self._letters) - len(self._shared)
        if beyond > 0:
            notes.append(f"*+: {beyond} more kinds of warnings: see `hpcbench collect`")
        elif self._is_cut:
            notes.append(f"*+: more than {_MAX_LETTERS_PER_ROW} kinds of warnings: see `hpcbench collect`")
        return notes


def group_warnings(rows: Iterable[Any]) -> dict[str, list[tuple[Any, str]]]:
    """The rows that have each kind of warning, with the first such text of each row; kinds in order of appearance."""
    groups: dict[str, list[tuple[Any, str]]] = {}
    for row in rows:
        first: dict[str, str] = {}
        for text in row.warnings:
            first.setdefault(message_pattern(text), text)
        for pattern, text in first.items():
            groups.setdefault(pattern, []).append((row, text))
    return groups


def message_pattern(text: str) -> str:
    """The common part of warnings that differ only in their figures: the words before a colon, without numbers."""
    return re.sub(r"\d[\d.,]*", "#", text.partition(": ")[0])
