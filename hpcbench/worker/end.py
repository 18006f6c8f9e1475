"""``end``: record how a run ended if its ranks left no result. This module does not import torch."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from hpcbench.config.run_spec import read_task
from hpcbench.errors import EXIT_PREEMPTED, EXIT_SYSTEM_REFUSED, HpcbenchError
from hpcbench.fileio import read_tail, write_patiently
from hpcbench.results.attempts import Attempt, AttemptStart
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK, FailureRecord, RankResult, RunResult
from hpcbench.worker import failure
from hpcbench.worker.begin import read_result
from hpcbench.worker.finalize import write_patience_s
from hpcbench.worker.measure.host import describe_own_job_memory
from hpcbench.worker.other_attempts import slurm_restart_count
from hpcbench.worker.shutdown import deadline_window_s, is_limit_warning
from hpcbench.worker.summary import summarize_run

EXIT_NOT_RECORDED = 3

_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT")
# What SLURM's daemons write into a step's error stream when the kernel killed one of its processes.
_SLURM_OOM = re.compile(r"oom[-_ ]kill event|Out Of Memory", re.IGNORECASE)


def end(tasks: Path, index: int, attempt_number: int, exit_code: int, received: str, job_state_line: str = "") -> int:
    """Make sure that the attempt has a result.

    Args:
        exit_code: of the launcher.
        received: signal that the batch script got (``TERM``), or empty.
        job_state_line: line of `scontrol show job --oneliner`, or empty.

    Returns:
        0 if the tree now holds the end of this run (ok or not), ``EXIT_PREEMPTED`` if the job is being preempted;
        otherwise ``exit_code``, or 3 if that is 0.
    """
    header, task = read_task(tasks, index)
    tree = ClusterTree(Path(header.tree))
    attempt = Attempt(tree.run_folder(task.run_id), attempt_number)
    received = received.upper().removeprefix("SIG")
    ranks = attempt.read_ranks()
    start = attempt.read_start()
    if received == "USR2" and not is_limit_warning(
        time.time(), start.deadline_unix_s if start else None, header.warning_s
    ):
        received = "USR2 long before its time limit"
    status, how = _status_from_exit(start, task.time_limit_s, exit_code, received)
    displaced = exit_code != 0 and is_preempted(job_state_line, slurm_restart_count(os.environ))
    present = read_result(tree, task.run_id)
    if present is not None and (present.status == STATUS_OK or present.attempt >= attempt_number):
        if present.attempt != attempt_number or present.status == STATUS_OK:
            # What is being measured anew keeps its earlier result until then.
            return EXIT_PREEMPTED if displaced and present.attempt < attempt_number else 0
        if displaced and was_ended_externally(present):
            return _write_preempted(tree, present, exit_code)
        silent = missing_ranks(ranks, task.spec.ranks)
        log = read_tail(attempt.folder / "err.log")
        if present.status == "cancelled" and _correct_cancelled(present, received, exit_code, status, silent, how, log):
            return _write_result(tree, present, exit_code)
        return 0
    log = read_tail(attempt.folder / "err.log")
    if not missing_ranks(ranks, task.spec.ranks) and all(rank.status == STATUS_OK for rank in ranks.values()):
        # All have measured: rank 0 could not write the result, or was killed before it had.
        outcome = failure.decide_outcome(
            task.spec.ranks, ranks, cause=None, only_follows=False, launcher="", oom_kills_before=None
        )
        result = summarize_run(header, task, attempt_number, ranks, outcome.status, outcome.error)
        return _write_result(tree, result, exit_code, task.supersedes)
    if status == "failed" and _SLURM_OOM.search(log):
        status, how = "oom", f"{how}; the scheduler saw a process killed for its memory: {describe_own_job_memory()}"
    status, error = _failure_record(status, how, ranks, task.spec.ranks, log)
    result = summarize_run(header, task, attempt_number, ranks, status, error)
    if displaced and was_ended_externally(result):
        return _write_preempted(tree, result, exit_code)
    return _write_result(tree, result, exit_code)


def is_preempted(job_state_line: str, restarts: int) -> bool:
    """Whether a job that has begun ``restarts`` times anew is being preempted, or back in the queue already.

    ``job_state_line`` is a line of `scontrol show job --oneliner`; an empty one has no information.
    """
    fields = dict(re.findall(r"(?:^| )(JobState|PreemptTime|Restarts)=(\S+)", job_state_line))
    again, has_time = fields.get("Restarts", ""), bool(_TIMESTAMP.match(fields.get("PreemptTime", "")))
    return fields.get("JobState") == "PREEMPTED" or has_time or (again.isdecimal() and int(again) > restarts)


def was_ended_externally(result: RunResult) -> bool:
    """Whether a run that is not ok ended because of something outside: a signal, or the loss of its ranks."""
    if result.status in ("cancelled", "preempted"):
        return True
    if result.error is None or result.status not in ("failed", "timeout"):
        return False
    kind, message = result.error.type, result.error.message
    lost_or_killed = kind in ("RankLost", "NoResult") or failure.is_peer_lost_message(kind, message)
    was_signalled = "SIGTERM" in message or "SIGUSR2" in message
    return was_signalled or (result.status == "failed" and lost_or_killed)


def _write_preempted(tree: ClusterTree, result: RunResult, exit_code: int) -> int:
    """No user cancelled the run: its nodes went to another job, or the whole job back into the queue."""
    was = f": {result.error.message}" if result.error is not None else ""
    result.status = "preempted"
    result.error = FailureRecord(type="Preempted", message=f"the scheduler took the job's nodes away{was}")
    return _write_result(tree, result, exit_code) or EXIT_PREEMPTED


def _correct_cancelled(
    result: RunResult, received: str, exit_code: int, status: str, silent: list[int], how: str, log: str
) -> bool:
    """Correct rank 0, which took TERM for a cancellation since it could not see the cause."""
    if received == "USR2":
        # torchrun passes nothing but TERM on; the script received the warning of the limit.
        result.status = "timeout"
        return True
    if silent and exit_code and not received:
        # Nobody stopped the job: the launcher ended the other ranks because it lost these.
        result.status = status
        result.error = failure.lost_ranks_failure(silent, {}, how, log, failure.job_nodes())
        return True
    return False


def missing_ranks(ranks: dict[int, RankResult], world_size: int) -> list[int]:
    """The ranks that left no file."""
    return [rank for rank in range(world_size) if rank not in ranks]


def _write_result(tree: ClusterTree, result: RunResult, exit_code: int, supersedes: str | None = None) -> int:
    attempt = Attempt(tree.run_folder(result.run_id), result.attempt)
    try:
        write_patiently(lambda: tree.write_result(result, supersedes), write_patience_s(attempt))
    except HpcbenchError as problem:
        print(f"hpcbench: the result of {result.run_id} could not be recorded: {problem}", file=sys.stderr)  # noqa: T201
        return exit_code or EXIT_NOT_RECORDED
    return 0


def _status_from_exit(start: AttemptStart | None, limit_s: float, exit_code: int, received: str) -> tuple[str, str]:
    """Return the status, and the text of how the ranks ended."""
    how = describe_exit(exit_code)
    deadline = start.deadline_unix_s if start else None
    near_deadline = deadline is not None and time.time() >= deadline - deadline_window_s(limit_s)
    if start is not None and failure.was_oom_killed(start.oom_kills):
        return "oom", f"{how}; the kernel killed a process of this job for its memory: {describe_own_job_memory()}"
    if received == "USR2" or (received and near_deadline):
        return "timeout", f"{how}; the job received SIG{received} at its time limit"
    if exit_code == 128 + signal.SIGUSR2:
        # Nothing but the scheduler's warning sends it; a rank that is still starting can only end.
        return "timeout", f"{how}: the scheduler's warning of the time limit came before the ranks had started"
    if received:
        return "cancelled", f"{how}; the job received SIG{received}"
    # 124 and 137 are what `timeout` leaves; a scheduler's KILL at the limit comes without a warning to the script.
    if near_deadline and exit_code in (124, 128 + signal.SIGTERM, 128 + signal.SIGKILL):
        return "timeout", f"{how}, at the time limit"
    return "failed", how


def describe_exit(code: int) -> str:
    """``137 -> "the ranks ended with exit code 137 (SIGKILL)"``."""
    if code == EXIT_SYSTEM_REFUSED:
        return f"the file system refused the ranks' files (exit code {code})"
    name = ""
    with suppress(ValueError):
        name = f" ({signal.Signals(code - 128).name})"
    return f"the ranks ended with exit code {code}{name}"


def _failure_record(
    status: str, how: str, ranks: dict[int, RankResult], world_size: int, log: str
) -> tuple[str, FailureRecord]:
    """Return the status and the failure of a rank that recorded one; otherwise the exit code is all there is."""
    silent = missing_ranks(ranks, world_size)
    for rank in sorted(ranks) if status == "failed" else ():
        result = ranks[rank]
        # Beside silent ranks the job was not stopped: the launcher stopped this rank because of them.
        was_stopped_by_launcher = bool(silent) and result.status in failure.STOPPED_STATUSES
        error = result.error
        if error is None or was_stopped_by_launcher or failure.is_peer_lost_message(error.type, error.message):
            continue
        record = failure.located_failure(error, rank, result.host)
        record.message += f" ({how})"
        record.traceback_tail = record.traceback_tail or log
        return result.status, record
    if silent:
        if (
            status == "failed"
            and not ranks
            and (without_torch := failure.missing_torch_failure(log, socket.gethostname()))
        ):
            return "unsupported", without_torch
        return status, failure.lost_ranks_failure(silent, ranks, how, log, failure.job_nodes())
    return status, FailureRecord(type="NoResult", message=f"{how}; every rank left a file, but rank 0 no result")
