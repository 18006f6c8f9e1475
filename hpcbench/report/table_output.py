"""Renderers of the table model for terminals and files, and export of full results."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hpcbench.errors import INSTALL_REPORT, ConfigError
from hpcbench.fileio import encode_indented_json, escape_control_characters, printable_excerpt, write_atomic
from hpcbench.report.column_names import short_name
from hpcbench.report.status_text import STATUS_STYLE
from hpcbench.report.table_model import Column, View

if TYPE_CHECKING:
    import polars as pl

_MAX_KEY_WIDTH = 24
"""Longer keys are folded within their column."""
_MIN_FOLDED_WIDTH = 12
"""A column whose cells may be folded keeps so many characters."""


def render_view(view: View, width: int) -> RenderableType:
    """Return ``view`` for a terminal of ``width`` columns.

    One table where it fits, with narrow headings and gaps where it fits only so; else blocks of columns below each
    other, each with the key columns.
    """
    headline = [Text(printable_excerpt(view.title), style="bold"), Text("")] if view.title else []
    tables = [part for table in _fitted_tables(view, width) for part in (table, Text(""))] if view.raw else []
    notes = [Text(printable_excerpt(note), style="dim") for note in view.notes]
    warnings = [Text(printable_excerpt(text), style="yellow") for text in view.warnings]
    return Group(*headline, *tables, *notes, *warnings)


@dataclass(frozen=True)
class PrintedView:
    """A view that takes the width of the console that prints it."""

    view: View

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield render_view(self.view, options.max_width)


def _fitted_tables(view: View, width: int) -> list[Table]:
    every = range(len(view.columns))
    if sum(_column_width(view, number) + 2 for number in every) <= width:
        return [_rich_table(view, every)]
    is_narrowable = any(column.folds or column.compact_heading for column in view.columns)
    if is_narrowable and sum(_compact_width(view, number) + 1 for number in every) - 1 <= width:
        return [_rich_table(view, every, compact=True)]
    return [_rich_table(view, block) for block in fold_columns(view, width)]


def fold_columns(view: View, width: int) -> list[list[int]]:
    """The columns of each block: the keys, and as many others as fit beside them, at least one."""
    widths = [_column_width(view, number) + 2 for number in range(len(view.columns))]
    keys = [number for number, column in enumerate(view.columns) if column.is_key]
    room = width - sum(widths[number] for number in keys)
    blocks: list[list[int]] = []
    free = 0
    for number, column in enumerate(view.columns):
        if column.is_key:
            continue
        if not blocks or widths[number] > free:
            if blocks and column.optional:
                continue
            blocks.append([*keys])
            free = room
        blocks[-1].append(number)
        free -= widths[number]
    return blocks or [keys]


def _column_width(view: View, number: int) -> int:
    column = view.columns[number]
    if column.wraps:
        return max(_MIN_FOLDED_WIDTH, _text_width(column.heading))
    widest = max(map(_text_width, (column.heading, *(row[number] for row in view.cells))))
    return min(widest, _MAX_KEY_WIDTH) if column.is_key else widest


def _compact_width(view: View, number: int) -> int:
    """The narrowest that a column may be."""
    column = view.columns[number]
    cells = max((_text_width(row[number]) for row in view.cells), default=0)
    width = max(_text_width(column.compact_heading or column.heading), cells)
    return min(width, _MIN_FOLDED_WIDTH) if column.folds or column.wraps else width


def _text_width(text: str) -> int:
    return max(map(cell_len, printable_excerpt(text).split("\n")))


def _rich_table(view: View, numbers: Sequence[int], *, compact: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0 if compact else (0, 1, 0, 0), show_edge=False)
    for number in numbers:
        column = view.columns[number]
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        heading = Text(printable_excerpt((compact and column.compact_heading) or column.heading))
        may_wrap = column.wraps or (column.folds if compact else column.is_key)
        table.add_column(
            heading, justify=justify, overflow="fold", no_wrap=not may_wrap,
            min_width=_compact_width(view, number) if compact else None,
            max_width=_MAX_KEY_WIDTH if column.is_key and not compact else None,
        )  # fmt: skip
    for row in view.cells:
        table.add_row(*(_rich_cell(view.columns[number], row[number]) for number in numbers))
    return table


def _rich_cell(column: Column, text: str) -> Text:
    """A status has the colour that it has everywhere; marks of warnings may stand behind it."""
    style = STATUS_STYLE.get(text.partition("*")[0], "") if column.name == "status" else ""
    return Text(printable_excerpt(text), style=style)


def write_view(view: View, path: Path) -> None:
    """Write ``view`` in the format that the file's ending names; ``ConfigError`` if that is unknown."""
    write_atomic(path, view_encoder(path)(view))


