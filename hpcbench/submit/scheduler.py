"""SLURM's answers about jobs: one batched query for all of them, squeue first, then sacct for those it forgot."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcbench.errors import SubmitError
from hpcbench.fileio import printable
from hpcbench.submit.address import Reachable
from hpcbench.submit.answers import Answer, classify
from hpcbench.submit.environment import clean_environment

if TYPE_CHECKING:
    from hpcbench.config.cluster import ClusterProfile

_ACTIVE = {
    "PENDING": "pending", "CONFIGURING": "pending", "REQUEUED": "pending", "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending", "SPECIAL_EXIT": "pending", "RESV_DEL_HOLD": "pending",
    "RUNNING": "running", "COMPLETING": "running", "SUSPENDED": "running", "STOPPED": "running",
    "SIGNALING": "running", "STAGE_OUT": "running", "RESIZING": "running",
}  # fmt: skip
_ENDED = {
    "TIMEOUT": "timeout", "DEADLINE": "timeout", "CANCELLED": "cancelled", "REVOKED": "cancelled",
    "PREEMPTED": "preempted", "OUT_OF_MEMORY": "oom", "FAILED": "failed", "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed", "LAUNCH_FAILED": "failed", "COMPLETED": "lost",
}  # fmt: skip
_IDS_PER_CALL = 2000
_RANGE = r"\d+(?:-\d+(?::\d+)?)?"
_JOB = re.compile(rf"(?P<array>\d+)(?:_(?:\d+|\[(?P<tasks>{_RANGE}(?:,{_RANGE})*)(?:%\d+)?\]))?")


def slurm_environment(profile: Reachable) -> dict[str, str]:
    """The environment for the scheduler's commands: scrubbed, with the profile's configuration file and folder."""
    environment = clean_environment(profile.scheduler.config_file)
    if profile.scheduler.bin_folder:
        environment["PATH"] = os.pathsep.join((profile.scheduler.bin_folder, environment.get("PATH", os.defpath)))
    return environment


def adopt(profile: Reachable) -> None:
    """Let submitit's own calls of sacct and scancel, which use this process's environment, reach the cluster."""
    if profile.scheduler.config_file:
        os.environ["SLURM_CONF"] = profile.scheduler.config_file
    if profile.scheduler.bin_folder:
        os.environ["PATH"] = slurm_environment(profile)["PATH"]


class JobAnswer(NamedTuple):
    """What the scheduler says of a job."""

    state: str
    """``pending``, ``running``, ``lost`` (it ended well) or a result's status."""
    reason: str
    """SLURM's own words."""
    name: str = ""
    ended_unix_s: float | None = None


class QueueLook:
    """A question to squeue about arrays, under way from the start; whoever asked does other things meanwhile."""

    def __init__(self, arrays: Collection[str], profile: Reachable) -> None:
        self._environment = slurm_environment(profile)
        # Without -r the tasks of an array that wait are one line, which squeue would cut short.
        self._environment["SLURM_BITSTR_LEN"] = "0"
        command = ["squeue", "-h", "-t", "all", "-o", "%i|%T|%r|%e|%j"]
        self._calls = [_Call([*command, "-j", part], self._environment) for part in _parts(arrays)]

    def job_states(self, job_ids: Collection[str], since_unix_s: float) -> dict[str, JobAnswer]:
        """What the scheduler says of each job that it knows: squeue first, then sacct for those that it forgot.

        A job that neither command knows is left out: unknown is never taken for failed. Neighbours in an array are in
        it. Raises ``SubmitError`` where neither squeue nor sacct answers.
        """
        found, queue_error = _answers(self._calls)
        left = [job_id for job_id in job_ids if job_id not in found]
        if not left:
            return found
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix_s - 86400))
        account = ["sacct", "-n", "-X", "-P", "-S", start, "-o", "JobID,State,Reason,End,JobName"]
        arrays = {job_id.partition("_")[0] for job_id in left}
        late, account_error = _answers([_Call([*account, "-j", part], self._environment) for part in _parts(arrays)])
        if queue_error and account_error:
            raise SubmitError(f"the scheduler does not answer: {queue_error}", hint=f"sacct: {account_error}")
        unheard: dict[str, JobAnswer] = {}
        if queue_error:
            # The accounts come later than the queue: what they do not have may well be queued or running.
            unheard = dict.fromkeys(left, JobAnswer("pending", f"the scheduler does not answer: {queue_error}"))
        return {**unheard, **late, **found}


def _parts(arrays: Collection[str]) -> list[str]:
    """The numbers as lists that fit on a command line."""
    ordered = sorted(arrays)
    return [",".join(ordered[first : first + _IDS_PER_CALL]) for first in range(0, len(ordered), _IDS_PER_CALL)]


