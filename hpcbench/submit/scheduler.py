"""SLURM's answers about jobs: one batched query for all of them, squeue first, then sacct for those it forgot."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.submit.environment import clean_environment

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
_ARRAY_TASK = re.compile(r"\d+(?:_\d+)?")


def slurm_environment(profile: ClusterProfile) -> dict[str, str]:
    """The environment for the scheduler's commands: scrubbed, with the profile's configuration file and folder."""
    environment = clean_environment(profile.scheduler.config_file)
    if profile.scheduler.bin_folder:
        environment["PATH"] = os.pathsep.join((profile.scheduler.bin_folder, environment.get("PATH", os.defpath)))
    return environment


def adopt(profile: ClusterProfile) -> None:
    """Let submitit's own calls of sacct and scancel, which use this process's environment, reach the cluster."""
    if profile.scheduler.config_file:
        os.environ["SLURM_CONF"] = profile.scheduler.config_file
    if profile.scheduler.bin_folder:
        os.environ["PATH"] = slurm_environment(profile)["PATH"]


def job_states(job_ids: Iterable[str], profile: ClusterProfile, since_unix_s: float) -> dict[str, tuple[str, str]]:
    """State and reason of each job that the scheduler knows: our word, and SLURM's own.

    A job that neither command knows is left out: unknown is never taken for failed.
    Raises ``SubmitError`` where neither squeue nor sacct answers.
    """
    wanted = set(job_ids)
    masters = sorted({job_id.partition("_")[0] for job_id in wanted})
    environment = slurm_environment(profile)
    queue = ["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", ",".join(masters)]
    found, queue_error = _query(queue, environment)
    missing = wanted - found.keys()
    if missing:
        start = datetime.datetime.fromtimestamp(since_unix_s - 86400).strftime("%Y-%m-%dT%H:%M:%S")
        account = [
            "sacct",
            "-n",
            "-X",
            "-P",
            "-S",
            start,
            "-o",
            "JobID,State,Reason",
            "-j",
            ",".join(masters),
        ]
        late, account_error = _query(account, environment)
        if queue_error and account_error:
            raise SubmitError(f"the scheduler does not answer: {queue_error}", hint=f"sacct: {account_error}")
        found = {**late, **found}
    return {job_id: answer for job_id, answer in found.items() if job_id in wanted}


def _query(command: list[str], environment: Mapping[str, str]) -> tuple[dict[str, tuple[str, str]], str | None]:
    """States by job id, and why there are none. squeue calls ids that it has forgotten an error: that is no failure."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"{command[0]}: {error}"
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        return {}, f"{command[0]}: {done.stderr.strip()}"
    return parse_states(done.stdout), None


def parse_states(text: str) -> dict[str, tuple[str, str]]:
    """``id|STATE by 0|reason`` lines as our states; lines about something else are passed over."""
    states: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        job_id, _, rest = line.partition("|")
        state, _, reason = rest.partition("|")
        word = state.split(" ")[0].rstrip("+")
        ours = _ACTIVE.get(word) or _ENDED.get(word)
        if ours and _ARRAY_TASK.fullmatch(job_id):
            states[job_id] = (ours, word if reason in ("", "None") else f"{word}: {reason}")
    return states


def max_array_size(profile: ClusterProfile) -> int:
    """The largest array that may be submitted: the profile's word, else the scheduler's, else SLURM's default."""
    if profile.scheduler.max_array_size:
        return profile.scheduler.max_array_size
    command = ["scontrol", "show", "config"]
    try:
        done = subprocess.run(
            command, env=slurm_environment(profile), capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1001
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    # The largest index is one less than MaxArraySize, and ours begin at 0.
    return max(1, int(match[1])) if match else 1001


def which(command: str, profile: ClusterProfile) -> Path | None:
    """Where one of the scheduler's commands is."""
    import shutil

    found = shutil.which(command, path=slurm_environment(profile).get("PATH"))
    return Path(found) if found else None
