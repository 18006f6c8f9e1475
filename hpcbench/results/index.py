"""The index of a results tree: a Parquet file that caches all results and is updated from changed folders only.
It is a cache that may be deleted at any time. A folder is read again if its modification time changed, or was too
recent to be trusted.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars

from hpcbench.errors import StorageError
from hpcbench.fileio import MAX_GENERATED_FILE_BYTES, read_regular, write_atomic
from hpcbench.paths import cache_folder
from hpcbench.results.frame import (
    NO_FILE_STATE,
    FolderScanner,
    broken_results_frame,
    column_types,
    file_state,
    results_frame,
)
from hpcbench.results.results_tree import ClusterTree, collect_links
from hpcbench.results.schema import STATUS_OK

INDEX_FILE_NAME = ".index.parquet"
_FORMAT_VERSION = 1
_METADATA_KEY = "hpcbench"
_MTIME_RESOLUTION_NS = 2 * 10**9
"""Some file systems count whole seconds, or pairs of them."""
_CLOCK_SKEW_NS = 60 * 10**9
"""Allowed difference (ns) between this machine's clock and the tree's, where the tree's cannot be read."""
_MAX_UNINDEXED_ROWS = 1000
"""So many changed results are read again each time, rather than writing the whole index for them."""


class _IndexHeader(msgspec.Struct):
    format: int
    columns: str
    folders: dict[str, int]
    """Modification time (ns) of each folder when it was read; 0 if it was too recent to be trusted."""
    unfinished: list[str]


class _StoredIndex:
    """An index as it lies on disk."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        text = polars.read_parquet_metadata(io.BytesIO(data)).get(_METADATA_KEY, "")
        self.header = msgspec.json.decode(text, type=_IndexHeader)
        if self.header.format != _FORMAT_VERSION or self.header.columns != _hash_column_types():
            raise ValueError("of another version")

    def frame(self, columns: Sequence[str] | None = None) -> polars.DataFrame:
        return polars.read_parquet(io.BytesIO(self.data), columns=None if columns is None else list(columns))


def read_indexed_results(tree: ClusterTree, columns: Sequence[str] | None = None) -> polars.DataFrame:
    """Every result of ``tree`` as it is now, through the index; some columns of ``columns.schema``, or all.

    Raises ``StorageError`` where the tree may not be read. An index that cannot be read or written costs time only.
    """
    mtimes_ns = tree.prefix_mtimes_ns()
    stored = _read_newest_index(tree)
    frame = _update_index(tree, stored, mtimes_ns, columns) if stored else _rebuild_index(tree, mtimes_ns)
    links = list(collect_links(tree))
    if links:
        # A row for every link where a folder of runs should be; they are in no index.
        frame = polars.concat([frame, broken_results_frame(links).select(frame.columns)])
    return frame if columns is None else frame.select(columns)


def _rebuild_index(tree: ClusterTree, mtimes_ns: dict[str, int]) -> polars.DataFrame:
    clock_ns = _trusted_before_ns(tree)
    with _garbage_collection_paused():
        scan = FolderScanner(tree).read(mtimes_ns, {})
    frame = polars.concat(scan.frames) if scan.frames else results_frame([])
    if mtimes_ns:
        _write_index(tree, frame, _trusted_mtimes_ns(mtimes_ns, mtimes_ns, clock_ns), scan.unfinished)
    return frame


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Records have no cycles: looking for some among a hundred thousand only takes time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _update_index(
    tree: ClusterTree, stored: _StoredIndex, mtimes_ns: dict[str, int], columns: Sequence[str] | None
) -> polars.DataFrame:
    """The index with changed folders read anew and those without a folder left out; ``columns`` of it at least."""
    folders, unfinished = stored.header.folders, stored.header.unfinished
    row_states = stored.frame(["run_id", "status", "file.mtime_ns", "file.size_bytes"])
    stale = {name for name, mtime_ns in mtimes_ns.items() if folders.get(name) != mtime_ns}
    # Folders of runs whose result may have changed without their folder telling: none yet, not ok, broken.
    runs = f"{tree.root}/runs"
    open_ends = row_states.filter(polars.col("status") != STATUS_OK)
    changed = {
        run_id[:2] for run_id in unfinished if file_state(f"{runs}/{run_id[:2]}/{run_id}/result.json") is not None
    }
    for run_id, _, mtime_ns, size_bytes in open_ends.iter_rows():
        seen = file_state(f"{runs}/{run_id[:2]}/{run_id}/result.json") or NO_FILE_STATE
        if tuple(seen) != (mtime_ns, size_bytes):
            changed.add(run_id[:2])
    stale |= changed & mtimes_ns.keys()
    if not stale and folders.keys() <= mtimes_ns.keys():
        return stored.frame(columns)
    clock_ns = _trusted_before_ns(tree)
    prefix = polars.col("run_id").str.slice(0, 2)
    touched = row_states.filter(prefix.is_in(list(stale)))
    states = {row[0]: row[2:] for row in touched.iter_rows() if row[2:] != NO_FILE_STATE}
    scan = FolderScanner(tree).read(sorted(stale), states)
    gone = [run_id for run_id in touched["run_id"] if run_id not in scan.unchanged]
    stays = row_states.select(prefix.is_in(list(mtimes_ns)) & ~polars.col("run_id").is_in(gone)).to_series()
    rows = int(stays.sum()) + sum(map(len, scan.frames))
    changes = scan.read_count + len(gone)
    rows_by_reading = len(row_states) + scan.read_count - len(gone)
    is_worth_writing = changes > min(_MAX_UNINDEXED_ROWS, rows // 100) or rows != rows_by_reading
    wanted = None if is_worth_writing else columns
    current = stored.frame(wanted).filter(stays)
    frame = polars.concat([current, *(chunk.select(current.columns) for chunk in scan.frames)])
    if is_worth_writing:
        unread = [run_id for run_id in unfinished if run_id[:2] in mtimes_ns.keys() - stale]
        believed = {**folders, **_trusted_mtimes_ns(mtimes_ns, stale, clock_ns)}
        heads = {name: mtime_ns for name, mtime_ns in believed.items() if name in mtimes_ns}
        _write_index(tree, frame, heads, unread + scan.unfinished)
    return frame


def _trusted_mtimes_ns(mtimes_ns: dict[str, int], names: Iterable[str], clock_ns: int) -> dict[str, int]:
    return {name: mtimes_ns[name] if mtimes_ns[name] < clock_ns else 0 for name in names}


def _trusted_before_ns(tree: ClusterTree) -> int:
    """Folders that are younger than this could still change without showing it: by the file system's own clock."""
    probe = tree.root / f".index.{os.urandom(4).hex()}.tmp"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return time.time_ns() - _CLOCK_SKEW_NS
    try:
        return os.fstat(descriptor).st_mtime_ns - _MTIME_RESOLUTION_NS
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            probe.unlink()


