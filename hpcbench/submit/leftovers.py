"""Leftovers of a results tree: files that no record names and that have not changed for a while.

    unfinished submission   a folder without submission.json: its submit was killed before it sent anything
    old submission          none of its runs is in a sweep or has measured anything
    orphan                  a run of no sweep that measured nothing: neither an ok nor an oom result
    temporary file          of a process that died while it wrote

The scheduler is not asked: the age decides."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcbench.errors import StorageError
from hpcbench.fileio import make_folder, write_error
from hpcbench.results.attempts import latest_start
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK
from hpcbench.submit.lock import exclusive_lock
from hpcbench.submit.submission_record import list_submissions, read_sweep_record

_KEPT_STATUSES = frozenset({STATUS_OK, "oom", STATUS_BROKEN})
"""A run that did not fit into memory measured that; a result that cannot be decoded may be a measurement."""
_TEMPORARY_PATTERN = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|dead)")
_NUMBERED_PATTERN = re.compile(r".+-[0-9]{4,}")


@dataclass(frozen=True)
class Leftover:
    """A folder or file that no job and no reader needs."""

    kind: str
    path: Path
    size_bytes: int
    reason: str


def find_leftovers(tree: ClusterTree, *, min_age_s: float, now_unix_s: float) -> list[Leftover]:
    """The leftovers in ``tree`` of which nothing has changed for ``min_age_s``. Nothing is removed.

    Raises ``StorageError`` if a record cannot be read: any run may be in it.
    """
    leftovers = []
    for kind, path, reason in _candidates(tree, now_unix_s) if tree.root.is_dir() else ():
        size_bytes, changed_unix_s = _size_and_change(path)
        if changed_unix_s <= now_unix_s - min_age_s:
            leftovers.append(Leftover(kind, path, size_bytes, reason))
    return leftovers


def remove_leftovers(
    tree: ClusterTree, *, min_age_s: float, now_unix_s: float
) -> tuple[list[Leftover], list[StorageError]]:
    """Remove the leftovers in ``tree``, while no submit writes there; return the removed ones and the refusals.

    Raises ``LockHeldError`` where a submit holds the tree's lock.
    """
    removed: list[Leftover] = []
    failed: list[StorageError] = []
    if not tree.root.is_dir():
        return removed, failed
    make_folder(tree.submissions)
    with exclusive_lock(tree.submissions / ".lock") as lock:
        for leftover in find_leftovers(tree, min_age_s=min_age_s, now_unix_s=now_unix_s):
            lock.check_held()
            try:
                _remove(leftover.path)
            except OSError as error:
                failed.append(write_error(error, leftover.path))
            else:
                removed.append(leftover)
    return removed, failed


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # First the record: an interrupted removal then leaves an unfinished submission, which the next one takes.
        (path / "submission.json").unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _candidates(tree: ClusterTree, now_unix_s: float) -> Iterator[tuple[str, Path, str]]:
    """Yield kind, path and reason of everything without a record, whatever its age."""
    for path in _entries(tree.submissions):
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder and _NUMBERED_PATTERN.fullmatch(path.name) and not os.path.lexists(path / "submission.json"):
            yield "unfinished submission", path, "its submit ended before it sent anything"
    listed: set[str] = set()
    for path in _entries(tree.path("sweeps")):
        if path.suffix == ".json" and not path.name.startswith("."):
            record = read_sweep_record(tree, path.stem)
            if record is None:
                raise StorageError(f"{path} is broken", hint="nothing was removed")
            listed.update(record.run_ids)
    # A link in the place of a run is neither followed nor removed.
    runs: dict[str, Path] = {}
    for run_id in tree.existing_runs():
        with contextlib.suppress(StorageError):
            runs[run_id] = tree.run_folder(run_id)
    orphans = {key: reason for key in runs.keys() - listed if (reason := _why_orphan(tree, key, now_unix_s))}
    for run_id in sorted(orphans):
        yield "orphan", runs[run_id], orphans[run_id]
    needed = listed | (runs.keys() - orphans.keys())
    for folder, submission in list_submissions(tree):
        if all(needed.isdisjoint(array.run_ids) for array in submission.arrays):
            yield "old submission", folder, "its runs are in no sweep"
    gone = {str(runs[run_id]) for run_id in orphans}
    for parent, folders, files in os.walk(tree.root):
        folders[:] = [name for name in folders if f"{parent}/{name}" not in gone]
        for name in filter(_TEMPORARY_PATTERN.fullmatch, files):
            yield "temporary file", Path(parent, name), "its writer ended before it was done"


def _why_orphan(tree: ClusterTree, run_id: str, now_unix_s: float) -> str | None:
    """The reason why a run of no sweep is not needed; ``None`` if it is."""
    head = tree.summary(run_id)
    if head is not None and head.status in _KEPT_STATUSES:
        return None
    begun = latest_start(tree.run_folder(run_id))
    if begun and (head is None or begun[0].number > head.attempt) and (begun[1].deadline_unix_s or 0.0) > now_unix_s:
        return None  # its job may be at work
    state = f"ended as {head.status}" if head is not None else "left no result"
    return f"belongs to no sweep and {state}"


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def folder_size(path: Path) -> int:
    """Bytes on the disk of ``path`` and all in it."""
    return _size_and_change(path)[0]


def _size_and_change(path: Path) -> tuple[int, float]:
    """Bytes on the disk of ``path`` and all in it, and the newest modification time (Unix time in s)."""
    names = [path]
    if path.is_dir() and not path.is_symlink():
        names += [Path(parent, name) for parent, folders, files in os.walk(path) for name in (*folders, *files)]
    size_bytes, changed_unix_s = 0, 0.0
    for name in names:
        with contextlib.suppress(OSError):
            state = name.lstat()
            size_bytes += state.st_blocks * 512
            changed_unix_s = max(changed_unix_s, state.st_mtime)
    return size_bytes, changed_unix_s
