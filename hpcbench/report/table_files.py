"""Renderers of the table model for files, and encoders of full results.

Apart from ``table_output``: a command that writes a file or prints JSON starts without rich."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import polars as pl

from hpcbench.errors import INSTALL_REPORT, ConfigError
from hpcbench.fileio import encode_indented_json, escape_control_characters, printable_excerpt, write_atomic
from hpcbench.report.table_model import View, short_name


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
    columns = {name: [row[number] for row in view.raw] for number, name in enumerate(unique_column_names(view))}
    return pl.DataFrame(columns, strict=False)


def parquet_bytes(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def excel_bytes(frame: pl.DataFrame) -> bytes:
    """Return a workbook of one sheet. Texts like formulas or addresses stay texts: another user may have written them.

    Raises:
        ConfigError: the package xlsxwriter is not installed.
    """
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
