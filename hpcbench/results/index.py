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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.errors import StorageError
from hpcbench.fileio import MAX_GENERATED_FILE_BYTES, read_regular, write_atomic
from hpcbench.paths import cache_folder
from hpcbench.results.frame import NO_FILE_STATE, FolderScanner, column_types, file_state
from hpcbench.results.schema import STATUS_OK

if TYPE_CHECKING:
    import polars

    from hpcbench.results.results_tree import ClusterTree

INDEX_FILE_NAME = ".index.parquet"
_FORMAT_VERSION = 1
_METADATA_KEY = "hpcbench"
_MTIME_RESOLUTION_NS = 2 * 10**9
"""Some file systems count whole seconds, or pairs of them."""
_CLOCK_SKEW_NS = 60 * 10**9
"""By this machine's clock, where the tree's own cannot be asked."""
_MAX_UNINDEXED_ROWS = 1000
"""So many changed results are read again each time, rather than writing the whole index for them."""


class _IndexHeader(msgspec.Struct):
    """What the index says of itself."""

    format: int
    columns: str
    folders: dict[str, int]
    """By name the modification time that was seen, 0 where it was too young to be believed."""
    unfinished: list[str]


class _StoredIndex:
    """An index as it lies on disk."""

    def __init__(self, data: bytes) -> None:
        import polars

        self.data = data
        head = polars.read_parquet_metadata(io.BytesIO(data)).get(_METADATA_KEY, "")
        self.head = msgspec.json.decode(head, type=_IndexHeader)
        if self.head.format != _FORMAT_VERSION or self.head.columns != _hash_column_types():
            raise ValueError("of another version")

    def frame(self, columns: Sequence[str] | None = None) -> polars.DataFrame:
        import polars

        return polars.read_parquet(io.BytesIO(self.data), columns=None if columns is None else list(columns))


def read_indexed_results(tree: ClusterTree, columns: Sequence[str] | None = None) -> polars.DataFrame:
    """Every result of ``tree`` as it is now, through the index; some columns of ``columns.schema``, or all.

    Raises ``StorageError`` where the tree may not be read. An index that cannot be read or written costs time only.
    """
    now = tree.prefix_mtimes_ns()
    stored = _read_newest_index(tree)
    if stored is None:
        return _select_columns(_rebuild_index(tree, now), columns)
    stale = [name for name, mtime_ns in now.items() if stored.head.folders.get(name) != mtime_ns]
    state = stored.frame(["run_id", "status", "file.mtime_ns", "file.size_bytes"])
    stale = sorted({*stale, *_find_changed_unfinished(tree, state, stored.head.unfinished)} & now.keys())
    gone = stored.head.folders.keys() - now.keys()
    if not stale and not gone:
        return _append_links(tree, stored.frame(columns), columns)
    return _select_columns(_update_index(tree, stored, state, now, stale, columns), columns)


def _select_columns(frame: polars.DataFrame, columns: Sequence[str] | None) -> polars.DataFrame:
    return frame if columns is None else frame.select(columns)


def _append_links(tree: ClusterTree, frame: polars.DataFrame, columns: Sequence[str] | None) -> polars.DataFrame:
    """``frame`` and a row for every link where a folder of runs should be; they are in no index."""
    import polars

    from hpcbench.results.frame import broken_results_frame
    from hpcbench.results.results_tree import collect_links

    links = list(collect_links(tree))
    return polars.concat([frame, _select_columns(broken_results_frame(links), columns)]) if links else frame


