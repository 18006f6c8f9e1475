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


def job_states(job_ids: Collection[str], profile: Reachable, since_unix_s: float) -> dict[str, JobAnswer]:
    """What the scheduler says of each job that it knows: squeue first, then sacct for those that it forgot.

    A job that neither command knows is left out: unknown is never taken for failed. Neighbours in an array are in it.
    Raises ``SubmitError`` where neither squeue nor sacct answers.
    """
    environment = slurm_environment(profile)
    # Without -r the tasks of an array that wait are one line, which squeue would cut short.
    environment["SLURM_BITSTR_LEN"] = "0"
    queue = ["squeue", "-h", "-t", "all", "-o", "%i|%T|%r|%e|%j"]
    found, queue_error = _ask(queue, job_ids, environment)
    left = [job_id for job_id in job_ids if job_id not in found]
    if not left:
        return found
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix_s - 86400))
    account = ["sacct", "-n", "-X", "-P", "-S", start, "-o", "JobID,State,Reason,End,JobName"]
    late, account_error = _ask(account, left, environment)
    if queue_error and account_error:
        raise SubmitError(f"the scheduler does not answer: {queue_error}", hint=f"sacct: {account_error}")
    unheard: dict[str, JobAnswer] = {}
    if queue_error:
        # The accounts come later than the queue: what they do not have may well be queued or running.
        unheard = dict.fromkeys(left, JobAnswer("pending", f"the scheduler does not answer: {queue_error}"))
    return {**unheard, **late, **found}


def _ask(
    command: list[str], job_ids: Iterable[str], environment: Mapping[str, str]
) -> tuple[dict[str, JobAnswer], str | None]:
    """What ``command`` says of jobs, asked by their arrays, and the last error where it failed."""
    arrays = sorted({job_id.partition("_")[0] for job_id in job_ids})
    found: dict[str, JobAnswer] = {}
    error = None
    for first in range(0, len(arrays), _IDS_PER_CALL):
        answers, failed = _query([*command, "-j", ",".join(arrays[first : first + _IDS_PER_CALL])], environment)
        found |= answers
        error = failed or error
    return found, error


def _query(command: list[str], environment: Mapping[str, str]) -> tuple[dict[str, JobAnswer], str | None]:
    """Answers by job id, and why there are none. squeue calls an id that it has forgotten an error: it is none."""
    text, error = _run(command, environment)
    if error is not None and "Invalid job id" not in error:
        return {}, error
    return parse_states(text), None


def _run(command: list[str], environment: Mapping[str, str]) -> tuple[str, str | None]:
    """What a command printed, and what it complained about where it failed."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]}: {error}"
    return done.stdout, f"{command[0]}: {printable(done.stderr.strip())}" if done.returncode != 0 else None


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