def _hash_column_types() -> str:
    return hashlib.sha256(msgspec.json.encode(column_types())).hexdigest()[:16]


def index_paths(tree: ClusterTree) -> list[Path]:
    """Return the possible paths of the index: beside the results, or in the user's cache if that is not writable."""
    digest = hashlib.sha256(os.fsencode(tree.root.resolve())).hexdigest()[:16]
    return [tree.root / INDEX_FILE_NAME, cache_folder() / "index" / f"{digest}.parquet"]


def _read_newest_index(tree: ClusterTree) -> _StoredIndex | None:
    """The younger of the indices that there are; ``None`` where none can be read."""
    existing = [(state, path) for path in index_paths(tree) if (state := file_state(path)) is not None]
    for _, path in sorted(existing, reverse=True):
        # A foreign or damaged file may be anything; polars' own panics are no ordinary exceptions.
        with contextlib.suppress(OSError, ValueError, polars.exceptions.PolarsError, polars.exceptions.PanicException):
            stored = _StoredIndex(read_regular(path, MAX_GENERATED_FILE_BYTES))
            schema: dict[str, Any] = dict(polars.read_parquet_schema(io.BytesIO(stored.data)))
            if stored.frame([]).columns == [] and schema == dict(results_frame([]).schema):
                return stored
    return None


def _write_index(tree: ClusterTree, frame: polars.DataFrame, seen: dict[str, int], unfinished: list[str]) -> None:
    """Write the index where that is allowed; nowhere is no error."""
    header = _IndexHeader(_FORMAT_VERSION, _hash_column_types(), seen, sorted(unfinished))
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="lz4", metadata={_METADATA_KEY: msgspec.json.encode(header).decode()})
    data = buffer.getvalue()
    for path in index_paths(tree):
        try:
            if path.parent != tree.root:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data)
        except (OSError, StorageError):
            continue
        return
