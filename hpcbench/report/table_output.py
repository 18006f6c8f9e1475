"""Renderers of the table model for terminals and files, and export of full results."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcbench.config.run_spec import spec_document
from hpcbench.errors import ConfigError
from hpcbench.fileio import open_atomic, printable_excerpt, write_atomic
from hpcbench.report.column_names import short_name
from hpcbench.report.configurations import ResultRow
from hpcbench.report.load_results import with_all_option_columns
from hpcbench.report.table_model import Column, View
from hpcbench.results.frame import FILE_COLUMNS
from hpcbench.results.schema import RunResult, result_document

if TYPE_CHECKING:
    import polars

_COLUMN_GAP = 2
"""A blank behind each column, and one that the box puts between them."""
_MAX_KEY_WIDTH = 24
"""Longer keys are folded within their column."""


def render_view(view: View, width: int) -> RenderableType:
    """``view`` for a terminal of ``width`` columns."""
    parts: list[RenderableType] = [Text(printable_excerpt(view.title), style="bold"), Text("")]
    for block in fold_columns(view, width):
        parts += [_block_table(view, block), Text("")]
    parts += [Text(printable_excerpt(note), style="dim") for note in view.notes]
    parts += [Text(printable_excerpt(text), style="yellow") for text in view.warnings]
    return Group(*parts)


def fold_columns(view: View, width: int) -> list[list[int]]:
    """The columns of each block: the keys, and as many others as fit beside them, one at least."""
    widths = [_column_width(view, place) for place in range(len(view.columns))]
    keys = [place for place, column in enumerate(view.columns) if column.is_key]
    others = [place for place, column in enumerate(view.columns) if not column.is_key]
    room = width - sum(widths[place] + _COLUMN_GAP for place in keys)
    found: list[list[int]] = []
    left = 0
    for place in others:
        if not found or widths[place] + _COLUMN_GAP > left:
            if found and view.columns[place].can_go:
                continue
            found.append([*keys])
            left = room
        found[-1].append(place)
        left -= widths[place] + _COLUMN_GAP
    return found or [keys]


def _column_width(view: View, place: int) -> int:
    texts = [view.columns[place].heading, *(row[place] for row in view.cells)]
    widest = max(Text(printable_excerpt(text)).cell_len for text in texts)
    return min(widest, _MAX_KEY_WIDTH) if view.columns[place].is_key else widest


def _block_table(view: View, block: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for place in block:
        column = view.columns[place]
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(
            Text(printable_excerpt(column.heading)), justify=justify, overflow="fold", no_wrap=not column.is_key,
            max_width=_MAX_KEY_WIDTH if column.is_key else None,
        )  # fmt: skip
    for row in view.cells:
        table.add_row(*(Text(printable_excerpt(row[place])) for place in block))
    return table


def write_view(view: View, path: Path) -> None:
    """Write ``view`` in the format that the file's ending names; ``ConfigError`` for one that is unknown."""
    write_atomic(path, view_encoder(path)(view))


def view_encoder(path: Path) -> Callable[[View], bytes]:
    """What makes the bytes of a file called ``path``."""
    if path.suffix not in VIEW_ENCODERS:
        raise ConfigError(
            f"cannot write {path}: unknown ending {path.suffix!r}", hint=f"choices: {', '.join(sorted(VIEW_ENCODERS))}"
        )
    return VIEW_ENCODERS[path.suffix]


def view_json(view: View) -> dict[str, Any]:
    """``{"columns", "rows"}``: figures in SI units."""
    names = unique_column_names(view)
    return {"columns": names, "rows": [dict(zip(names, row, strict=True)) for row in view.raw], "notes": view.notes}


def unique_column_names(view: View) -> list[str]:
    """The columns' short names; whole ones where two would be the same."""
    short = [short_name(column.name) for column in view.columns]
    return short if len(set(short)) == len(short) else [column.name for column in view.columns]


def _encode_json(view: View) -> bytes:
    return msgspec.json.format(msgspec.json.encode(view_json(view)), indent=1) + b"\n"


def _encode_csv(view: View) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(unique_column_names(view))
    writer.writerows(view.raw)
    return buffer.getvalue().encode()


def _view_frame(view: View) -> polars.DataFrame:
    import polars

    columns = {name: [row[place] for row in view.raw] for place, name in enumerate(unique_column_names(view))}
    return polars.DataFrame(columns, strict=False)


def _encode_parquet(view: View) -> bytes:
    buffer = io.BytesIO()
    _view_frame(view).write_parquet(buffer)
    return buffer.getvalue()


def _encode_excel(view: View) -> bytes:
    return excel_bytes(_view_frame(view))


