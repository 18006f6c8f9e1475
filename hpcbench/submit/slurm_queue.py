"""Queries to SLURM about jobs: one batched squeue for all of them, then sacct for jobs that squeue no longer lists.

Also the classification of sbatch errors into refused, over a limit, unreachable and unclear."""

from __future__ import annotations

import enum
import getpass
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcbench.errors import SubmitError
from hpcbench.fileio import printable_text
from hpcbench.submit.scheduler_settings import HasSchedulerSettings, scrubbed_environment

if TYPE_CHECKING:
    from hpcbench.config.cluster_profile import ClusterProfile


class SbatchOutcome(enum.Enum):
    """The kinds of answers that differ in what is to be done next."""

    REFUSED = "refused"
    """It will not be taken, however often it is asked for."""
    LIMIT = "limit"
    """Too many jobs are submitted: fewer at once, or later."""
    AWAY = "away"
    """The scheduler was not reached."""
    UNCLEAR = "unclear"
    """The scheduler was reached and did not answer in time: it may have taken the job all the same."""


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


def classify_sbatch_error(said: str) -> SbatchOutcome:
    """The kind of a failed call of sbatch, from its words.

    SLURM ends its answer with a sentence about submit, size and time limits together; where it names the limit
    besides, only that name counts.
    """
    named = re.findall(_NAMED_LIMIT_PATTERN, said)
    if named:
        return SbatchOutcome.LIMIT if any("Submit" in name for name in named) else SbatchOutcome.REFUSED
    if re.search(_LIMIT_PATTERN, said, re.IGNORECASE):
        return SbatchOutcome.LIMIT
    if re.search(_UNREACHABLE_PATTERN, said, re.IGNORECASE):
        return SbatchOutcome.AWAY
    return SbatchOutcome.UNCLEAR if re.search(_NO_ANSWER_PATTERN, said, re.IGNORECASE) else SbatchOutcome.REFUSED


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


def slurm_environment(profile: HasSchedulerSettings) -> dict[str, str]:
    """The environment for the scheduler's commands: scrubbed, with the profile's configuration file and folder."""
    environment = scrubbed_environment(profile.scheduler.config_file)
    if profile.scheduler.bin_folder:
        environment["PATH"] = os.pathsep.join((profile.scheduler.bin_folder, environment.get("PATH", os.defpath)))
    return environment


def export_slurm_settings(profile: HasSchedulerSettings) -> None:
    """Let submitit's own calls of sacct and scancel, which use this process's environment, reach the cluster."""
    if profile.scheduler.config_file:
        os.environ["SLURM_CONF"] = profile.scheduler.config_file
    if profile.scheduler.bin_folder:
        os.environ["PATH"] = slurm_environment(profile)["PATH"]


class JobStatus(NamedTuple):
    """What the scheduler says of a job."""

    state: str
    """``pending``, ``running``, ``lost`` (it ended well) or a result's status."""
    reason: str
    """SLURM's own words."""
    name: str = ""
    ended_unix_s: float | None = None


class QueueQuery:
    """A question to squeue about arrays, under way from the start; whoever asked does other things meanwhile."""

    def __init__(self, arrays: Collection[str], profile: HasSchedulerSettings) -> None:
        self._environment = slurm_environment(profile)
        # Without -r the tasks of an array that wait are one line, which squeue would cut short.
        self._environment["SLURM_BITSTR_LEN"] = "0"
        command = ["squeue", "-h", "-t", "all", "-o", "%i|%T|%r|%e|%j"]
        self._calls = [_RunningCommand([*command, "-j", part], self._environment) for part in _id_lists(arrays)]

    def job_states(self, job_ids: Collection[str], since_unix_s: float) -> dict[str, JobStatus]:
        """What the scheduler says of each job that it knows: squeue first, then sacct for those that it forgot.

        A job that neither command knows is left out: unknown is never taken for failed. Neighbours in an array are in
        it. Raises ``SubmitError`` where neither squeue nor sacct answers.
        """
        found, queue_error = _collect_job_states(self._calls)
        left = [job_id for job_id in job_ids if job_id not in found]
        if not left:
            return found
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix_s - 86400))
        account = ["sacct", "-n", "-X", "-P", "-S", start, "-o", "JobID,State,Reason,End,JobName"]
        arrays = {job_id.partition("_")[0] for job_id in left}
        late, account_error = _collect_job_states(
            [_RunningCommand([*account, "-j", part], self._environment) for part in _id_lists(arrays)]
        )
        if queue_error and account_error:
            raise SubmitError(f"the scheduler does not answer: {queue_error}", hint=f"sacct: {account_error}")
        unheard: dict[str, JobStatus] = {}
        if queue_error:
            # The accounts come later than the queue: what they do not have may well be queued or running.
            unheard = dict.fromkeys(left, JobStatus("pending", f"the scheduler does not answer: {queue_error}"))
        return {**unheard, **late, **found}


def _id_lists(arrays: Collection[str]) -> list[str]:
    """The numbers as lists that fit on a command line."""
    ordered = sorted(arrays)
    return [
        ",".join(ordered[first : first + _SQUEUE_IDS_PER_CALL])
        for first in range(0, len(ordered), _SQUEUE_IDS_PER_CALL)
    ]