def _rebuild_index(tree: ClusterTree, now: dict[str, int]) -> polars.DataFrame:
    import polars

    clock_ns = _trusted_before_ns(tree)
    with _garbage_collection_paused():
        found = FolderScanner(tree).read(now, {})
    frame = polars.concat(found.chunks) if found.chunks else _empty_frame()
    if now:
        _write_index(tree, frame, _trusted_mtimes_ns(now, now, clock_ns), found.unfinished)
    return _append_links(tree, frame, None)


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
    tree: ClusterTree,
    stored: _StoredIndex,
    state: polars.DataFrame,
    now: dict[str, int],
    stale: list[str],
    columns: Sequence[str] | None,
) -> polars.DataFrame:
    """The index with ``stale`` folders read anew and those without a folder left out; ``columns`` of it at least."""
    import polars

    clock_ns = _trusted_before_ns(tree)
    prefix = polars.col("run_id").str.slice(0, 2)
    touched = state.filter(prefix.is_in(stale))
    known = {row[0]: row[2:] for row in touched.iter_rows() if row[2:] != NO_FILE_STATE}
    found = FolderScanner(tree).read(stale, known)
    gone = [run_id for run_id in touched["run_id"] if run_id not in found.kept]
    stays = state.select(prefix.is_in(list(now)) & ~polars.col("run_id").is_in(gone)).to_series()
    rows = int(stays.sum()) + sum(map(len, found.chunks))
    changes = found.read + len(gone)
    is_worth_writing = changes > min(_MAX_UNINDEXED_ROWS, rows // 100) or rows != len(state) + found.read - len(gone)
    wanted = None if is_worth_writing else columns
    kept = stored.frame(wanted).filter(stays)
    frame = polars.concat([kept, *(_select_columns(chunk, wanted) for chunk in found.chunks)])
    if is_worth_writing:
        unread = [one for one in stored.head.unfinished if one[:2] in now.keys() - set(stale)]
        believed = {**stored.head.folders, **_trusted_mtimes_ns(now, stale, clock_ns)}
        heads = {name: mtime_ns for name, mtime_ns in believed.items() if name in now}
        _write_index(tree, frame, heads, unread + found.unfinished)
    return _append_links(tree, frame, wanted)


def _find_changed_unfinished(tree: ClusterTree, state: polars.DataFrame, unfinished: list[str]) -> set[str]:
    """Folders of runs whose result may have changed without their folder telling: none yet, not ok, broken."""
    import polars

    runs = f"{tree.root}/runs"
    open_ends = state.filter(polars.col("status") != STATUS_OK)
    changed = {one[:2] for one in unfinished if file_state(f"{runs}/{one[:2]}/{one}/result.json") is not None}
    for run_id, _, mtime_ns, size_bytes in open_ends.iter_rows():
        seen = file_state(f"{runs}/{run_id[:2]}/{run_id}/result.json") or NO_FILE_STATE
        if tuple(seen) != (mtime_ns, size_bytes):
            changed.add(run_id[:2])
    return changed


def _trusted_mtimes_ns(now: dict[str, int], names: Sequence[str] | dict[str, int], clock_ns: int) -> dict[str, int]:
    return {name: now[name] if now[name] < clock_ns else 0 for name in names}


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
    """Where the index may lie: beside the results, or in the user's cache where that cannot be written."""
    own = hashlib.sha256(os.fsencode(tree.root.resolve())).hexdigest()[:16]
    return [tree.root / INDEX_FILE_NAME, cache_folder() / "index" / f"{own}.parquet"]


def _read_newest_index(tree: ClusterTree) -> _StoredIndex | None:
    """The younger of the indices that there are; ``None`` where none can be read."""
    import polars

    there = [(state, path) for path in index_paths(tree) if (state := file_state(path)) is not None]
    for _, path in sorted(there, reverse=True):
        # A foreign or damaged file may be anything; polars' own panics are no ordinary exceptions.
        with contextlib.suppress(OSError, ValueError, polars.exceptions.PolarsError, polars.exceptions.PanicException):
            found = _StoredIndex(read_regular(path, MAX_GENERATED_FILE_BYTES))
            if found.frame([]).columns == [] and _has_expected_columns(found.data):
                return found
    return None


def _has_expected_columns(data: bytes) -> bool:
    """Whether the index has the columns that it should have."""
    import polars

    there: dict[str, Any] = dict(polars.read_parquet_schema(io.BytesIO(data)))
    return there == dict(_empty_frame().schema)


def _empty_frame() -> polars.DataFrame:
    from hpcbench.results.frame import results_frame

    return results_frame([])


def _write_index(tree: ClusterTree, frame: polars.DataFrame, seen: dict[str, int], unfinished: list[str]) -> None:
    """Write the index where that is allowed; nowhere is no error."""
    head = _IndexHeader(_FORMAT_VERSION, _hash_column_types(), seen, sorted(unfinished))
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="lz4", metadata={_METADATA_KEY: msgspec.json.encode(head).decode()})
    data = buffer.getvalue()
    for path in index_paths(tree):
        try:
            if path.parent != tree.root:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data)
        except (OSError, StorageError):
            continue
        return
