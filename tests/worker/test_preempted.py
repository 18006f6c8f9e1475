"""`end` for a run whose job was preempted."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import encode_task_file
from hpcbench.errors import EXIT_NOTHING_TO_DO, EXIT_PREEMPTED
from hpcbench.render.job_script import make_job_shape, template_context
from hpcbench.results.schema import FailureRecord
from hpcbench.worker.end import end, is_preempted
from hpcbench.worker.summary import summarize_run
from tests.worker.helpers import (
    failure,
    make_header,
    make_rank,
    make_spec,
    make_task,
    start_attempt,
    tree_of,
    write_tasks,
)

SPEC = make_spec(strategy="ddp", tasks_per_node=2, dp_degree=2)
JOB = "JobId=1 JobName=x Requeue=1 Restarts=0 BatchFlag=1 JobState={state} Reason=None PreemptEligibleTime=2026-11-21T06:27:43 PreemptTime={time} SuspendTime=None"
RUNNING = JOB.format(state="RUNNING", time="None")
PREEMPTED = JOB.format(state="RUNNING", time="2026-11-21T06:27:47")
REQUEUED = "JobId=1 JobState=COMPLETING Reason=None Requeue=1 Restarts=1 BatchFlag=1 SuspendTime=None"


@pytest.mark.parametrize(
    ("job_says", "restarts", "expected"),
    [
        ("", 0, False),
        ("slurm_load_jobs error: Invalid job id specified", 0, False),
        (RUNNING, 0, False),
        (JOB.format(state="RUNNING", time="N/A"), 0, False),
        (JOB.format(state="COMPLETING", time="None"), 0, False),
        (PREEMPTED, 0, True),
        (JOB.format(state="PREEMPTED", time="None"), 0, True),
        (REQUEUED, 0, True),
        (REQUEUED, 1, False),
        ("JobId=1 JobName=PreemptTime=2026-11-21T06:27:47 Restarts=0 PreemptTime=None", 0, False),
    ],
)
def test_preemption_is_recognised_from_the_job_state(job_says: str, restarts: int, expected: bool) -> None:
    assert is_preempted(job_says, restarts) is expected


def status_of(folder: Path) -> str:
    result = tree_of(folder).read_result(make_task(SPEC).run_id)
    assert result is not None
    return result.status


@pytest.mark.parametrize(
    ("status", "kind", "message", "job_says", "received", "expected"),
    [
        ("cancelled", "Stopped", "stopped by SIGTERM", PREEMPTED, "", ("preempted", 11)),
        ("cancelled", "Stopped", "stopped by SIGTERM", REQUEUED, "TERM", ("preempted", 11)),
        ("timeout", "Stopped", "stopped by SIGTERM at the time limit", PREEMPTED, "", ("preempted", 11)),
        ("failed", "RankLost", "rank 1 ended without leaving a file", PREEMPTED, "", ("preempted", 11)),
        ("failed", "RuntimeError", "Connection reset by peer", REQUEUED, "TERM", ("preempted", 11)),
        ("timeout", "Stopped", "reached the time limit", PREEMPTED, "", ("timeout", 0)),
        ("cancelled", "Stopped", "stopped by SIGUSR2 long before the time limit", PREEMPTED, "USR2", ("preempted", 11)),
        ("failed", "ValueError", "no such thing", PREEMPTED, "", ("failed", 0)),
        ("oom", "OutOfMemoryError", "too much", PREEMPTED, "", ("oom", 0)),
        ("ok", "", "", PREEMPTED, "", ("ok", 0)),
        ("cancelled", "Stopped", "stopped by SIGTERM", RUNNING, "TERM", ("cancelled", 0)),
        ("cancelled", "Stopped", "stopped by SIGTERM", "", "TERM", ("cancelled", 0)),
    ],
)
def test_a_recorded_cancellation_becomes_a_preemption(
    tmp_path: Path, status: str, kind: str, message: str, job_says: str, received: str, expected: tuple[str, int]
) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    attempt = start_attempt(tmp_path, SPEC)
    for rank in range(2):
        attempt.write_rank(make_rank(rank, status=status))
    error = FailureRecord(type=kind, message=message) if kind else None
    tree_of(tmp_path).write_result(summarize_run(make_header(tmp_path), make_task(SPEC), 1, {}, status, error))
    code = end(tasks, 0, 1, 1, received, job_says)
    assert (status_of(tmp_path), code) == expected


@pytest.mark.parametrize(
    ("exit_code", "left", "expected"),
    [
        (143, {}, ("preempted", 11)),
        (137, {1: make_rank(1, status="cancelled", error=failure("Stopped", "stopped by SIGTERM"))}, ("preempted", 11)),
        (1, {1: make_rank(1, status="failed", error=failure("ValueError", "no"))}, ("failed", 0)),
    ],
)
def test_preempted_ranks_without_results_end_preempted_or_failed(
    tmp_path: Path, exit_code: int, left: dict[int, object], expected: tuple[str, int]
) -> None:
    tasks = write_tasks(tmp_path, SPEC)
    attempt = start_attempt(tmp_path, SPEC, deadline_unix_s=time.time() + 500)
    for one in left.values():
        attempt.write_rank(one)  # type: ignore[arg-type]
    code = end(tasks, 0, 1, exit_code, "", PREEMPTED)
    assert (status_of(tmp_path), code) == expected


def test_a_preempted_second_measurement_keeps_the_earlier_result(tmp_path: Path) -> None:
    task = msgspec.structs.replace(make_task(SPEC), supersedes="old")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_bytes(encode_task_file(make_header(tmp_path, environment_key="new"), [task]))
    start_attempt(tmp_path, SPEC)
    tree_of(tmp_path).write_result(summarize_run(make_header(tmp_path, environment_key="old"), task, 1, {}, "ok"))
    start_attempt(tmp_path, SPEC)
    assert end(tasks, 0, 2, 1, "", PREEMPTED) == EXIT_PREEMPTED
    assert status_of(tmp_path) == "ok"


def test_scripts_and_worker_mean_the_same_exit_codes(tmp_path: Path) -> None:
    shape = make_job_shape(ClusterProfile(name="here"), 1, 1)
    values = template_context(shape, "sweep", tmp_path, 0)
    assert (values["nothing_to_do"], values["preempted"]) == (EXIT_NOTHING_TO_DO, EXIT_PREEMPTED) == (10, 11)
