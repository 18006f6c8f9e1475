"""``begin``: claim an attempt before the ranks start, where there is something to do.

Runs in the batch script, so it stays quick: no torch.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import msgspec

from hpcbench.config.task import Task, TaskHeader, read_task
from hpcbench.errors import WorkerError
from hpcbench.fileio import read_regular
from hpcbench.results.attempts import Attempt, attempt_numbers
from hpcbench.results.decode import decode
from hpcbench.results.schema import OK, Failure, RunResult
from hpcbench.results.stopping import read_stop_group, stopped_by
from hpcbench.results.store import ClusterTree, environment_key
from hpcbench.worker.launch import NOTHING_TO_DO, claim, restart_count

MAY_BE_INTERRUPTED = frozenset({"failed", "cancelled", "preempted"})
"""How a run can have ended because its job was taken away."""


def begin(tasks: Path, index: int, time_limit_s: float | None = None) -> int:
    """Print the absolute folder of a new attempt and return 0.

    Returns ``NOTHING_TO_DO`` and prints nothing on stdout where the run was cancelled before it began, is done, has
    ended in this submission already, or is not worth starting. Of the last a result says so.
    """
    header, task = read_task(tasks, index)
    tree = ClusterTree(Path(header.tree))
    why = _cancelled(tasks, task.run_id) or done(tree, task) or _ended_here(tree, tasks, index, header, task)
    if why is None:
        why = _stopped(tree, tasks, task)
        if why is not None:
            _write_skipped(tree, header, task, why)
    if why is not None:
        print(f"hpcbench: {task.run_id}: {why}: nothing to do", file=sys.stderr)  # noqa: T201
        return NOTHING_TO_DO
    attempt = claim(tasks, index, header, task, secrets.token_hex(8), time_limit_s)
    print(attempt.folder.absolute())  # noqa: T201 - the batch script reads this line
    return 0


def done(tree: ClusterTree, task: Task) -> str | None:
    """That the run has an ok result which it is not to replace, in words; a broken result is none."""
    result = _result(tree, task.run_id)
    if result is None or result.status != OK:
        return None
    if task.supersedes is not None and environment_key(result) == task.supersedes:
        return None
    return "it has an ok result already"


def _cancelled(tasks: Path, run_id: str) -> str | None:
    try:
        dropped = decode(read_regular(tasks.parent / "dropped.json"), list[str])
    except (OSError, msgspec.MsgspecError):
        return None
    return "it was cancelled before it began" if run_id in dropped else None


def _ended_here(tree: ClusterTree, tasks: Path, index: int, header: TaskHeader, task: Task) -> str | None:
    """That this very submission has run it to its end.

    A scheduler starts a job anew only when it was interrupted from outside. The run that was under way then is run
    again; those of the pack that had ended before keep their results.
    """
    result = _result(tree, task.run_id)
    marker = Attempt(tree.run_folder(task.run_id), result.attempt).start_marker() if result is not None else None
    if result is None or marker is None or marker.task_file != str(tasks.absolute()):
        return None
    was_restarted = restart_count(os.environ) > marker.restart_count
    if was_restarted and result.status in MAY_BE_INTERRUPTED and not _went_on(tree, tasks, index, header.pack):
        return None
    return f"it ended as {result.status} in this submission"


def _went_on(tree: ClusterTree, tasks: Path, index: int, pack: int) -> bool:
    """Whether a later run of the pack that ``index`` belongs to has begun an attempt from this task file."""
    for later in range(index + 1, (index // pack + 1) * pack):
        try:
            _, task = read_task(tasks, later)
        except WorkerError:
            return False
        folder = tree.run_folder(task.run_id)
        markers = (Attempt(folder, number).start_marker() for number in attempt_numbers(folder))
        if any(marker is not None and marker.task_file == str(tasks.absolute()) for marker in markers):
            return True
    return False


def _stopped(tree: ClusterTree, tasks: Path, task: Task) -> str | None:
    """Why the sweep's stop rules keep the run from starting."""

    def status_of(run_id: str) -> str | None:
        result = _result(tree, run_id)
        return None if result is None else result.status

    for line in task.stop_groups:
        group = read_stop_group(tasks.parent / "stop.jsonl", line)
        why = stopped_by(group, task.run_id, status_of) if group is not None else None
        if why is not None:
            return why
    return None


def _write_skipped(tree: ClusterTree, header: TaskHeader, task: Task, why: str) -> None:
    """Nothing started, so there is no start marker, and the result counts for the latest attempt that there is."""
    from hpcbench.worker.summary import summarise

    attempt = max(attempt_numbers(tree.run_folder(task.run_id)), default=0)
    result = summarise(header, task, attempt, {}, "skipped", Failure(type="Stopped", message=why))
    result.ranks, result.warnings = [], []
    tree.write_result(result)


def _result(tree: ClusterTree, run_id: str) -> RunResult | None:
    try:
        return tree.read_result(run_id)
    except msgspec.MsgspecError:
        return None
