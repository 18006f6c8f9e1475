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
from dataclasses import dataclass, field
from pathlib import Path

from hpcbench.errors import StorageError
from hpcbench.fileio import make_folder, write_error
from hpcbench.results.attempts import latest_start
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK
from hpcbench.submit.lock import exclusive_lock
from hpcbench.submit.submission_record import list_submissions, read_sweep_record

UNFINISHED, OLD_SUBMISSION, ORPHAN, TEMPORARY = "unfinished submission", "old submission", "orphan", "temporary file"
_KEPT_STATUSES = frozenset({STATUS_OK, "oom", STATUS_BROKEN})
"""A run that did not fit into memory measured that; a result that cannot be decoded may be a measurement."""
_TEMPORARY_PATTERN = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|dead)")
_NUMBERED_PATTERN = re.compile(r"(.+)-[0-9]{4,}")


@dataclass(frozen=True)
class Leftover:
    """A folder or file that no job and no reader needs."""

    kind: str
    path: Path
    size_bytes: int
    reason: str


@dataclass
class LeftoverSearch:
    """The leftovers of one cluster's tree."""

    items: list[Leftover] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """The reasons why something was left out, one per line."""
    failed: list[StorageError] = field(default_factory=list)
    """Removals that the file system refused."""


def find_leftovers(tree: ClusterTree, *, sweep: str | None, min_age_s: float, now_unix_s: float) -> LeftoverSearch:
    """The leftovers in ``tree``. Nothing is changed.

    Args:
        tree: The results of one cluster.
        sweep: Only leftovers of the sweep of this name; ``None``: of the whole tree.
        min_age_s: Of everything inside a leftover, by modification time.
        now_unix_s: The time that ages are measured at.
    """
    search, young = LeftoverSearch(), 0
    for kind, path, reason in _candidates(tree, sweep, now_unix_s, search.kept):
        size_bytes, changed_unix_s = _size_and_change(path)
        if changed_unix_s > now_unix_s - min_age_s:
            young += 1
        else:
            search.items.append(Leftover(kind, path, size_bytes, reason))
    if young:
        search.kept.append(f"{young} leftovers that changed a short time ago (--older-than)")
    return search


def remove_leftovers(tree: ClusterTree, *, sweep: str | None, min_age_s: float, now_unix_s: float) -> LeftoverSearch:
    """Remove the leftovers in ``tree``, while no submit writes there. ``items`` are those that were removed.

    Raises ``LockHeldError`` where a submit holds the tree's lock.
    """
    if not tree.root.is_dir():
        return LeftoverSearch()
    make_folder(tree.submissions)
    with exclusive_lock(tree.submissions / ".lock") as lock:
        search = find_leftovers(tree, sweep=sweep, min_age_s=min_age_s, now_unix_s=now_unix_s)
        leftovers, search.items = search.items, []
        for leftover in leftovers:
            lock.check_held()
            try:
                _remove(leftover.path)
            except OSError as error:
                search.failed.append(write_error(error, leftover.path))
            else:
                search.items.append(leftover)
    return search


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # First the record: an interrupted removal then leaves an unfinished submission, which the next one takes.
        (path / "submission.json").unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _candidates(
    tree: ClusterTree, sweep: str | None, now_unix_s: float, kept: list[str]
) -> Iterator[tuple[str, Path, str]]:
    """Yield kind, path and reason of everything without a record, whatever its age."""
    if not tree.root.is_dir():
        return
    for path in _entries(tree.submissions):
        numbered, is_folder = _NUMBERED_PATTERN.fullmatch(path.name), path.is_dir() and not path.is_symlink()
        is_own = numbered is not None and sweep in (None, numbered[1])
        if is_own and is_folder and not os.path.lexists(path / "submission.json"):
            yield UNFINISHED, path, "its submit ended before it sent anything"
    try:
        listed = {run_id for path in _entries(tree.path("sweeps")) for run_id in _runs_of_sweep(tree, path)}
        submissions = [
            (folder, {run_id for array in record.arrays for run_id in array.run_ids})
            for folder, record in list_submissions(tree)
            if sweep in (None, record.sweep)
        ]
    except StorageError as error:
        kept.append(f"orphans and old submissions, since a record cannot be read: {error.message}")
        return
    wanted = None if sweep is None else set().union(*(members for _, members in submissions))
    runs = {key: path for key, path in _run_folders(tree) if wanted is None or key in wanted}
    orphans = {key: reason for key in runs.keys() - listed if (reason := _why_orphan(tree, key, now_unix_s))}
    for run_id in sorted(orphans):
        yield ORPHAN, runs[run_id], orphans[run_id]
    needed = listed | (runs.keys() - orphans.keys())
    for folder, members in submissions:
        if members.isdisjoint(needed):
            yield OLD_SUBMISSION, folder, "its runs are in no sweep"
    gone = {str(runs[run_id]) for run_id in orphans}
    for root in [tree.root] if sweep is None else [runs[run_id] for run_id in sorted(runs)]:
        for parent, folders, files in os.walk(root):
            folders[:] = [name for name in folders if f"{parent}/{name}" not in gone]
            for name in filter(_TEMPORARY_PATTERN.fullmatch, files):
                yield TEMPORARY, Path(parent, name), "its writer ended before it was done"


def _runs_of_sweep(tree: ClusterTree, path: Path) -> list[str]:
    """The runs in the record ``path`` of a sweep. Raises ``StorageError`` if it cannot be read."""
    if path.name.startswith(".") or path.suffix != ".json":
        return []
    record = read_sweep_record(tree, path.stem)
    if record is None:
        raise StorageError(f"{path} is broken")
    return record.run_ids


def _run_folders(tree: ClusterTree) -> Iterator[tuple[str, Path]]:
    """A link in the place of a run is neither followed nor removed."""
    for run_id in tree.existing_runs():
        with contextlib.suppress(StorageError):
            yield run_id, tree.run_folder(run_id)


def _why_orphan(tree: ClusterTree, run_id: str, now_unix_s: float) -> str | None:
    """The reason why a run of no sweep is not needed; ``None`` if it is."""
    head = tree.summary(run_id)
    if head is not None and head.status in _KEPT_STATUSES:
        return None
    begun = latest_start(tree.run_folder(run_id))
    if begun is not None and (begun[1].deadline_unix_s or 0.0) > now_unix_s:
        return None  # its job may be at work
    state = f"ended as {head.status}" if head is not None else "left no result"
    return f"belongs to no sweep and {state}"


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _size_and_change(path: Path) -> tuple[int, float]:
    """Bytes on the disk of ``path`` and all in it, and the newest modification time (Unix time in s)."""
    size_bytes, changed_unix_s = 0, 0.0
    for name in _walk(path):
        with contextlib.suppress(OSError):
            state = os.lstat(name)
            size_bytes += state.st_blocks * 512
            changed_unix_s = max(changed_unix_s, state.st_mtime)
    return size_bytes, changed_unix_s


def _walk(path: Path) -> Iterator[str]:
    yield str(path)
    if path.is_dir() and not path.is_symlink():
        for folder, folders, files in os.walk(path):
            yield from (f"{folder}/{name}" for name in (*folders, *files))
