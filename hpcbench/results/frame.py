"""Results as a polars frame with one row per run and one column per scalar, named by its path in ``result.json``.
The columns are derived from the records; raw step times and per-rank values are in the files alone."""

from __future__ import annotations

import functools
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import msgspec
import polars

from hpcbench.config.run_spec import RunSpec, sorted_json
from hpcbench.fileio import UnsafeFileError, read_error, read_regular_with_stat
from hpcbench.results.decode import date_of, decode_result, decode_result_unbounded, doubts_of
from hpcbench.results.results_tree import RUN_ID_PATTERN, ClusterTree, CollectedResult
from hpcbench.results.schema import STATUS_BROKEN, FailureRecord, RunMetrics, RunResult, VerificationResult

RESULT_COLUMNS = (
    "run_id", "config_id", "attempt", "sweep", "cluster", "status", "ended_at_s", "environment_digest", "warnings",
    "units", "better",
)  # fmt: skip
PROVENANCE_KEYS = ("hpcbench", "hpcbench_commit", "torch", "submission", "environment_key")
"""Keys of a result's provenance that are columns of the frame, as text."""
FILE_COLUMNS = ("file.mtime_ns", "file.size_bytes")
"""Time at which ``result.json`` was written, and its size: a change of either is a change of the result."""
_NESTED_RECORDS: dict[str, type[msgspec.Struct]] = {
    "spec": RunSpec, "metrics": RunMetrics, "verification": VerificationResult, "error": FailureRecord
}  # fmt: skip
JSON_TEXT = "JSON"
"""Tables and lists are text in the frame: their JSON, nothing where they are empty."""
_COLUMN_TYPES = {bool: "Boolean", int: "Int64", float: "Float64", str: "String", dict: JSON_TEXT, list: JSON_TEXT}


class RecordField(NamedTuple):
    """A field of a record: the frame's type, or the record that it holds."""

    name: str
    dtype: str
    record: type[msgspec.Struct] | None = None


@functools.cache
def record_fields(record: type[msgspec.Struct]) -> tuple[RecordField, ...]:
    """The fields of ``record`` in their order."""
    hints = typing.get_type_hints(record)
    fields = []
    for name in record.__struct_fields__:
        (kind,) = (kind for kind in _hint_types(hints[name]) if kind is not NoneType)
        is_record = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        fields.append(RecordField(name, "", kind) if is_record else RecordField(name, _COLUMN_TYPES[kind]))
    return tuple(fields)


def _hint_types(hint: Any) -> list[Any]:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _hint_types(typing.get_args(hint)[0])
    if origin is typing.Union or isinstance(hint, types.UnionType):
        return [kind for member in typing.get_args(hint) for kind in _hint_types(member)]
    if origin is typing.Literal:
        return list({type(value) for value in typing.get_args(hint)})
    return [origin or hint]


@functools.cache
def column_types() -> dict[str, str]:
    """Every column's name and polars type, in order."""
    columns = {column.name: column.dtype for column in record_fields(RunResult) if column.name in RESULT_COLUMNS}
    for name, record in _NESTED_RECORDS.items():
        columns |= _flatten_record(name, record)
    columns |= {f"provenance.{name}": "String" for name in PROVENANCE_KEYS}
    return columns | dict.fromkeys(FILE_COLUMNS, "Int64")


