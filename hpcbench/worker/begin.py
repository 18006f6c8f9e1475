"""``begin``: claim an attempt before the ranks start, if the run still needs one.

The batch script runs it, so it does not import torch."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from pathlib import Path

import msgspec

from hpcbench.config.run_spec import RunSpec, RunTask, TaskFileHeader, read_task
from hpcbench.errors import EXIT_NOTHING_TO_DO, WorkerError
from hpcbench.identity import find_process
from hpcbench.results.attempts import Attempt, attempt_numbers, begin_attempt
from hpcbench.results.decode import read_record
from hpcbench.results.results_tree import ClusterTree, environment_key
from hpcbench.results.schema import STATUS_OK, FailureRecord, RunResult
from hpcbench.results.stop_rules import find_stop_reason, read_stop_group
from hpcbench.strategies.catalog import selectable_strategies
from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.measure.host import oom_kills
from hpcbench.worker.other_attempts import (
    AttemptAtWork,
    OtherAttempts,
    slurm_job_id,
    slurm_restart_count,
)
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import MODELS, is_custom_model

_POLL_S = 0.1


def claim_attempt(
    tasks: Path,
    index: int,
    header: TaskFileHeader,
    task: RunTask,
    launch: str,
    time_limit_s: float | None = None,
    *,
    others: OtherAttempts | None = None,
    process: int | None = None,
) -> Attempt:
    """Begin a new attempt of ``task`` and leave its start marker.

    Args:
        others: the other attempts, as far as they were asked for already.
        process: whose end is the end of the attempt; this one's by default.

    Raises:
        AttemptAtWork: another attempt of the run is at work, or may be.
    """
    now = time.time()
    deadline = now + (time_limit_s or task.time_limit_s)
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if job_end.isdecimal() and int(job_end) > now:
        # The job began before its first run, so it may end before the run's own limit.
        deadline = min(deadline, float(job_end))
    tree, job_id = ClusterTree(Path(header.tree)), slurm_job_id(os.environ)
    return begin_attempt(
        tree.run_folder(task.run_id),
        (others or other_attempts(tree, task.run_id)).check,
        launch=launch,
        host=socket.gethostname(),
        started_unix_s=now,
        job_id=job_id,
        job_cluster=os.environ.get("SLURM_CLUSTER_NAME") if job_id else None,
        restart_count=slurm_restart_count(os.environ),
        process=find_process(process or os.getpid()) if job_id is None else None,
        deadline_unix_s=deadline,
        oom_kills=oom_kills(),
        task_file=str(tasks.absolute()),
        index=index,
        tree=header.tree,
    )


def other_attempts(tree: ClusterTree, run_id: str) -> OtherAttempts:
    """The attempts of a run that there are, of which those up to that of its result have ended."""
    result = read_result(tree, run_id)
    return OtherAttempts(result.attempt if result is not None else 0)


def find_attempt(run_folder: Path, info: RankInfo, wait_s: float) -> Attempt:
    """The attempt that rank 0 of this launch began; ``WorkerError`` once ``wait_s`` has passed.

    An attempt that already holds this rank's file is an earlier launch with the same id.
    """
    give_up = time.monotonic() + wait_s
    while True:
        for number in reversed(attempt_numbers(run_folder)):
            attempt = Attempt(run_folder, number)
            marker = attempt.read_start()
            over = (attempt.folder / f"rank-{info.rank}.json").exists()
            if marker is not None and marker.launch == info.launch and not over:
                return attempt
        if time.monotonic() > give_up:
            awaited = f"rank 0 to begin an attempt of launch {info.launch!r} in {run_folder / 'attempts'}"
            hint = "is the results tree on a file system that all nodes share?"
            raise WorkerError(f"rank {info.rank} waited {wait_s:g} s for {awaited}", hint=hint)
        time.sleep(_POLL_S)


INTERRUPTIBLE_STATUSES = frozenset({"failed", "cancelled", "preempted"})
"""Statuses of a run whose job may have been taken away."""


def begin(tasks: Path, index: int, time_limit_s: float | None = None, missing_module: str = "") -> int:
    """Print the absolute folder of a new attempt and return 0.

    Returns ``EXIT_NOTHING_TO_DO`` and prints nothing on stdout where the run was cancelled, is done, is at work in
    another attempt, has ended in this submission already, or is not worth starting, which a result then states.
    ``missing_module`` is the job script's sentence about a module that it could not load: the new attempt ends as
    ``unsupported``.
    """
    header, task = read_task(tasks, index)
    tree = ClusterTree(Path(header.tree))
    why = (
        _cancelled_reason(tasks, task.run_id)
        or done_reason(tree, task)
        or _ended_in_submission_reason(tree, tasks, index, header, task)
    )
    others = other_attempts(tree, task.run_id)
    try:
        if why is None:
            why = _stop_rule_reason(tree, header, tasks, task, others)
        if why is not None:
            return _nothing_to_do(task, why)
        launch = secrets.token_hex(8)
        attempt = claim_attempt(tasks, index, header, task, launch, time_limit_s, others=others, process=os.getppid())
    except AttemptAtWork as at_work:
        return _nothing_to_do(task, at_work.message)
    failure = FailureRecord.of_module(missing_module) if missing_module else _unknown_name(task.spec)
    if failure is not None:
        _write_unstarted(tree, header, task, attempt.number, "unsupported", failure)
        print(f"hpcbench: {task.run_id}: {failure.message}", file=sys.stderr)  # noqa: T201
        return EXIT_NOTHING_TO_DO
    print(attempt.folder.absolute())  # noqa: T201 - the batch script reads this line
    return 0


def _unknown_name(spec: RunSpec) -> FailureRecord | None:
    """Return the failure of a run with a name that a package has which is installed for the login node alone."""
    if spec.workload != "training":
        return None
    for parameter, names in (("strategy", selectable_strategies()), ("model", MODELS), ("dataset", DATASETS)):
        name = getattr(spec, parameter)
        if name not in names and not (parameter == "model" and is_custom_model(name)):
            return FailureRecord(
                type="MissingModule",
                message=f"{sys.executable} on {socket.gethostname()} has no {parameter} {name!r}",
                hint=f"install the package that adds it for the jobs, too: {sys.executable} -m pip install ...",
            )
    return None


def _nothing_to_do(task: RunTask, why: str) -> int:
    print(f"hpcbench: {task.run_id}: {why}: nothing to do", file=sys.stderr)  # noqa: T201
    return EXIT_NOTHING_TO_DO


def done_reason(tree: ClusterTree, task: RunTask) -> str | None:
    """Return why the run need not be executed: it has an ok result that this task was not sent to replace.

    ``None`` if the run has no such result; a broken one does not count.
    """
    result = read_result(tree, task.run_id)
    if result is None or result.status != STATUS_OK:
        return None
    if task.supersedes is not None and environment_key(result) == task.supersedes:
        return None
    return "it has an ok result already"


def _cancelled_reason(tasks: Path, run_id: str) -> str | None:
    dropped = read_record(tasks.parent / "dropped.json", list[str]) or ()
    return "it was cancelled" if run_id in dropped else None


def _ended_in_submission_reason(
    tree: ClusterTree, tasks: Path, index: int, header: TaskFileHeader, task: RunTask
) -> str | None:
    """Return the reason not to run it if this submission has already run it to its end.

    A scheduler starts a job anew only when it was interrupted from outside. The run that was running then is run
    again; those of the pack that had ended before keep their results.
    """
    result = read_result(tree, task.run_id)
    marker = Attempt(tree.run_folder(task.run_id), result.attempt).read_start() if result is not None else None
    if result is None or marker is None or marker.task_file != str(tasks.absolute()):
        return None
    was_restarted = slurm_restart_count(os.environ) > marker.restart_count
    was_interrupted = was_restarted and result.status in INTERRUPTIBLE_STATUSES
    if was_interrupted and not _later_run_started(tree, tasks, index, header.pack):
        return None
    return f"it ended as {result.status} in this submission"


def _later_run_started(tree: ClusterTree, tasks: Path, index: int, pack: int) -> bool:
    """Whether a later run of the pack that ``index`` belongs to has begun an attempt from this task file."""
    for later in range(index + 1, (index // pack + 1) * pack):
        try:
            _, task = read_task(tasks, later)
        except WorkerError:
            return False
        folder = tree.run_folder(task.run_id)
        markers = (Attempt(folder, number).read_start() for number in attempt_numbers(folder))
        if any(marker is not None and marker.task_file == str(tasks.absolute()) for marker in markers):
            return True
    return False


def _stop_rule_reason(
    tree: ClusterTree, header: TaskFileHeader, tasks: Path, task: RunTask, others: OtherAttempts
) -> str | None:
    """Return the reason for which the sweep's stop rules skip the run, and write it as result; ``None`` without one."""

    def status_of(run_id: str) -> str | None:
        result = read_result(tree, run_id)
        return None if result is None else result.status

    for line in task.stop_groups:
        group = read_stop_group(tasks.parent / "stop.jsonl", line)
        why = find_stop_reason(group, task.run_id, status_of) if group is not None else None
        if why is not None:
            # No attempt begins for a skipped run: its result has the number of the latest attempt, or 0.
            numbers = attempt_numbers(tree.run_folder(task.run_id))
            for number in numbers:
                others.check(Attempt(tree.run_folder(task.run_id), number))
            failure = FailureRecord(type="Stopped", message=why)
            _write_unstarted(tree, header, task, max(numbers, default=0), "skipped", failure)
            return why
    return None


def _write_unstarted(
    tree: ClusterTree, header: TaskFileHeader, task: RunTask, attempt: int, status: str, failure: FailureRecord
) -> None:
    """Write the result of a run whose ranks are not started."""
    from hpcbench.worker.summary import summarize_run

    result = summarize_run(header, task, attempt, {}, status, failure)
    result.ranks, result.warnings = [], []
    tree.write_result(result)


def read_result(tree: ClusterTree, run_id: str) -> RunResult | None:
    """Return the result of ``run_id``; ``None`` if it is absent or broken. ``StorageError`` if it cannot be read."""
    try:
        return tree.read_result(run_id)
    except msgspec.MsgspecError:
        return None
