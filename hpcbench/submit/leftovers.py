"""Leftovers of a results tree: what killed submits, replaced attempts and renamed sweeps leave, and its removal.

    unfinished submission   a folder without submission.json: its submit was killed before it sent anything
    old submission          each of its runs has a newer submission, or belongs to no sweep and left nothing
    old attempt             neither the newest of its run nor the one whose result counts
    orphan                  a run of no sweep that measured nothing: neither an ok nor an oom result
    temporary file          of a process that died while it wrote

A job may still use whatever belongs to a run whose job has not ended for certain. Such files are no leftovers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcbench.errors import HpcbenchError, StorageError
from hpcbench.fileio import make_folder, write_error
from hpcbench.results.attempts import Attempt, AttemptStart, attempt_numbers
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK, STATUSES
from hpcbench.submit.lock import exclusive_lock
from hpcbench.submit.scheduler import HasSchedulerSettings, StateQuery, scheduler_class
from hpcbench.submit.submission_record import (
    NewestSubmission,
    SubmittedRun,
    accepted_submission,
    find_submissions,
    list_submissions,
    read_sweep_record,
)

UNFINISHED, OLD_SUBMISSION, OLD_ATTEMPT = "unfinished submission", "old submission", "old attempt"
ORPHAN, TEMPORARY = "orphan", "temporary file"
_MEASURED_STATUSES = frozenset({STATUS_OK, "oom"})
"""A run that did not fit into memory measured that."""
_ENDED_STATES = frozenset({*STATUSES, "planned", "lost"})
"""States of jobs that run no more. Every other state, one that is added later included, keeps the files."""
_RUN_LEASE_S = 7 * 86400.0
"""Seconds without news of a run after which its files count as those of no job."""
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


def find_leftovers(
    tree: ClusterTree, settings: HasSchedulerSettings, *, sweep: str | None, min_age_s: float, now_unix_s: float
) -> LeftoverSearch:
    """The leftovers in ``tree``. Nothing is changed.

    Args:
        tree: The results of one cluster.
        settings: Of the scheduler, which is asked once for the jobs of all submissions.
        sweep: Only leftovers of the sweep of this name; ``None``: of the whole tree.
        min_age_s: Of everything inside a leftover, by modification time.
        now_unix_s: The time that ages and leases are measured at.
    """
    return _LeftoverFinder(tree, settings, sweep, min_age_s, now_unix_s).find()


def remove_leftovers(
    tree: ClusterTree, settings: HasSchedulerSettings, *, sweep: str | None, min_age_s: float, now_unix_s: float
) -> LeftoverSearch:
    """Remove the leftovers in ``tree``, while no submit writes there. ``items`` are those that were removed.

    Raises ``LockHeldError`` where a submit holds the tree's lock.
    """
    if not tree.root.is_dir():
        return LeftoverSearch()
    make_folder(tree.submissions)
    with exclusive_lock(tree.submissions / ".lock") as lock:
        search = find_leftovers(tree, settings, sweep=sweep, min_age_s=min_age_s, now_unix_s=now_unix_s)
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


class _LeftoverFinder:
    """One search; the tree and the scheduler are read once."""

    def __init__(
        self, tree: ClusterTree, settings: HasSchedulerSettings, sweep: str | None, min_age_s: float, now_unix_s: float
    ) -> None:
        self._tree, self._settings, self._sweep = tree, settings, sweep
        self._newest_unix_s, self._now_unix_s = now_unix_s - min_age_s, now_unix_s
        self._search = LeftoverSearch()
        self._too_young = 0
        self._busy: dict[str, set[str]] = {}
        """Submissions whose jobs may still run, by ``run_id``."""

    def find(self) -> LeftoverSearch:
        if not self._tree.root.is_dir():
            return self._search
        self._find_unfinished_submissions()
        try:
            submissions = list_submissions(self._tree)
        except StorageError as error:
            # Without one of them no run is known to have ended.
            self._search.kept.append(f"all that jobs may use, since a submission cannot be read: {error.message}")
            return self._search
        # With all of their runs, also those that were submitted again.
        self._find_busy_runs(
            [
                accepted_submission(folder, record, (key for array in record.arrays for key in array.run_ids))
                for folder, record in submissions
            ]
        )
        in_sweeps, has_all = self._runs_of_sweeps()
        run_ids = self._tree.existing_runs()
        sweep_runs = {
            run_id
            for _, record in submissions
            if self._is_own(record.sweep)
            for array in record.arrays
            for run_id in array.run_ids
        }
        if self._sweep is not None:
            run_ids &= sweep_runs | in_sweeps.get(self._sweep, set())
        listed = set().union(*in_sweeps.values())
        orphans = self._find_orphans(run_ids - listed) if has_all else set()
        kept_attempts = self._find_old_attempts(run_ids - orphans)
        needed = listed | (self._tree.existing_runs() - orphans)
        newest = {submission.folder.name for submission in find_submissions(self._tree, needed)}
        for folder, record in submissions:
            members = {key for array in record.arrays for key in array.run_ids}
            is_needed = folder.name in newest or any(folder.name in kept_attempts.get(key, ()) for key in members)
            is_busy = any(folder.name in self._busy.get(key, ()) for key in members)
            if self._is_own(record.sweep) and has_all and not is_needed and not is_busy:
                reason = "its runs were submitted again" if members & needed else "its runs are in no sweep"
                self._add(OLD_SUBMISSION, folder, reason)
        self._find_temporary_files(run_ids)
        if self._busy:
            self._search.kept.append(f"{len(self._busy)} runs whose jobs may not have ended")
        if self._too_young:
            self._search.kept.append(f"{self._too_young} leftovers that changed a short time ago (--older-than)")
        return self._search

    def _is_own(self, sweep: str) -> bool:
        return self._sweep is None or sweep == self._sweep

    def _find_busy_runs(self, submissions: list[NewestSubmission]) -> None:
        queries: dict[str, StateQuery] = {}
        for kind in {submission.record.scheduler for submission in submissions}:
            of_kind = [submission for submission in submissions if submission.record.scheduler == kind]
            try:
                queries[kind] = scheduler_class(kind, self._tree.root.name)(self._settings).state(of_kind)
            except HpcbenchError as error:
                self._search.kept.append(error.message)
        for submission in submissions:
            runs = dict(submission.runs())
            try:
                query = queries.get(submission.record.scheduler)
                statuses = query.result(runs) if query is not None else None
            except HpcbenchError as error:
                self._search.kept.append(error.message)
                statuses = None
            for run_id, run in runs.items():
                status = statuses.get(run_id) if statuses is not None else None
                state = status.state if status is not None else None
                if statuses is None or not self._has_ended(run, state):
                    self._busy.setdefault(run_id, set()).add(submission.folder.name)

    def _has_ended(self, run: SubmittedRun, state: str | None) -> bool:
        """Whether no job of this submission runs the run any more; ``state`` is the job's, ``None`` if unknown."""
        if state is not None:
            return state in _ENDED_STATES
        if run.job_id is None:
            return run.is_dropped
        began = run.started_attempt(self._tree)
        since_unix_s = max(run.record.created_unix_s, began[1].started_unix_s if began else 0.0)
        return self._now_unix_s - since_unix_s > _RUN_LEASE_S + run.array.job_limit_s

    def _runs_of_sweeps(self) -> tuple[dict[str, set[str]], bool]:
        """The runs of each sweep, and whether every sweep's record could be read."""
        in_sweeps: dict[str, set[str]] = {}
        for path in sorted(self._tree.path("sweeps").glob("[!.]*.json")):
            try:
                record = read_sweep_record(self._tree, path.stem)
            except StorageError:
                record = None
            if record is None:
                self._search.kept.append(f"orphans and old submissions, since {path} cannot be read")
                return in_sweeps, False
            in_sweeps[path.stem] = set(record.run_ids)
        return in_sweeps, True

    def _find_orphans(self, run_ids: set[str]) -> set[str]:
        orphans = set()
        for run_id in sorted(run_ids):
            head = self._tree.summary(run_id)
            is_open = head is not None and head.status in (*_MEASURED_STATUSES, STATUS_BROKEN)
            if is_open or run_id in self._busy or any(self._is_running(start) for _, start in self._attempts(run_id)):
                continue
            state = f"ended as {head.status}" if head is not None else "left no result"
            if self._add(ORPHAN, self._tree.run_folder(run_id), f"belongs to no sweep and {state}"):
                orphans.add(run_id)
        return orphans

    def _find_old_attempts(self, run_ids: set[str]) -> dict[str, set[str]]:
        """Find them; return by ``run_id`` the submissions that began the others."""
        submissions: dict[str, set[str]] = {}
        for run_id in sorted(run_ids):
            head, attempts = self._tree.summary(run_id), self._attempts(run_id)
            needed = {attempts[-1][0].number} if attempts else set()
            if head is not None:
                needed |= {head.attempt}
            for attempt, start in attempts:
                submission = Path(start.task_file).parent.name if start and start.task_file else None
                is_busy = submission in self._busy.get(run_id, ()) or self._is_running(start)
                is_old = attempt.number not in needed and not is_busy and (head is None or head.status != STATUS_BROKEN)
                reason = f"attempt {attempts[-1][0].number} is newer"
                if head is not None and head.attempt:
                    reason = f"the result is of attempt {head.attempt}"
                if not (is_old and self._add(OLD_ATTEMPT, attempt.folder, reason)) and submission is not None:
                    submissions.setdefault(run_id, set()).add(submission)
        return submissions

    def _attempts(self, run_id: str) -> list[tuple[Attempt, AttemptStart | None]]:
        try:
            folder = self._tree.run_folder(run_id)
            attempts = [Attempt(folder, number) for number in attempt_numbers(folder)]
        except StorageError:
            return []  # a link in its place: not followed, not removed
        return [(attempt, attempt.read_start()) for attempt in attempts]

    def _is_running(self, start: AttemptStart | None) -> bool:
        return start is not None and (start.deadline_unix_s or 0.0) > self._now_unix_s

    def _find_unfinished_submissions(self) -> None:
        for path in _entries(self._tree.submissions):
            name = _NUMBERED_PATTERN.fullmatch(path.name)
            is_folder = path.is_dir() and not path.is_symlink()
            if name and self._is_own(name[1]) and is_folder and not os.path.lexists(path / "submission.json"):
                self._add(UNFINISHED, path, "its submit ended before it sent anything")

    def _find_temporary_files(self, run_ids: Iterable[str]) -> None:
        listed = {str(leftover.path) for leftover in self._search.items}
        roots = [str(self._tree.root)]
        if self._sweep is not None:
            roots = [f"{self._tree.root}/runs/{run_id[:2]}/{run_id}" for run_id in run_ids]
        for root in roots:
            for folder, folders, files in os.walk(root):
                folders[:] = [name for name in folders if f"{folder}/{name}" not in listed]
                for name in filter(_TEMPORARY_PATTERN.fullmatch, files):
                    self._add(TEMPORARY, Path(folder, name), "its writer ended before it was done")

    def _add(self, kind: str, path: Path, reason: str) -> bool:
        """List ``path`` unless something in it changed a short time ago."""
        size_bytes, changed_unix_s = _size_and_change(path)
        if changed_unix_s > self._newest_unix_s:
            self._too_young += 1
            return False
        self._search.items.append(Leftover(kind, path, size_bytes, reason))
        return True


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
