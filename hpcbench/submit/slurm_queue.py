"""Queries to SLURM about jobs: one batched squeue for all of them, then sacct for jobs that squeue no longer lists.

Also the classification of sbatch errors into refused, over a limit, unreachable and unclear."""

from __future__ import annotations

import contextlib
import datetime
import enum
import re
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from hpcbench.errors import SubmitError
from hpcbench.submit.journal import account_name
from hpcbench.submit.scheduler import HasSchedulerSettings, JobStatus, RunningCommand, command_environment, run_command

if TYPE_CHECKING:
    from hpcbench.config.cluster_profile import ClusterProfile


class SbatchOutcome(enum.Enum):
    """The kinds of failed calls, by the next step that they call for."""

    REFUSED = "refused"
    """The job is refused for good."""
    LIMIT = "limit"
    """Too many jobs are submitted: fewer at once, or later."""
    AWAY = "away"
    """The scheduler was not reached."""
    UNCLEAR = "unclear"
    """The scheduler was reached and did not answer in time: it may have accepted the job all the same."""


_UNREACHABLE_PATTERN = (
    r"Unable to contact slurm controller|Connection refused|temporarily unable to accept|Slurm backup controller|"
    r"Unable to establish (?:control|controller)|No route to host|Network is unreachable|Unable to resolve"
)
_NO_ANSWER_PATTERN = (
    r"timed out|Zero Bytes were transmitted|Resource temporarily unavailable|Message (?:receive|send) failure|"
    r"communication (?:connection|shutdown) failure|Connection reset|Transport endpoint|Unexpected message|Broken pipe"
)
_NAMED_LIMIT_PATTERN = r"\b(?:QOS|Assoc)\w+Limit\b"
_LIMIT_PATTERN = r"job submit limit|Too many (?:jobs|tasks)"


def classify_sbatch_error(message: str) -> SbatchOutcome:
    """The kind of a failed call of sbatch, from its error message.

    SLURM ends its answer with a sentence about submit, size and time limits together; if it names the limit as well,
    only that name counts.
    """
    named = re.findall(_NAMED_LIMIT_PATTERN, message)
    if named:
        return SbatchOutcome.LIMIT if any("Submit" in name for name in named) else SbatchOutcome.REFUSED
    if re.search(_LIMIT_PATTERN, message, re.IGNORECASE):
        return SbatchOutcome.LIMIT
    if re.search(_UNREACHABLE_PATTERN, message, re.IGNORECASE):
        return SbatchOutcome.AWAY
    return SbatchOutcome.UNCLEAR if re.search(_NO_ANSWER_PATTERN, message, re.IGNORECASE) else SbatchOutcome.REFUSED


_ACTIVE_JOB_STATES = {
    "PENDING": "pending", "CONFIGURING": "pending", "REQUEUED": "pending", "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending", "SPECIAL_EXIT": "pending", "RESV_DEL_HOLD": "pending",
    "RUNNING": "running", "COMPLETING": "running", "SUSPENDED": "running", "STOPPED": "running",
    "SIGNALING": "running", "STAGE_OUT": "running", "RESIZING": "running",
}  # fmt: skip
_ENDED_JOB_STATES = {
    "TIMEOUT": "timeout", "DEADLINE": "timeout", "CANCELLED": "cancelled", "REVOKED": "cancelled",
    "PREEMPTED": "preempted", "OUT_OF_MEMORY": "oom", "FAILED": "failed", "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed", "LAUNCH_FAILED": "failed", "COMPLETED": "lost",
}  # fmt: skip
_SQUEUE_IDS_PER_CALL = 2000
_TASK_RANGE_PATTERN = r"\d+(?:-\d+(?::\d+)?)?"
_JOB_ID_PATTERN = re.compile(
    rf"(?P<array>\d+)(?:_(?:\d+|\[(?P<tasks>{_TASK_RANGE_PATTERN}(?:,{_TASK_RANGE_PATTERN})*)(?:%\d+)?\]))?"
)


