"""Failures that only the scheduler reports become results, without replacing one."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit import run_state
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.run_state import record_scheduler_failures, run_states
from hpcbench.submit.submit import submit


def ended(ago_s: float) -> str:
    return datetime.datetime.fromtimestamp(time.time() - ago_s).isoformat(timespec="seconds")


def look(plan: SweepPlan, tree: ClusterTree, after_s: float = 3600.0) -> list[str]:
    states = run_states(tree, plan.runs, plan.profile, time.time() + after_s)
    record_scheduler_failures(tree, states)
    return [one.state for one in states.values()]


def test_a_job_without_a_result_gets_the_schedulers_state(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "_REGISTRATION_DELAY_S", 0.0)
    submit(plan, cluster_tree)
    (fake_slurm / "sacct").write_text(
        f"4711_0|NODE_FAIL|None|{ended(600)}|\n4711_1|CANCELLED by 7|None|{ended(600)}|\n"
    )
    assert look(plan, cluster_tree) == ["failed"] * 2 + ["cancelled"] * 2
    (fake_slurm / "sacct").write_text("")
    first, _, second, _ = plan.runs
    result = cluster_tree.read_result(first)
    assert result is not None
    assert (result.status, result.attempt, result.spec) == ("failed", 0, plan.runs[first])
    assert result.error is not None
    assert "NODE_FAIL" in result.error.message
    assert look(plan, cluster_tree) == ["failed"] * 2 + ["cancelled"] * 2
    again = submit(plan, cluster_tree)
    assert {first, second} <= set(again.run_ids)


def test_the_attempt_that_began_is_the_one_that_ended_so(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    folder = submit(plan, cluster_tree).folder
    run_id = next(iter(plan.runs))
    start: dict[str, Any] = {"launch": "l", "host": "h", "started_unix_s": 1.0, "task_file": f"{folder}/0.jsonl"}
    begin_attempt(cluster_tree.run_folder(run_id), **start)
    begin_attempt(cluster_tree.run_folder(run_id), **start | {"task_file": "/of/small-0009/0.jsonl"})
    (fake_slurm / "sacct").write_text(f"4711_0|TIMEOUT|None|{ended(600)}|\n")
    look(plan, cluster_tree)
    result = cluster_tree.read_result(run_id)
    assert result is not None
    assert (result.status, result.attempt) == ("timeout", 1)


@pytest.mark.parametrize(
    "line", ["4711_0|TIMEOUT|None|{now}|", "4711_0|TIMEOUT|None|Unknown|", "4711_0|RUNNING|None|{past}|",
             "4711_0|COMPLETED|None|{past}|"],
)  # fmt: skip
def test_states_that_may_change_are_not_recorded(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, line: str
) -> None:
    """A result may show late on a slow file system; a job that ended well may have left its result elsewhere."""
    submit(plan, cluster_tree)
    (fake_slurm / "sacct").write_text(line.format(now=ended(5), past=ended(600)) + "\n")
    look(plan, cluster_tree)
    assert cluster_tree.summaries(plan.runs) == {}


@pytest.mark.parametrize("silent", ["squeue.silent", "sacct.silent"])
def test_a_run_is_lost_only_if_squeue_and_sacct_both_answered(
    silent: str, plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    """A command that prints nothing and ends with 0 has not answered; a clock that is wrong by years changes nothing."""
    submit(plan, cluster_tree)
    assert look(plan, cluster_tree, 3600) == look(plan, cluster_tree, 1e9) == ["lost"] * 4
    (fake_slurm / silent).touch()
    assert set(look(plan, cluster_tree, 3600)) <= {"waiting", "pending"}


def test_states_are_reported_where_results_cannot_be_written(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(plan, cluster_tree)
    (fake_slurm / "sacct").write_text(f"4711_0|TIMEOUT|None|{ended(600)}|\n")
    (cluster_tree.root / "runs").write_text("in the way" * os.getpid())
    assert look(plan, cluster_tree)[0] == "timeout"
