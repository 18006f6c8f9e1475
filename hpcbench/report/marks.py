"""Warnings of a table's rows: a letter in the row, and below the table one text for all that are alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Protocol

from rich.table import Table
from rich.text import Text

from hpcbench.fileio import brief

_STYLE = "yellow"
_MOST_IN_A_ROW = 3


class HasWarnings(Protocol):
    """A row or a cell."""

    @property
    def warnings(self) -> list[str]:
        """The texts, as results hold them."""


class Marks:
    """The kinds of warnings that ``rows`` have, each with a letter as far as letters go."""

    def __init__(self, rows: Sequence[HasWarnings]) -> None:
        self._texts: dict[str, list[str]] = {}
        """By kind: of every row that has it, its first text."""
        for row in rows:
            first: dict[str, str] = {}
            for text in row.warnings:
                first.setdefault(kind_of(text), text)
            for kind, text in first.items():
                self._texts.setdefault(kind, []).append(text)
        self._letters = dict(zip(self._texts, ascii_lowercase, strict=False))

    def of(self, row: HasWarnings) -> str:
        """``*a,c`` behind a row's status, ``+`` for more than three; nothing where it has no warnings."""
        letters = sorted({self._letters.get(kind_of(text), "+") for text in row.warnings})
        shown = [letter for letter in letters if letter != "+"][:_MOST_IN_A_ROW]
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
            table.add_row(Text(f"*{letter}", style=_STYLE), Text(f"{brief(texts[0])} ({note})", style=_STYLE))
        beyond = len(self._texts) - len(self._letters)
        if beyond > 0:
            table.add_row(Text("*+", style=_STYLE), Text(f"{beyond} more kinds: see `hpcbench collect`", style=_STYLE))
        return [table]

    def texts(self) -> list[str]:
        """As ``explained``, a plain text for each letter."""
        return [f"*{letter}: {brief(self._texts[kind][0])}" for kind, letter in self._letters.items()]


def kind_of(text: str) -> str:
    """What warnings that differ in their figures alone have in common: the words before a colon, without numbers."""
    return re.sub(r"\d[\d.,]*", "#", text.partition(": ")[0])
