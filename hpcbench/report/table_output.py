"""Renderer of the table model for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hpcbench.fileio import printable_excerpt
from hpcbench.report.table_model import Column, View

STATUS_STYLE = {
    "ok": "green", "lost": "red", "failed": "red", "timeout": "magenta", "cancelled": "magenta", "oom": "magenta",
}  # fmt: skip
"""Colours of states that a white and a black terminal show; others have none."""
_MAX_KEY_WIDTH = 24
"""Longer keys are folded within their column."""
_MAX_RECORD_WIDTH, _MAX_NARROW_BLOCKS = 60, 2
"""On a narrower terminal a table of more blocks becomes a record for each row."""
_MIN_FOLDED_WIDTH = 12
"""A column whose cells may be folded keeps so many characters."""


def render_view(view: View, width: int) -> RenderableType:
    """Return ``view`` for a terminal of ``width`` columns.

    One table where it fits, with narrow headings and gaps or without optional columns where it fits only so; else
    blocks of columns below each other, each with the key columns; on narrow terminals a record for each row.
    """
    fitted, left_out = _fitted_tables(view, width) if view.raw else ([], [])
    title = Text(printable_excerpt(view.title), style="bold")
    if left_out:
        title.append(f"  (not shown at this width: {', '.join(left_out)})", style="not bold")
    headline = [title, Text("")] if view.title else []
    tables = [part for table in fitted for part in (table, Text(""))]
    texts = [Text(printable_excerpt(text)) for text in (*view.notes, *view.warnings)]
    return Stripped(Group(*headline, *tables, *texts))


@dataclass(frozen=True)
class Stripped:
    """A renderable without blanks at the ends of its lines."""

    renderable: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self.renderable, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            yield from line[:-1]
            if line:
                yield line[-1]._replace(text=line[-1].text.rstrip())
            yield Segment.line()


@dataclass(frozen=True)
class PrintedView:
    """A view that takes the width of the console that prints it."""

    view: View

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield render_view(self.view, options.max_width)


def _fitted_tables(view: View, width: int) -> tuple[list[RenderableType], list[str]]:
    """The parts of a table, and the headings of its columns that are in none."""
    every = range(len(view.columns))
    # Each cell is measured once: a table of many runs takes its time here.
    widest = [max((_text_width(row[number]) for row in view.cells), default=0) for number in every]
    widths = [_column_width(view.columns[number], widest[number]) + 2 for number in every]
    if sum(widths) <= width:
        return [_rich_table(view, every)], []
    compact_widths = [_compact_width(view.columns[number], widest[number]) for number in every]
    kept = list(every)
    optional = sorted((number for number in every if view.columns[number].optional),
                      key=lambda number: view.columns[number].optional)  # fmt: skip
    is_narrowable = bool(optional) or any(column.folds or column.compact_heading for column in view.columns)
    while is_narrowable:
        if sum(compact_widths[number] for number in kept) + len(kept) - 1 <= width:
            left_out = [view.columns[number].heading for number in every if number not in kept]
            return [_rich_table(view, kept, compact_widths)], left_out
        if not optional:
            break
        kept.remove(optional.pop())
    blocks = _fold_columns(view, widths, width)
    if width < _MAX_RECORD_WIDTH and len(blocks) > _MAX_NARROW_BLOCKS:
        return [_record(view, row) for row in view.cells], []
    return [_rich_table(view, block) for block in blocks], []


def _record(view: View, row: Sequence[str]) -> Text:
    """The cells of one row that are not empty, each on a line with its heading."""
    lines = [
        (f"{printable_excerpt(column.heading)}: " if column.heading else "", _rich_cell(column, cell))
        for column, cell in zip(view.columns, row, strict=True) if cell
    ]  # fmt: skip
    return Text("\n").join(Text(heading).append_text(cell) for heading, cell in lines)


def _fold_columns(view: View, widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each block: the keys, and as many others as fit beside them, at least one."""
    keys = [number for number, column in enumerate(view.columns) if column.is_key]
    room = width - sum(widths[number] for number in keys)
    blocks: list[list[int]] = []
    free = 0
    for number, column in enumerate(view.columns):
        if column.is_key:
            continue
        if not blocks or widths[number] > free:
            if blocks and column.optional == 1:
                continue
            blocks.append([*keys])
            free = room
        blocks[-1].append(number)
        free -= widths[number]
    return blocks or [keys]


def _column_width(column: Column, widest_cell: int) -> int:
    heading = _text_width(column.heading)
    if column.wraps:
        return max(_MIN_FOLDED_WIDTH, heading)
    width = max(heading, widest_cell)
    return min(width, _MAX_KEY_WIDTH) if column.is_key else width


def _compact_width(column: Column, widest_cell: int) -> int:
    """The narrowest that a column may be."""
    width = max(_text_width(column.compact_heading or column.heading), widest_cell)
    return min(width, _MIN_FOLDED_WIDTH) if column.folds or column.wraps else width


def _text_width(text: str) -> int:
    return max(map(cell_len, printable_excerpt(text).split("\n")))


def _rich_table(view: View, numbers: Sequence[int], compact_widths: Sequence[int] | None = None) -> Table:
    """The columns ``numbers`` as a table; with the least width of every column, narrow headings and gaps."""
    compact = compact_widths is not None
    table = Table(box=box.SIMPLE_HEAD, padding=0 if compact else (0, 1, 0, 0), show_edge=False)
    for number in numbers:
        column = view.columns[number]
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        heading = Text(printable_excerpt((compact and column.compact_heading) or column.heading))
        may_wrap = column.wraps or (column.folds if compact else column.is_key)
        table.add_column(
            heading, justify=justify, overflow="fold", no_wrap=not may_wrap,
            min_width=None if compact_widths is None else compact_widths[number],
            max_width=_MAX_KEY_WIDTH if column.is_key and not compact else None,
        )  # fmt: skip
    for row in view.cells:
        table.add_row(*(_rich_cell(view.columns[number], row[number]) for number in numbers))
    return table


def _rich_cell(column: Column, text: str) -> Text:
    """A status has the colour that it has everywhere; marks of warnings may stand behind it."""
    style = STATUS_STYLE.get(text.partition("*")[0], "") if column.name == "status" else ""
    return Text(printable_excerpt(text), style=style)