def _flatten_record(name: str, record: type[msgspec.Struct]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for column in record_fields(record):
        path = f"{name}.{column.name}"
        columns |= _flatten_record(path, column.record) if column.record else {path: column.dtype}
    return columns


def results_frame(results: Sequence[RunResult], files: Sequence[tuple[int, int]] | None = None) -> polars.DataFrame:
    """``results`` as a frame; ``files`` are their modification times (ns) and sizes (bytes), where there are files.

    Raises ``TypeError`` or ``OverflowError`` where a number is beyond 64 bits.
    """
    columns: dict[str, Sequence[Any]] = {name: list(map(attrgetter(name), results)) for name in RESULT_COLUMNS}
    columns["ended_at_s"] = _ends_s(results, files)
    texts = [[*result.warnings, *doubts_of(result)] for result in results]
    columns["warnings"] = [sorted_json(warnings) if warnings else None for warnings in texts]
    for name in ("units", "better"):
        columns[name] = [sorted_json(value) if value else None for value in columns[name]]
    for name, record in _NESTED_RECORDS.items():
        _add_record_columns(columns, name, record, list(map(attrgetter(name), results)))
    for name in PROVENANCE_KEYS:
        values = [result.provenance.get(name) for result in results]
        columns[f"provenance.{name}"] = [value if isinstance(value, str) else None for value in values]
    return _make_frame(columns, files, len(results))


def _ends_s(results: Sequence[RunResult], files: Sequence[tuple[int, int]] | None) -> list[float | None]:
    """Return the date of each result (Unix time); the time of its file, which copying may change, where it has none."""
    ends_s = [date_of(result) for result in results]
    if files is None:
        return ends_s
    return [mtime_ns / 1e9 if end_s is None else end_s for end_s, (mtime_ns, _) in zip(ends_s, files, strict=True)]


def _add_record_columns(
    columns: dict[str, Sequence[Any]], path: str, record: type[msgspec.Struct], values: Sequence[Any]
) -> None:
    """The columns of ``record`` below ``path``; ``values`` are records or ``None``."""
    if not any(values):
        # Most runs have no error and were not verified: no need to look at each.
        columns |= dict.fromkeys(_flatten_record(path, record), [None] * len(values))
        return
    fields = record_fields(record)
    blank = (None,) * len(fields)
    astuple = msgspec.structs.astuple
    rows = [blank if value is None else astuple(value) for value in values]
    for entry, column in zip(fields, zip(*rows, strict=True) if rows else [()] * len(fields), strict=True):
        name = f"{path}.{entry.name}"
        if entry.record is not None:
            _add_record_columns(columns, name, entry.record, column)
        elif entry.dtype == JSON_TEXT:
            columns[name] = [sorted_json(value) if value else None for value in column]
        else:
            columns[name] = column


def _make_frame(
    columns: dict[str, Sequence[Any]], files: Sequence[tuple[int, int]] | None, rows: int
) -> polars.DataFrame:
    """The frame of ``columns``, with the states of ``files``; columns that are absent are empty."""
    if files is not None:
        columns |= {name: [state[number] for state in files] for number, name in enumerate(FILE_COLUMNS)}
    empty = [None] * rows
    return polars.DataFrame(
        [_make_series(name, columns.get(name, empty), dtype) for name, dtype in column_types().items()]
    )


def _make_series(name: str, values: Sequence[Any], dtype: str) -> polars.Series:
    kind = polars.String if dtype == JSON_TEXT else getattr(polars, dtype)
    first = values[0] if values else None
    if values and not isinstance(first, int | float) and values.count(first) == len(values):
        # Most parameters stand at one value: a column of it costs nothing.
        # ``polars.repeat`` would start the whole query engine for it.
        column: polars.Series = polars.Series(name, [first], dtype=kind).new_from_index(0, len(values))
        return column
    return polars.Series(name, values, dtype=kind)


def broken_results_frame(
    entries: Iterable[CollectedResult], files: Sequence[tuple[int, int]] | None = None
) -> polars.DataFrame:
    """Runs whose result cannot be read: status ``broken``, the reason as ``error.message``."""
    broken = list(entries)
    columns: dict[str, Sequence[Any]] = {
        "run_id": [entry.run_id for entry in broken], "cluster": [entry.cluster for entry in broken],
        "status": [STATUS_BROKEN] * len(broken), "error.type": ["BrokenFile"] * len(broken),
        "error.message": [entry.problem for entry in broken],
    }  # fmt: skip
    return _make_frame(columns, files, len(broken))


def collected_frame(entries: Iterable[CollectedResult]) -> polars.DataFrame:
    """Return collected results and broken files as a frame, in their order."""
    collected = list(entries)
    frame = polars.concat([
        results_frame([entry.result for entry in collected if entry.result is not None]),
        broken_results_frame(entry for entry in collected if entry.result is None),
    ])  # fmt: skip
    order = sorted(range(len(collected)), key=lambda number: collected[number].result is None)
    # A result lies in the tree of the cluster that it is shown under.
    clusters = polars.Series("cluster", [collected[number].cluster for number in order], dtype=polars.String)
    positions = polars.Series("_order", order, dtype=polars.Int64)
    return frame.with_columns(clusters, positions).sort("_order").drop("_order")


_CHUNK_RESULTS = 2000
"""Results that are in memory as records at a time."""
NO_FILE_STATE = (0, 0)


class FileState(NamedTuple):
    """The state by which a changed file is recognised."""

    mtime_ns: int
    size_bytes: int


def file_state(path: Path | str) -> FileState | None:
    """The state of what lies at ``path``, a link included; ``None`` where there is nothing."""
    try:
        state = os.lstat(path)
    except OSError:
        return None
    return FileState(state.st_mtime_ns, state.st_size)


@dataclass
class FolderScan:
    """The result of scanning folders: new or changed results, and other entries."""

    frames: list[polars.DataFrame] = field(default_factory=list)
    unchanged: set[str] = field(default_factory=set)
    """Runs whose result is in the known state."""
    unfinished: list[str] = field(default_factory=list)
    """Runs that have a folder and no result."""
    read_count: int = 0


class FolderScanner:
    """Reads results of ``tree`` into chunks of a frame."""

    def __init__(self, tree: ClusterTree) -> None:
        self._tree = tree
        self._decoded: list[tuple[RunResult, tuple[int, int]]] = []
        self._broken: list[tuple[CollectedResult, tuple[int, int]]] = []
        self._scan = FolderScan()

    def read(self, names: Iterable[str], states: Mapping[str, tuple[int, int]]) -> FolderScan:
        """Return the results in the folders ``names``, without those that are still in a known state.

        A file that is no result, and a link in place of a run, are rows with the reason.

        Args:
            names: names of folders below ``runs``, two hexadecimal digits each.
            states: modification time (ns) and size (bytes) of results that are in the index already, by ``run_id``.

        Raises:
            StorageError: a folder may not be read.
        """
        for name in names:
            folder = f"{self._tree.root}/runs/{name}"
            for run_id, is_link in self._changed_runs(folder, states):
                if not (RUN_ID_PATTERN.fullmatch(run_id) and run_id.startswith(name)):
                    continue
                if is_link:
                    self._add_broken(run_id, f"{folder}/{run_id} is a link: none is followed inside a results tree")
                else:
                    self._read(f"{folder}/{run_id}/result.json", run_id)
            if len(self._decoded) >= _CHUNK_RESULTS:
                self._close_chunk()
        self._close_chunk()
        return self._scan

    def _changed_runs(self, folder: str, states: Mapping[str, tuple[int, int]]) -> list[tuple[str, bool]]:
        """Return name, and whether it is a link, of the entries of ``folder`` with another state, in order."""
        changed = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    run_id, is_link = entry.name, entry.is_symlink()
                    is_known = run_id in states and not is_link
                    # In a large tree most of what is looked at takes this way.
                    if is_known and file_state(f"{folder}/{run_id}/result.json") == states[run_id]:
                        self._scan.unchanged.add(run_id)
                    else:
                        changed.append((run_id, is_link))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise read_error(error, Path(folder)) from error
        return sorted(changed)

    def _read(self, path: str, run_id: str) -> None:
        try:
            data, state = read_regular_with_stat(path)
        except (FileNotFoundError, NotADirectoryError):
            self._scan.unfinished.append(run_id)
            return
        except UnsafeFileError as error:
            self._add_broken(run_id, f"result.json is broken: {error.strerror}", file_state(path))
            return
        except OSError as error:
            self._add_broken(run_id, str(read_error(error, Path(path))).replace("\n ", ";"), file_state(path))
            return
        seen = FileState(state.st_mtime_ns, state.st_size)
        try:
            self._decoded.append((decode_result_unbounded(data, run_id), seen))
        except msgspec.MsgspecError as error:
            self._add_broken(run_id, f"result.json is broken: {error}", seen)
        self._scan.read_count += 1

    def _add_broken(self, run_id: str, problem: str, state: tuple[int, int] | None = None) -> None:
        self._broken.append((CollectedResult(self._tree.root.name, run_id, None, problem), state or NO_FILE_STATE))

    def _close_chunk(self) -> None:
        if self._decoded:
            try:
                frame = results_frame(*map(list, zip(*self._decoded, strict=True)))
            except (TypeError, OverflowError):
                self._decoded = [pair for pair in self._decoded if self._fits(pair)]
                frame = results_frame([result for result, _ in self._decoded], [state for _, state in self._decoded])
            # A result is shown under the cluster of the tree that it lies in, whatever it contains.
            self._scan.frames.append(frame.with_columns(cluster=polars.lit(self._tree.root.name, dtype=polars.String)))
        if self._broken:
            self._scan.frames.append(broken_results_frame(*map(list, zip(*self._broken, strict=True))))
        self._decoded, self._broken = [], []

    def _fits(self, pair: tuple[RunResult, tuple[int, int]]) -> bool:
        """Whether every integer of a result fits into a column; it is noted where one does not."""
        result, state = pair
        try:
            decode_result(msgspec.json.encode(result), result.run_id)
            results_frame([result])
        except (msgspec.MsgspecError, TypeError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            self._add_broken(result.run_id, f"result.json is broken: {reason}", state)
            return False
        return True
