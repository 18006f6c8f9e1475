"""The attempt that a launch works on: claimed by ``begin`` or rank 0, found by the others. No torch here."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcbench.config.task import Task, TaskHeader
from hpcbench.errors import WorkerError
from hpcbench.results.attempts import Attempt, attempt_numbers, begin_attempt
from hpcbench.results.store import ClusterTree
from hpcbench.worker.cgroup import oom_kills
from hpcbench.worker.rank import RankInfo

NOTHING_TO_DO = 10
"""Exit code of ``begin`` where the run needs no attempt."""
PREEMPTED = 11
"""Exit code of ``end`` where the job is being preempted and the run is to be run again."""

_POLL_S = 0.1


def job_id(env: Mapping[str, str]) -> str | None:
    """``ARRAYJOB_TASK`` in an array, else the job's number, else ``None``."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID")


def restart_count(env: Mapping[str, str]) -> int:
    """How often the scheduler has started this job anew."""
    text = env.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def claim(
    tasks: Path, index: int, header: TaskHeader, task: Task, launch: str, time_limit_s: float | None = None
) -> Attempt:
    """Begin a new attempt of ``task`` and leave its start marker."""
    now = time.time()
    start: dict[str, Any] = {
        "launch": launch,
        "host": socket.gethostname(),
        "started_unix_s": now,
        "job_id": job_id(os.environ),
        "restart_count": restart_count(os.environ),
        "deadline_unix_s": _deadline(now, time_limit_s or task.time_limit_s),
        "oom_kills": oom_kills(),
        "task_file": str(tasks.absolute()),
        "index": index,
        "tree": header.tree,
    }
    return begin_attempt(ClusterTree(Path(header.tree)).run_folder(task.run_id), **start)


def _deadline(now: float, limit_s: float) -> float:
    """The launch's own limit, or the job's end where that comes first (a job began before its first run)."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return min(now + limit_s, float(end)) if end.isdecimal() and int(end) > now else now + limit_s


def find(run_folder: Path, info: RankInfo, wait_s: float) -> Attempt:
    """The attempt that rank 0 of this launch began; ``WorkerError`` once ``wait_s`` has passed.

    An attempt that already holds this rank's file is an earlier launch with the same id.
    """
    give_up = time.monotonic() + wait_s
    while True:
        for number in reversed(attempt_numbers(run_folder)):
            attempt = Attempt(run_folder, number)
            marker = attempt.start_marker()
            over = (attempt.folder / f"rank-{info.rank}.json").exists()
            if marker is not None and marker.launch == info.launch and not over:
                return attempt
        if time.monotonic() > give_up:
            raise WorkerError(
                f"rank {info.rank} waited {wait_s:g} s for rank 0 to begin an attempt of launch {info.launch!r} "
                f"in {run_folder / 'attempts'}",
                hint="is the results tree on a file system that all nodes share?",
            )
        time.sleep(_POLL_S)
