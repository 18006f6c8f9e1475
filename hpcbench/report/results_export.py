"""Tables of results as views, frames and files: what `hpcbench table` and `hpcbench collect` show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.fileio import open_atomic, write_atomic
from hpcbench.paths import results_folder
from hpcbench.report.configurations import filter_launches, rows_from_frame, sort_rows
from hpcbench.report.load_results import load_frame, with_all_option_columns
from hpcbench.report.phrases import or_empty
from hpcbench.report.pivot_table import AddPredictions, TableRequest, parse_table_request, pivot_view
from hpcbench.report.results_table import results_data_view
from hpcbench.report.table_model import Column, View
from hpcbench.report.table_output import csv_cell, excel_bytes, parquet_bytes, unique_column_names, view_encoder
from hpcbench.results.frame import FILE_COLUMNS
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import RunResult, result_document

_MAX_KEY_WIDTH = 24
"""Longer keys are folded within their column."""
_MIN_FOLDED_WIDTH = 12
"""A column whose cells may be folded keeps so many characters."""


def grouped_view(
    tree: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, request: TableRequest, title: str
) -> tuple[View, int]:
    """A table with the keys of ``request``, and the number of runs before its filter."""
    frame = load_frame(tree, sources, clusters, request.columns())
    add_predictions: AddPredictions | None = None
    if request.predictions:
        # Imported here: other tables need no oracle.
        from hpcbench.report.oracle_validation import ClusterForecasts
        from hpcbench.report.prediction_frames import with_predictions

        add_predictions = functools.partial(with_predictions, forecasts=ClusterForecasts(tree))
    return pivot_view(frame, request, title, add_predictions), len(frame)


def table(
    *sources: str | Path, results: str | Path | None = None, clusters: Sequence[str] | None = None, **options: Any
) -> pl.DataFrame:
    """Return the rows of ``hpcbench table`` as a frame with short column names, in SI units.

        frame = hpcbench.table("scaling", by="strategy,nodes", metrics="samples_per_s")

    Args:
        sources: as in ``load``.
        results: the tree of the sweeps; else ``$HPCBENCH_RESULTS``, else ``results``.
        clusters: only these.
        options: those of the command as text: ``by``, ``pivot``, ``metrics``, ``where``, ``baseline``, ``scaling``,
            ``best``, ``sort``, ``layout``.

    Raises:
        HpcbenchError: there is no such source, column or option.
    """
    known = ("by", "pivot", "metrics", "where", "baseline", "scaling", "best", "sort", "layout")
    for name in options:
        if name not in known:
            raise ConfigError(f"table() has no option {name!r}", hint=did_you_mean(name, known))
    request = parse_table_request(**options)
    tree, names = ResultsTree(results_folder(str(results) if results is not None else None)), [*map(str, sources)]
    if request.is_grouped:
        view, _ = grouped_view(tree, names, clusters, request, "table")
    else:
        rows = rows_from_frame(filter_launches(load_frame(tree, names, clusters), request.where), request.baseline)
        view = results_data_view(sort_rows(rows, request.sort) if request.sort else rows, "table")
    return pl.DataFrame(view.raw, unique_column_names(view), orient="row", infer_schema_length=None, strict=False)


def _frame_csv(frame: pl.DataFrame) -> bytes:
    texts = [name for name, dtype in frame.schema.items() if dtype == pl.String]
    cells = [pl.Series(name, [csv_cell(value) for value in frame[name].to_list()], dtype=pl.String) for name in texts]
    return frame.with_columns(cells).write_csv().encode()


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
