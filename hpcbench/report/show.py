"""A view in a terminal: folded into blocks that repeat the keys where it is too wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcbench.fileio import brief
from hpcbench.report.view import View

_GAP = 2
"""A blank behind each column, and one that the box puts between them."""
_KEY_WIDTH = 24
"""Longer keys are folded within their column."""


def view_renderable(view: View, width: int) -> RenderableType:
    """``view`` for a terminal of ``width`` columns."""
    parts: list[RenderableType] = [Text(brief(view.title), style="bold"), Text("")]
    for block in blocks(view, width):
        parts += [_table(view, block), Text("")]
    parts += [Text(brief(note), style="dim") for note in view.notes]
    parts += [Text(brief(text), style="yellow") for text in view.warnings]
    return Group(*parts)


def blocks(view: View, width: int) -> list[list[int]]:
    """The columns of each block: the keys, and as many others as fit beside them, one at least."""
    widths = [_width(view, place) for place in range(len(view.columns))]
    keys = [place for place, column in enumerate(view.columns) if column.is_key]
    others = [place for place, column in enumerate(view.columns) if not column.is_key]
    room = width - sum(widths[place] + _GAP for place in keys)
    found: list[list[int]] = []
    left = 0
    for place in others:
        if not found or widths[place] + _GAP > left:
            if found and view.columns[place].can_go:
                continue
            found.append([*keys])
            left = room
        found[-1].append(place)
        left -= widths[place] + _GAP
    return found or [keys]


def _width(view: View, place: int) -> int:
    texts = [view.columns[place].heading, *(row[place] for row in view.cells)]
    widest = max(Text(brief(text)).cell_len for text in texts)
    return min(widest, _KEY_WIDTH) if view.columns[place].is_key else widest


def _table(view: View, block: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for place in block:
        column = view.columns[place]
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(
            Text(brief(column.heading)), justify=justify, overflow="fold", no_wrap=not column.is_key,
            max_width=_KEY_WIDTH if column.is_key else None,
        )  # fmt: skip
    for row in view.cells:
        table.add_row(*(Text(brief(row[place])) for place in block))
    return table
