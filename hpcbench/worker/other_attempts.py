"""Whether another attempt of a run may be at work: asked before an attempt begins, so that nothing runs twice.

A submission may be sent twice by mistake, as no account and no clock sees everything. The start marker of an attempt
names its job, and the scheduler has the last word about that:

    a result of this or a later attempt ------> it has ended
    an earlier start of this very job --------> it has ended
    a job that the scheduler lists as ended,
    or lists no more, and would not hide -----> it has ended
    anything else ----------------------------> it may be at work
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping

from hpcbench.errors import WorkerError
from hpcbench.fileio import printable_text
from hpcbench.identity import find_process, process_namespace
from hpcbench.results.attempts import Attempt, AttemptStart

_SQUEUE_TIMEOUT_S = 60.0
_ENDED_STATES = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
})  # fmt: skip
_UNSEEN_PROCESS_MARGIN_S = 600.0
"""A process of another machine counts as ended this long after its attempt's time limit."""


class AttemptAtWork(WorkerError):
    """Another attempt of the run is at work, or may be; the message states which, and why."""


def slurm_job_id(env: Mapping[str, str]) -> str | None:
    """``ARRAYJOB_TASK`` in an array, else the job's number, else ``None``."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID")


def slurm_restart_count(env: Mapping[str, str]) -> int:
    """Return the number of restarts of this job by the scheduler."""
    text = env.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


class OtherAttempts:
    """The attempts of one run beside the one that is about to begin; each job is asked for once."""

    def __init__(self, ended_attempt: int) -> None:
        """``ended_attempt``: the attempt that the run's result is of; 0 without a result."""
        self._ended_attempt = ended_attempt
        self._answers: dict[tuple[str, str], str] = {}

    def check(self, attempt: Attempt) -> None:
        """Raise ``AttemptAtWork`` unless ``attempt`` has ended for certain."""
        if attempt.number <= self._ended_attempt:
            return
        start = attempt.read_start()
        # Without a start marker nothing ever began there.
        if start is not None and (why := self._why_at_work(start, attempt)):
            raise AttemptAtWork(f"attempt {attempt.number} {why}")

    def _why_at_work(self, start: AttemptStart, attempt: Attempt) -> str:
        """Empty if it has ended."""
        if start.job_id is None:
            return _why_process_at_work(start)
        own, cluster = slurm_job_id(os.environ), start.job_cluster or ""
        is_own_cluster = cluster in ("", os.environ.get("SLURM_CLUSTER_NAME", cluster))
        if start.job_id == own and is_own_cluster:
            if start.restart_count < slurm_restart_count(os.environ):
                return ""
            return f"is of another start of this job {own}, which the scheduler has not counted as a restart"
        key = (start.job_id, "" if is_own_cluster else cluster)
        if key not in self._answers:
            self._answers[key] = _why_job_at_work(*key, attempt)
        return self._answers[key]


def _why_process_at_work(start: AttemptStart) -> str:
    process = start.process
    if process is None:
        return ""
    host, boot, _ = process.machine.split(":", 2)
    own_host, own_boot, _ = process_namespace().split(":", 2)
    if host == own_host and boot != own_boot:
        return ""  # this machine has been started anew since
    if process.machine == process_namespace():
        return f"is at work (process {process.pid})" if find_process(process.pid) == process else ""
    if start.deadline_unix_s is not None and time.time() > start.deadline_unix_s + _UNSEEN_PROCESS_MARGIN_S:
        return ""
    return f"may be at work in process {process.pid} on {start.host}, which cannot be seen from here"


def _why_job_at_work(job_id: str, cluster: str, attempt: Attempt) -> str:
    """Ask squeue for the job, once. Empty if it has ended."""
    option = ["-M", cluster] if cluster else []
    code, output, complaint = _run(["squeue", *option, "-t", "all", "-o", "%i|%T|%u", "-j", job_id])
    if code != 0 and "Invalid job id" not in complaint:
        return f"is of job {job_id}, and squeue does not answer whether that has ended: {complaint}"
    rows = [line.strip().split("|") for line in output.splitlines()]
    states = {row[1] for row in rows if len(row) == 3 and row[0].split("_")[0] == job_id.split("_", maxsplit=1)[0]}
    states -= {"STATE"}
    if states:
        active = states - _ENDED_STATES
        return f"is of job {job_id}, which is {min(active)}" if active else ""
    if code == 0 and ["JOBID", "STATE", "USER"] not in rows:
        return f"is of job {job_id}, and squeue printed no table"
    return _why_hidden(job_id, option, attempt)


def _why_hidden(job_id: str, option: list[str], attempt: Attempt) -> str:
    """The scheduler lists no such job: it has forgotten one that ended, or hides one of another account."""
    try:
        owner = (attempt.folder / "attempt.json").stat().st_uid
    except OSError:
        return ""
    if owner == os.getuid():
        return ""
    code, output, complaint = _run(["scontrol", *option, "show", "config"])
    if code != 0:
        return (
            f"is of job {job_id} of another account, and scontrol does not answer whether that is hidden: {complaint}"
        )
    match = re.search(r"^PrivateData\s*=\s*(\S+)", output, re.MULTILINE)
    if match and "jobs" in match[1].lower().split(","):
        return f"is of job {job_id} of another account (uid {owner}), whose jobs SLURM hides (PrivateData)"
    return ""


def _run(command: list[str]) -> tuple[int | None, str, str]:
    """Exit code, output and complaint of a command of SLURM; no exit code if it did not end by itself."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCONTROL_"))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SQUEUE_TIMEOUT_S, env=env, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, "", printable_text(str(error))
    return done.returncode, done.stdout, printable_text(done.stderr.strip())
