"""Results as files: one row per run, or whole results as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import polars as pl

from hpcbench.fileio import open_atomic, write_atomic
from hpcbench.report.load_results import with_all_option_columns
from hpcbench.report.phrases import or_empty
from hpcbench.report.table_model import Column, View
from hpcbench.report.table_output import csv_cell, excel_bytes, parquet_bytes, view_encoder
from hpcbench.results.frame import FILE_COLUMNS
from hpcbench.results.schema import RunResult, result_document

_MAX_KEY_WIDTH = 24
"""Longer keys are folded within their column."""
_MIN_FOLDED_WIDTH = 12
"""A column whose cells may be folded keeps so many characters."""


def _frame_csv(frame: pl.DataFrame) -> bytes:
    changed = {}
    for name in (name for name, dtype in frame.schema.items() if dtype == pl.String):
        # Most columns hold few different texts, and hardly any of them changes.
        cells = {text: csv_cell(text) for text in frame[name].unique().drop_nulls()}
        if escaped := {text: cell for text, cell in cells.items() if cell != text}:
            changed[name] = pl.col(name).replace(escaped)
    return frame.with_columns(**changed).write_csv().encode()


_FRAME_ENCODERS: dict[str, Callable[[pl.DataFrame], bytes]] = {
    ".csv": _frame_csv, ".parquet": parquet_bytes, ".xlsx": excel_bytes,
}  # fmt: skip


def export_json(results: Iterable[RunResult], path: Path) -> int:
    """Write ``{"results": [...]}``, result by result, and return their number."""
    count = 0
    with open_atomic(path) as file:
        file.write(b'{"results": [')
        for result in results:
            text = msgspec.json.format(msgspec.json.encode(result_document(result)), indent=1)
            file.write(b",\n" + text if count else b"\n" + text)
            count += 1
        file.write(b"\n]}\n")
    return count


def export_table(frame: pl.DataFrame, path: Path) -> None:
    """Write results in the format that the file's ending names: one row per run as in ``load``, lists as text."""
    encode = view_encoder(path)
    frame = with_all_option_columns(frame.drop(FILE_COLUMNS)).with_columns(pl.col("warnings").list.join("; "))
    nested = [name for name, dtype in frame.schema.items() if dtype.is_nested()]
    frame = frame.with_columns(
        pl.Series(name, [None if value is None else str(value) for value in frame[name].to_list()], dtype=pl.String)
        for name in nested
    )
    if path.suffix in _FRAME_ENCODERS:
        write_atomic(path, _FRAME_ENCODERS[path.suffix](frame))
        return
    columns = [Column(name, name, is_number=dtype.is_numeric()) for name, dtype in frame.schema.items()]
    raw = [list(row) for row in frame.iter_rows()]
    write_atomic(path, encode(View("results", columns, raw, [[or_empty(value) for value in row] for row in raw])))