class _Call:
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
        return said, f"{self._name}: {printable(complaint.strip())}" if failed else None


def _answers(calls: Iterable[_Call]) -> tuple[dict[str, JobAnswer], str | None]:
    """Answers by job id, and the last error. squeue calls an id that it has forgotten an error: it is none."""
    found: dict[str, JobAnswer] = {}
    error = None
    for call in calls:
        text, failed = call.answer()
        if failed is None or "Invalid job id" in failed:
            found |= parse_states(text)
        else:
            error = failed
    return found, error


def _run(command: list[str], environment: Mapping[str, str]) -> tuple[str, str | None]:
    return _Call(command, environment).answer()


def parse_states(text: str) -> dict[str, JobAnswer]:
    """``id|STATE by 0|reason|end|name`` lines as our states; lines about something else are passed over."""
    states: dict[str, JobAnswer] = {}
    answers: dict[str, JobAnswer | None] = {}
    for line in text.splitlines():
        job_id, _, said = line.partition("|")
        # The tasks of an array are many lines that say the same.
        if said not in answers:
            answers[said] = _answer(said)
        answer, job = answers[said], _JOB.fullmatch(job_id)
        if answer is None or job is None:
            continue
        if job["tasks"]:
            states |= dict.fromkeys((f"{job['array']}_{task}" for task in _tasks(job["tasks"])), answer)
        else:
            states[job_id] = answer
    return states


def _tasks(text: str) -> Iterator[int]:
    """The numbers that ``0-3,7,10-20:2`` stands for."""
    for part in text.split(","):
        numbers, _, step = part.partition(":")
        first, _, last = numbers.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _answer(said: str) -> JobAnswer | None:
    state, _, rest = said.partition("|")
    reason, _, rest = rest.partition("|")
    end, _, name = rest.partition("|")
    word = state.split(" ")[0].rstrip("+")
    ours = _ACTIVE.get(word) or _ENDED.get(word)
    if ours is None:
        return None
    words = word if reason in ("", "None") else f"{word}: {reason}"
    return JobAnswer(ours, words, name, None if word in _ACTIVE else _unix_s(end))


def _unix_s(text: str) -> float | None:
    import datetime

    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def job_named(name: str, profile: Reachable) -> str | None:
    """The number of the queued, running or just ended job called ``name``; ``None`` where squeue knows none.

    Raises ``SubmitError`` where squeue does not answer.
    """
    command = ["squeue", "-h", "-t", "all", "-o", "%F|%j", "--name", name]
    text, error = _run(command, slurm_environment(profile))
    if error is not None:
        raise SubmitError(f"the scheduler does not answer: {error}")
    found = (line.partition("|") for line in text.splitlines())
    return next((job_id for job_id, _, called in found if called == name and job_id.isdecimal()), None)


def queued_arrays(numbers: Iterable[str], profile: Reachable) -> set[str]:
    """Those of some jobs' numbers that are queued or running. Raises ``SubmitError`` where squeue does not answer."""
    command = ["squeue", "-h", "-o", "%F", "-j", ",".join(numbers)]
    text, error = _run(command, slurm_environment(profile))
    if error is not None and "Invalid job id" not in error:
        raise SubmitError(f"the scheduler does not answer: {error}")
    return set(text.split())


def queued_jobs(profile: Reachable) -> int | None:
    """How many jobs this user has in the queue, array tasks counted singly; ``None`` where squeue does not answer."""
    command = ["squeue", "-h", "-r", "-o", "%i", "-u", getpass.getuser()]
    text, error = _run(command, slurm_environment(profile))
    return None if error is not None else len(text.splitlines())


def max_array_size(profile: ClusterProfile) -> int:
    """The largest array that may be submitted: the profile's word, else the scheduler's, else SLURM's default.

    Raises ``SubmitError`` where the scheduler is away: a guess that is too large would be refused once it is back.
    """
    if profile.scheduler.max_array_size:
        return profile.scheduler.max_array_size
    text, error = _run(["scontrol", "show", "config"], slurm_environment(profile))
    if error is not None and classify(error) in (Answer.AWAY, Answer.UNCLEAR):
        raise SubmitError(f"the scheduler does not answer: {error}")
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    # The largest index is one less than MaxArraySize, and ours begin at 0.
    return max(1, int(match[1])) if match else 1001


def which(command: str, profile: Reachable) -> Path | None:
    """Where one of the scheduler's commands is."""
    import shutil

    found = shutil.which(command, path=slurm_environment(profile).get("PATH"))
    return Path(found) if found else None