def view_encoder(path: Path) -> Callable[[View], bytes]:
    """Return the encoder for the ending of ``path``; ``ConfigError`` if that is unknown."""
    if path.suffix not in VIEW_ENCODERS:
        raise ConfigError(
            f"cannot write {path}: unknown ending {path.suffix!r}", hint=f"choices: {', '.join(sorted(VIEW_ENCODERS))}"
        )
    return VIEW_ENCODERS[path.suffix]


def view_json(view: View) -> dict[str, Any]:
    """Return ``{"columns", "rows", "notes"}`` with figures in SI units."""
    names = unique_column_names(view)
    return {"columns": names, "rows": [dict(zip(names, row, strict=True)) for row in view.raw], "notes": view.notes}


def unique_column_names(view: View) -> list[str]:
    """The columns' short names; the full ones if two of those were equal."""
    short = [short_name(column.name) for column in view.columns]
    return short if len(set(short)) == len(short) else [column.name for column in view.columns]


_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_cell(value: Any) -> Any:
    """Text without control characters, and with an apostrophe before what a spreadsheet would take for a formula.

    Numbers stay numbers, also the negative ones and those that are text.
    """
    if not isinstance(value, str):
        return value
    text = escape_control_characters(value)
    if not value.startswith(_FORMULA_STARTS):
        return text
    try:
        float(value)
    except ValueError:
        return f"'{text}"
    return text


def _encode_csv(view: View) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(unique_column_names(view))
    writer.writerows([csv_cell(value) for value in row] for row in view.raw)
    return buffer.getvalue().encode()


def _view_frame(view: View) -> pl.DataFrame:
    import polars as pl  # a table on the terminal needs none

    columns = {name: [row[number] for row in view.raw] for number, name in enumerate(unique_column_names(view))}
    return pl.DataFrame(columns, strict=False)


def parquet_bytes(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def excel_bytes(frame: pl.DataFrame) -> bytes:
    """A workbook of one sheet. Texts like formulas or addresses stay texts: another user may have written them."""
    try:
        import xlsxwriter
    except ImportError:
        raise ConfigError(
            "Excel files need the package xlsxwriter", hint=f"install it with: {INSTALL_REPORT}"
        ) from None
    buffer = io.BytesIO()
    options = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "nan_inf_to_errors": True}
    with xlsxwriter.Workbook(buffer, options) as book:
        sheet = book.add_worksheet("hpcbench")
        sheet.write_row(0, 0, frame.columns, book.add_format({"bold": True}))
        for number, row in enumerate(frame.iter_rows(), start=1):
            for column, value in enumerate(row):
                if value is not None:
                    sheet.write(number, column, "; ".join(map(str, value)) if isinstance(value, list) else value)
        sheet.freeze_panes(1, 0)
        sheet.autofilter(0, 0, len(frame), max(0, len(frame.columns) - 1))
    return buffer.getvalue()


_MARKDOWN_SPECIAL = re.compile(r"[\\`*_{}\[\]<>|#~&]")


def _escape_markdown(text: str) -> str:
    return _MARKDOWN_SPECIAL.sub(r"\\\g<0>", printable_excerpt(text))


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_escape_markdown(cell).replace(chr(10), ' ') for cell in cells)} |"


def _encode_markdown(view: View) -> bytes:
    lines = [f"**{_escape_markdown(view.title)}**", "", _markdown_line(column.heading for column in view.columns)]
    lines.append("|" + "|".join("---:" if column.is_number else "---" for column in view.columns) + "|")
    lines += [*map(_markdown_line, view.cells), ""]
    lines += [f"{_escape_markdown(text)}  " for text in (*view.notes, *view.warnings)]
    return "\n".join(lines).rstrip().encode() + b"\n"


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "µ": r"\textmu{}", "→": r"$\to$",
}  # fmt: skip


def _latex_line(cells: Iterable[str]) -> str:
    return " & ".join(map(_latex_text, cells)) + r" \\"


def _latex_text(text: str) -> str:
    return "".join(_LATEX_ESCAPES.get(letter, letter) for letter in printable_excerpt(text))


def _encode_latex(view: View) -> bytes:
    alignment = "".join("r" if column.is_number else "l" for column in view.columns)
    lines = [r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    lines += [_latex_line(column.heading for column in view.columns), r"\midrule", *map(_latex_line, view.cells)]
    notes = [rf"\par{{\footnotesize {_latex_text(text)}\par}}" for text in (*view.notes, *view.warnings)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes]).encode() + b"\n"


VIEW_ENCODERS: dict[str, Callable[[View], bytes]] = {
    ".json": lambda view: encode_indented_json(view_json(view)), ".csv": _encode_csv, ".md": _encode_markdown,
    ".tex": _encode_latex,
    ".parquet": lambda view: parquet_bytes(_view_frame(view)), ".xlsx": lambda view: excel_bytes(_view_frame(view)),
}  # fmt: skip