class _RunningCommand:
    """A command that runs while this process does something else."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._name = command[0]
        self._process: subprocess.Popen[str] | OSError
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        except OSError as error:
            self._process = error

    def answer(self) -> tuple[str, str | None]:
        """What the command printed, and what it complained about where it failed."""
        if isinstance(self._process, OSError):
            return "", f"{self._name}: {self._process}"
        try:
            said, complaint = self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            return "", f"{self._name}: {error}"
        failed = self._process.returncode != 0
        return said, f"{self._name}: {printable_text(complaint.strip())}" if failed else None


def _collect_job_states(calls: Iterable[_RunningCommand]) -> tuple[dict[str, JobStatus], str | None]:
    """Answers by job id, and the last error. squeue calls an id that it has forgotten an error: it is none."""
    found: dict[str, JobStatus] = {}
    error = None
    for call in calls:
        text, failed = call.answer()
        if failed is None or "Invalid job id" in failed:
            found |= parse_job_states(text)
        else:
            error = failed
    return found, error


def _run_command(command: list[str], environment: Mapping[str, str]) -> tuple[str, str | None]:
    return _RunningCommand(command, environment).answer()


def parse_job_states(text: str) -> dict[str, JobStatus]:
    """``id|STATE by 0|reason|end|name`` lines as our states; lines about something else are passed over."""
    states: dict[str, JobStatus] = {}
    answers: dict[str, JobStatus | None] = {}
    for line in text.splitlines():
        job_id, _, said = line.partition("|")
        # The tasks of an array are many lines that say the same.
        if said not in answers:
            answers[said] = _parse_job_state(said)
        answer, job = answers[said], _JOB_ID_PATTERN.fullmatch(job_id)
        if answer is None or job is None:
            continue
        if job["tasks"]:
            states |= dict.fromkeys((f"{job['array']}_{task}" for task in _expand_task_ranges(job["tasks"])), answer)
        else:
            states[job_id] = answer
    return states


def _expand_task_ranges(text: str) -> Iterator[int]:
    """The numbers that ``0-3,7,10-20:2`` stands for."""
    for part in text.split(","):
        numbers, _, step = part.partition(":")
        first, _, last = numbers.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _parse_job_state(said: str) -> JobStatus | None:
    state, _, rest = said.partition("|")
    reason, _, rest = rest.partition("|")
    end, _, name = rest.partition("|")
    word = state.split(" ")[0].rstrip("+")
    ours = _ACTIVE_JOB_STATES.get(word) or _ENDED_JOB_STATES.get(word)
    if ours is None:
        return None
    words = word if reason in ("", "None") else f"{word}: {reason}"
    return JobStatus(ours, words, name, None if word in _ACTIVE_JOB_STATES else _parse_end_time(end))


def _parse_end_time(text: str) -> float | None:
    import datetime

    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def find_job_by_name(name: str, profile: HasSchedulerSettings) -> str | None:
    """The number of the queued, running or just ended job called ``name``; ``None`` where squeue knows none.

    Raises ``SubmitError`` where squeue does not answer.
    """
    command = ["squeue", "-h", "-t", "all", "-o", "%F|%j", "--name", name]
    text, error = _run_command(command, slurm_environment(profile))
    if error is not None:
        raise SubmitError(f"the scheduler does not answer: {error}")
    found = (line.partition("|") for line in text.splitlines())
    return next((job_id for job_id, _, called in found if called == name and job_id.isdecimal()), None)


def queued_job_numbers(numbers: Iterable[str], profile: HasSchedulerSettings) -> set[str]:
    """Those of some jobs' numbers that are queued or running. Raises ``SubmitError`` where squeue does not answer."""
    command = ["squeue", "-h", "-o", "%F", "-j", ",".join(numbers)]
    text, error = _run_command(command, slurm_environment(profile))
    if error is not None and "Invalid job id" not in error:
        raise SubmitError(f"the scheduler does not answer: {error}")
    return set(text.split())


def count_queued_jobs(profile: HasSchedulerSettings) -> int | None:
    """How many jobs this user has in the queue, array tasks counted singly; ``None`` where squeue does not answer."""
    command = ["squeue", "-h", "-r", "-o", "%i", "-u", getpass.getuser()]
    text, error = _run_command(command, slurm_environment(profile))
    return None if error is not None else len(text.splitlines())


def max_array_size(profile: ClusterProfile) -> int:
    """The largest array that may be submitted: the profile's word, else the scheduler's, else SLURM's default.

    Raises ``SubmitError`` where the scheduler is away: a guess that is too large would be refused once it is back.
    """
    if profile.scheduler.max_array_size:
        return profile.scheduler.max_array_size
    text, error = _run_command(["scontrol", "show", "config"], slurm_environment(profile))
    if error is not None and classify_sbatch_error(error) in (SbatchOutcome.AWAY, SbatchOutcome.UNCLEAR):
        raise SubmitError(f"the scheduler does not answer: {error}")
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    # The largest index is one less than MaxArraySize, and ours begin at 0.
    return max(1, int(match[1])) if match else 1001


def find_command(command: str, profile: HasSchedulerSettings) -> Path | None:
    """Where one of the scheduler's commands is."""
    import shutil

    found = shutil.which(command, path=slurm_environment(profile).get("PATH"))
    return Path(found) if found else None