class QueueQuery:
    """A query of squeue about arrays. It is started at once and runs while this process does something else."""

    def __init__(self, arrays: Collection[str], profile: HasSchedulerSettings) -> None:
        self._environment = command_environment(profile)
        # Without -r the tasks of an array that wait are one line, which squeue would cut short.
        self._environment["SLURM_BITSTR_LEN"] = "0"
        command = ["squeue", "-h", "-t", "all", "-o", "%i|%T|%r|%e|%j|%N"]
        self._calls = [RunningCommand([*command, "-j", part], self._environment) for part in _id_lists(arrays)]

    def job_states(self, job_ids: Collection[str], since_unix_s: float) -> dict[str, JobStatus]:
        """The status of each job that SLURM lists: from squeue, else from sacct.

        A job that neither command lists is left out: unknown is never taken for failed. Other tasks of the arrays may
        be in it. Raises ``SubmitError`` if neither squeue nor sacct answers.
        """
        queued, queue_error = _collect_job_states(self._calls, are_queued=True)
        missing = [job_id for job_id in job_ids if job_id not in queued]
        if not missing:
            return queued
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix_s - 86400))
        account = ["sacct", "-n", "-X", "-P", "-S", start, "-o", "JobID,State,Reason,End,JobName,NodeList"]
        arrays = {job_id.partition("_")[0] for job_id in missing}
        ended, account_error = _collect_job_states(
            [RunningCommand([*account, "-j", part], self._environment) for part in _id_lists(arrays)]
        )
        if queue_error and account_error:
            raise SubmitError(f"the scheduler does not answer: {queue_error}", hint=f"sacct: {account_error}")
        assumed: dict[str, JobStatus] = {}
        if queue_error:
            # Accounting lags behind the queue: a job that it lacks may well be queued or running.
            assumed = dict.fromkeys(missing, JobStatus("pending", f"the scheduler does not answer: {queue_error}"))
            ended = {
                job_id: status._replace(
                    reason=f"{status.reason} in accounting; the scheduler does not answer: {queue_error}"
                )
                if status.state in ("pending", "running")
                else status
                for job_id, status in ended.items()
            }
        return {**assumed, **ended, **queued}


def _id_lists(arrays: Collection[str]) -> list[str]:
    """Comma-separated lists that fit on a command line."""
    ordered = sorted(arrays)
    return [
        ",".join(ordered[first : first + _SQUEUE_IDS_PER_CALL])
        for first in range(0, len(ordered), _SQUEUE_IDS_PER_CALL)
    ]


def _collect_job_states(
    calls: Iterable[RunningCommand], *, are_queued: bool = False
) -> tuple[dict[str, JobStatus], str | None]:
    """Statuses by job id, and the last error. For squeue an id that it has forgotten is an error; here it is not."""
    statuses: dict[str, JobStatus] = {}
    error = None
    for call in calls:
        result = call.result()
        if result.error is None or "Invalid job id" in result.error:
            statuses |= parse_job_states(result.output, are_queued=are_queued)
        else:
            error = result.error
    return statuses, error


def parse_job_states(text: str, *, are_queued: bool = False) -> dict[str, JobStatus]:
    """The jobs in lines ``id|STATE by 0|reason|end|name|nodes``; other lines are skipped.

    Jobs that squeue lists (``are_queued``) in a state that is unknown here are pending; otherwise they are skipped.
    """
    statuses: dict[str, JobStatus] = {}
    parsed: dict[str, JobStatus | None] = {}
    for line in text.splitlines():
        job_id, _, fields = line.partition("|")
        # The lines of the tasks of an array differ in their ids alone.
        if fields not in parsed:
            parsed[fields] = _parse_job_state(fields, "pending" if are_queued else None)
        status, job = parsed[fields], _JOB_ID_PATTERN.fullmatch(job_id)
        if status is None or job is None:
            continue
        if job["tasks"]:
            tasks = _expand_task_ranges(job["tasks"])
            statuses |= dict.fromkeys((f"{job['array']}_{task}" for task in tasks), status)
        else:
            statuses[job_id] = status
    return statuses


