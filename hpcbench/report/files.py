"""A view as a file: figures in SI units for programs, the texts of the terminal for people's documents."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.errors import ConfigError
from hpcbench.fileio import brief, write_atomic
from hpcbench.report.names import short_of
from hpcbench.report.view import View

if TYPE_CHECKING:
    import polars


def write_view(view: View, path: Path) -> None:
    """Write ``view`` in the format that the file's ending names; ``ConfigError`` for one that is unknown."""
    write_atomic(path, encoder(path)(view))


def encoder(path: Path) -> Callable[[View], bytes]:
    """What makes the bytes of a file called ``path``."""
    if path.suffix not in ENCODERS:
        raise ConfigError(
            f"cannot write {path}: unknown ending {path.suffix!r}", hint=f"choices: {', '.join(sorted(ENCODERS))}"
        )
    return ENCODERS[path.suffix]


def view_json(view: View) -> dict[str, Any]:
    """``{"columns", "rows"}``: figures in SI units."""
    names = names_of(view)
    return {"columns": names, "rows": [dict(zip(names, row, strict=True)) for row in view.raw], "notes": view.notes}


def names_of(view: View) -> list[str]:
    """The columns' short names; whole ones where two would be the same."""
    short = [short_of(column.name) for column in view.columns]
    return short if len(set(short)) == len(short) else [column.name for column in view.columns]


def _json(view: View) -> bytes:
    return msgspec.json.format(msgspec.json.encode(view_json(view)), indent=1) + b"\n"


def _csv(view: View) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names_of(view))
    writer.writerows(view.raw)
    return buffer.getvalue().encode()


def _frame(view: View) -> polars.DataFrame:
    import polars

    columns = {name: [row[place] for row in view.raw] for place, name in enumerate(names_of(view))}
    return polars.DataFrame(columns, strict=False)


def _parquet(view: View) -> bytes:
    buffer = io.BytesIO()
    _frame(view).write_parquet(buffer)
    return buffer.getvalue()


def _excel(view: View) -> bytes:
    return excel(_frame(view))


def excel(frame: polars.DataFrame) -> bytes:
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


def _markdown(view: View) -> bytes:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(_MARKDOWN.sub(r"\\\g<0>", brief(cell)).replace("\n", " ") for cell in cells) + " |"

    rule = "|" + "|".join("---:" if column.is_number else "---" for column in view.columns) + "|"
    lines = [f"**{_MARKDOWN.sub(_escaped, view.title)}**", "", line([column.heading for column in view.columns]), rule]
    lines += [line(row) for row in view.cells]
    lines += ["", *(_MARKDOWN.sub(_escaped, brief(note)) + "  " for note in [*view.notes, *view.warnings])]
    return "\n".join(lines).rstrip().encode() + b"\n"


_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>|#~&]")


def _escaped(match: re.Match[str]) -> str:
    return "\\" + match[0]


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "µ": r"\textmu{}",
}  # fmt: skip


def _latex(view: View) -> bytes:
    def line(cells: list[str]) -> str:
        return " & ".join("".join(_LATEX.get(one, one) for one in brief(cell)) for cell in cells) + r" \\"

    shape = "".join("r" if column.is_number else "l" for column in view.columns)
    lines = [r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{shape}}}", r"\toprule"]
    lines += [line([column.heading for column in view.columns]), r"\midrule", *map(line, view.cells)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]).encode() + b"\n"


ENCODERS: dict[str, Callable[[View], bytes]] = {
    ".json": _json, ".csv": _csv, ".parquet": _parquet, ".xlsx": _excel, ".md": _markdown, ".tex": _latex,
}  # fmt: skip
