"""Results as files and JSON documents. Tables and CSV files are for people; JSON and Parquet keep every value."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.config.spec import as_dict
from hpcbench.fileio import atomic_file, write_atomic
from hpcbench.report.files import encoder, excel
from hpcbench.report.load import with_options
from hpcbench.report.rows import Row
from hpcbench.report.view import Column, View
from hpcbench.results.columns import FILE_COLUMNS
from hpcbench.results.schema import RunResult, result_json

if TYPE_CHECKING:
    import polars


def export_json(results: Iterable[RunResult], path: Path) -> int:
    """Write ``{"results": [...]}``, whole results one by one as they come; how many there were."""
    count = 0
    with atomic_file(path) as file:
        file.write(b'{"results": [')
        for result in results:
            text = msgspec.json.format(msgspec.json.encode(result_json(result)), indent=1)
            file.write(b",\n" + text if count else b"\n" + text)
            count += 1
        file.write(b"\n]}\n")
    return count


def export_table(frame: polars.DataFrame, path: Path) -> None:
    """Write results in the format that the file's ending names: one row a run, as ``load`` gives it, lists as text."""
    import polars as pl

    encode = encoder(path)
    frame = with_options(frame.drop(FILE_COLUMNS)).with_columns(pl.col("warnings").list.join("; "))
    nested = [name for name, dtype in frame.schema.items() if dtype.is_nested()]
    frame = frame.with_columns(
        pl.Series(name, [None if one is None else str(one) for one in frame[name].to_list()], dtype=pl.String)
        for name in nested
    )
    if path.suffix in _WRITERS:
        buffer = io.BytesIO()
        _WRITERS[path.suffix](frame, buffer)
        write_atomic(path, buffer.getvalue())
        return
    columns = [Column(name, name, is_number=dtype.is_numeric()) for name, dtype in frame.schema.items()]
    raw = [list(row) for row in frame.iter_rows()]
    cells = [["" if value is None else str(value) for value in row] for row in raw]
    write_atomic(path, encode(View("results", columns, raw, cells)))


_WRITERS: dict[str, Any] = {
    ".csv": lambda frame, file: frame.write_csv(file), ".parquet": lambda frame, file: frame.write_parquet(file),
    ".xlsx": lambda frame, file: file.write(excel(frame)),
}  # fmt: skip


def table_json(rows: list[Row]) -> dict[str, Any]:
    """``{"columns", "rows"}``: the table with all figures in SI units."""
    documents = []
    for row in rows:
        # dataclasses.asdict would copy every list and parameter first.
        document = {name: getattr(row, name) for name in Row.__dataclass_fields__}
        document["spec"] = as_dict(row.spec) if row.spec is not None else None
        documents.append(document)
    return {"columns": list(Row.__dataclass_fields__), "rows": documents}