def excel_bytes(frame: polars.DataFrame) -> bytes:
    """A workbook of one sheet. What looks like a formula or an address stays text: it may be somebody else's."""
    try:
        import xlsxwriter
    except ImportError:
        raise ConfigError(
            "Excel files need the package xlsxwriter", hint="install it with: pip install 'hpcbench[report]'"
        ) from None
    buffer = io.BytesIO()
    options = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "nan_inf_to_errors": True}
    with xlsxwriter.Workbook(buffer, options) as book:
        sheet = book.add_worksheet("hpcbench")
        bold = book.add_format({"bold": True})
        sheet.write_row(0, 0, frame.columns, bold)
        for number, row in enumerate(frame.iter_rows(), start=1):
            for place, value in enumerate(row):
                if value is not None:
                    sheet.write(number, place, "; ".join(map(str, value)) if isinstance(value, list) else value)
        sheet.freeze_panes(1, 0)
        sheet.autofilter(0, 0, len(frame), max(0, len(frame.columns) - 1))
    return buffer.getvalue()


def _encode_markdown(view: View) -> bytes:
    def line(cells: list[str]) -> str:
        return (
            "| "
            + " | ".join(
                _MARKDOWN_SPECIAL.sub(r"\\\g<0>", printable_excerpt(cell)).replace("\n", " ") for cell in cells
            )
            + " |"
        )

    rule = "|" + "|".join("---:" if column.is_number else "---" for column in view.columns) + "|"
    lines = [
        f"**{_MARKDOWN_SPECIAL.sub(_escape_markdown, view.title)}**",
        "",
        line([column.heading for column in view.columns]),
        rule,
    ]
    lines += [line(row) for row in view.cells]
    lines += [
        "",
        *(
            _MARKDOWN_SPECIAL.sub(_escape_markdown, printable_excerpt(note)) + "  "
            for note in [*view.notes, *view.warnings]
        ),
    ]
    return "\n".join(lines).rstrip().encode() + b"\n"


_MARKDOWN_SPECIAL = re.compile(r"[\\`*_{}\[\]<>|#~&]")


def _escape_markdown(match: re.Match[str]) -> str:
    return "\\" + match[0]


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "µ": r"\textmu{}",
}  # fmt: skip


def _encode_latex(view: View) -> bytes:
    def line(cells: list[str]) -> str:
        return (
            " & ".join("".join(_LATEX_ESCAPES.get(one, one) for one in printable_excerpt(cell)) for cell in cells)
            + r" \\"
        )

    shape = "".join("r" if column.is_number else "l" for column in view.columns)
    lines = [r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{shape}}}", r"\toprule"]
    lines += [line([column.heading for column in view.columns]), r"\midrule", *map(line, view.cells)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]).encode() + b"\n"


VIEW_ENCODERS: dict[str, Callable[[View], bytes]] = {
    ".json": _encode_json, ".csv": _encode_csv, ".parquet": _encode_parquet, ".xlsx": _encode_excel,
    ".md": _encode_markdown, ".tex": _encode_latex,
}  # fmt: skip


def export_json(results: Iterable[RunResult], path: Path) -> int:
    """Write ``{"results": [...]}``, whole results one by one as they come; how many there were."""
    count = 0
    with open_atomic(path) as file:
        file.write(b'{"results": [')
        for result in results:
            text = msgspec.json.format(msgspec.json.encode(result_document(result)), indent=1)
            file.write(b",\n" + text if count else b"\n" + text)
            count += 1
        file.write(b"\n]}\n")
    return count


def export_table(frame: polars.DataFrame, path: Path) -> None:
    """Write results in the format that the file's ending names: one row a run, as ``load`` gives it, lists as text."""
    import polars as pl

    encode = view_encoder(path)
    frame = with_all_option_columns(frame.drop(FILE_COLUMNS)).with_columns(pl.col("warnings").list.join("; "))
    nested = [name for name, dtype in frame.schema.items() if dtype.is_nested()]
    frame = frame.with_columns(
        pl.Series(name, [None if one is None else str(one) for one in frame[name].to_list()], dtype=pl.String)
        for name in nested
    )
    if path.suffix in _FRAME_WRITERS:
        buffer = io.BytesIO()
        _FRAME_WRITERS[path.suffix](frame, buffer)
        write_atomic(path, buffer.getvalue())
        return
    columns = [Column(name, name, is_number=dtype.is_numeric()) for name, dtype in frame.schema.items()]
    raw = [list(row) for row in frame.iter_rows()]
    cells = [["" if value is None else str(value) for value in row] for row in raw]
    write_atomic(path, encode(View("results", columns, raw, cells)))


_FRAME_WRITERS: dict[str, Any] = {
    ".csv": lambda frame, file: frame.write_csv(file), ".parquet": lambda frame, file: frame.write_parquet(file),
    ".xlsx": lambda frame, file: file.write(excel_bytes(frame)),
}  # fmt: skip


def table_json(rows: list[ResultRow]) -> dict[str, Any]:
    """``{"columns", "rows"}``: the table with all figures in SI units."""
    documents = []
    for row in rows:
        # dataclasses.asdict would copy every list and parameter first.
        document = {name: getattr(row, name) for name in ResultRow.__dataclass_fields__}
        document["spec"] = spec_document(row.spec) if row.spec is not None else None
        documents.append(document)
    return {"columns": list(ResultRow.__dataclass_fields__), "rows": documents}