def _expand_task_ranges(text: str) -> Iterator[int]:
    """The numbers in a list such as ``0-3,7,10-20:2``."""
    for part in text.split(","):
        numbers, _, step = part.partition(":")
        first, _, last = numbers.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _parse_job_state(fields: str, other_state: str | None) -> JobStatus | None:
    """``other_state``: the state of a job whose word is in no table."""
    state, reason, end, name, nodes, *_ = [*fields.split("|", maxsplit=4), "", "", "", ""]
    word = state.split(" ")[0].rstrip("+")
    our_state = _ACTIVE_JOB_STATES.get(word) or _ENDED_JOB_STATES.get(word) or (other_state if word else None)
    if our_state is None:
        return None
    ended_unix_s = None
    if word in _ENDED_JOB_STATES:
        with contextlib.suppress(ValueError):
            ended_unix_s = datetime.datetime.fromisoformat(end).timestamp()
    reason = word if reason in ("", "None") else f"{word}: {reason}"
    return JobStatus(our_state, reason, name, ended_unix_s, "" if nodes.startswith("None") else nodes)


def find_job_by_name(name: str, profile: HasSchedulerSettings) -> str | None:
    """The number of the queued, running or just ended job called ``name``; ``None`` if squeue lists none.

    Raises ``SubmitError`` if squeue does not answer.
    """
    result = run_command(["squeue", "-h", "-t", "all", "-o", "%F|%j", "--name", name], profile)
    if result.error is not None:
        raise SubmitError(f"the scheduler does not answer: {result.error}")
    jobs = (line.partition("|") for line in result.output.splitlines())
    return next((job_id for job_id, _, job_name in jobs if job_name == name and job_id.isdecimal()), None)


def queued_job_numbers(numbers: Iterable[str], profile: HasSchedulerSettings) -> set[str]:
    """The ``numbers`` of jobs that are queued or running. Raises ``SubmitError`` if squeue does not answer."""
    result = run_command(["squeue", "-h", "-o", "%F", "-j", ",".join(numbers)], profile)
    if result.error is not None and "Invalid job id" not in result.error:
        raise SubmitError(f"the scheduler does not answer: {result.error}")
    return set(result.output.split())


def count_queued_jobs(profile: HasSchedulerSettings) -> int | None:
    """The user's jobs in the queue, array tasks counted singly; ``None`` if squeue does not answer."""
    result = run_command(["squeue", "-h", "-r", "-o", "%i", "-u", account_name()], profile)
    return None if result.error is not None else len(result.output.splitlines())


def private_data(profile: HasSchedulerSettings) -> str | None:
    """The value of PrivateData in slurm.conf, such as ``jobs,usage``; ``None`` if scontrol does not answer."""
    result = run_command(["scontrol", "show", "config"], profile)
    if result.error is not None:
        return None
    match = re.search(r"^PrivateData\s*=\s*(\S+)", result.output, re.MULTILINE)
    return match[1] if match else "none"


def hides_jobs(private: str | None) -> bool:
    """Whether an account sees its own jobs alone, by ``private_data``; without an answer it must be assumed."""
    return private is None or "jobs" in private.lower().split(",")


def max_array_size(profile: ClusterProfile) -> int:
    """The largest array that may be submitted: by the profile, else by the scheduler, else SLURM's default.

    Raises ``SubmitError`` if the scheduler is away: a guess that is too large would be refused once it is back.
    """
    if profile.scheduler.max_array_size:
        return profile.scheduler.max_array_size
    result = run_command(["scontrol", "show", "config"], profile)
    if result.error and classify_sbatch_error(result.error) in (SbatchOutcome.AWAY, SbatchOutcome.UNCLEAR):
        raise SubmitError(f"the scheduler does not answer: {result.error}")
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", result.output, re.MULTILINE)
    # The largest index is one less than MaxArraySize, and ours begin at 0.
    return max(1, int(match[1])) if match else 1001
