"""``clean``: what it lists, what it keeps for jobs, and what it removes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.errors import StorageError
from hpcbench.results.attempts import Attempt, begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RunResult
from hpcbench.submit.leftovers import find_leftovers, remove_leftovers
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.submission_record import list_submissions, read_sweep_record
from hpcbench.submit.submit import RunSelection, submit
from tests.cli.test_cli import hpcbench

WEEKS_S = 30 * 86400.0


def finish(tree: ClusterTree, run_id: str, spec: RunSpec, status: str, attempt: int) -> None:
    error = None if status == "ok" else FailureRecord(type="Test", message="as told")
    named: dict[str, Any] = {"run_id": run_id, "config_id": config_id(spec), "sweep": "small", "cluster": "test"}
    assert tree.write_result(RunResult(**named, attempt=attempt, status=status, spec=spec, error=error))


def begin(tree: ClusterTree, run_id: str, submission: str, **more: Any) -> Attempt:
    task_file = str(tree.submissions / submission / "0.jsonl")
    started_unix_s = more.pop("started_unix_s", time.time())
    attempt = begin_attempt(
        tree.run_folder(run_id), launch="x", host="n", started_unix_s=started_unix_s, task_file=task_file, **more
    )
    (attempt.folder / "out.log").write_text("x" * 5000)
    return attempt


def found(
    tree: ClusterTree, plan: SweepPlan, *, sweep: str | None = None, after_s: float = 60.0, min_age_s: float = 0.0
) -> dict[str, str]:
    search = find_leftovers(tree, plan.profile, sweep=sweep, min_age_s=min_age_s, now_unix_s=time.time() + after_s)
    return {leftover.path.relative_to(tree.root).as_posix(): leftover.kind for leftover in search.items}


def job_states(fake_slurm: Path, state: str) -> None:
    """Give all jobs of the four first calls of sbatch a state."""
    lines = [f"{job}{task}|{state}|None\n" for job in (4711, 4712, 4713, 4714) for task in ("", "_0", "_1")]
    (fake_slurm / "squeue").write_text("" if state not in ("RUNNING", "PENDING") else "".join(lines))
    (fake_slurm / "sacct").write_text("".join(lines))


@pytest.fixture
def run_id(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that failed, was submitted again and is ok: attempts 1 and 2."""
    monkeypatch.setenv("FAKE_COUNT_IDS", "1")
    submit(plan, cluster_tree)
    run_id = next(iter(plan.runs))
    job_states(fake_slurm, "PENDING")
    begin(cluster_tree, run_id, "small-0001")
    finish(cluster_tree, run_id, plan.runs[run_id], "failed", 1)
    for command in ("squeue", "sacct"):
        text = (fake_slurm / command).read_text().replace("4711_0|PENDING|None", "4711_0|FAILED|None")
        (fake_slurm / command).write_text(text)
    submit(plan, cluster_tree, RunSelection(frozenset({"failed"}), only_again=True))
    job_states(fake_slurm, "FAILED")
    begin(cluster_tree, run_id, "small-0002")
    finish(cluster_tree, run_id, plan.runs[run_id], "ok", 2)
    return run_id


def test_an_empty_tree_has_none(plan: SweepPlan, cluster_tree: ClusterTree) -> None:
    assert found(cluster_tree, plan) == {}


def test_an_attempt_that_was_replaced_is_old(plan: SweepPlan, cluster_tree: ClusterTree, run_id: str) -> None:
    assert found(cluster_tree, plan) == {f"runs/{run_id[:2]}/{run_id}/attempts/1": "old attempt"}
    assert found(cluster_tree, plan, sweep="small") == found(cluster_tree, plan)
    assert found(cluster_tree, plan, min_age_s=3600) == {}


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "EXPEDITING"])
def test_leftovers_of_a_job_that_may_run_are_kept(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, fake_slurm: Path, state: str
) -> None:
    job_states(fake_slurm, state)
    search = find_leftovers(cluster_tree, plan.profile, sweep=None, min_age_s=0, now_unix_s=time.time() + 60)
    assert (search.items, [reason.endswith("may not have ended") for reason in search.kept]) == ([], [True])


def test_a_silent_scheduler_keeps_all(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, fake_slurm: Path
) -> None:
    for command in ("squeue", "sacct"):
        (fake_slurm / f"{command}.error").write_text("Unable to contact slurm controller")
    assert found(cluster_tree, plan, after_s=WEEKS_S) == {}


def test_a_forgotten_job_is_kept_for_its_lease(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, fake_slurm: Path
) -> None:
    for command in ("squeue", "sacct"):
        (fake_slurm / command).write_text("")
    assert found(cluster_tree, plan, after_s=86400) == {}
    assert list(found(cluster_tree, plan, after_s=WEEKS_S).values()) == ["old attempt"]


def test_a_deadline_ahead_keeps_an_attempt(plan: SweepPlan, cluster_tree: ClusterTree, run_id: str) -> None:
    begin(cluster_tree, run_id, "small-0001", deadline_unix_s=time.time() + 9000)
    begin(cluster_tree, run_id, "small-0001")
    assert found(cluster_tree, plan) == {f"runs/{run_id[:2]}/{run_id}/attempts/1": "old attempt"}


def test_the_attempt_of_the_result_and_the_newest_are_kept(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str
) -> None:
    for _ in range(2):
        begin(cluster_tree, run_id, "small-0002")
    folder = f"runs/{run_id[:2]}/{run_id}/attempts"
    assert found(cluster_tree, plan) == {f"{folder}/{number}": "old attempt" for number in (1, 3)}


def test_a_broken_result_keeps_all_attempts(plan: SweepPlan, cluster_tree: ClusterTree, run_id: str) -> None:
    cluster_tree.result_path(run_id).write_text("{")
    assert found(cluster_tree, plan) == {}


def test_leftovers_of_a_killed_submit_are_found(plan: SweepPlan, cluster_tree: ClusterTree, run_id: str) -> None:
    killed = cluster_tree.submissions / "small-0003"
    killed.mkdir()
    (killed / "0.sh").write_text("#!/bin/sh\n")
    (cluster_tree.submissions / "other-0001").mkdir()
    (cluster_tree.submissions / "..lock.0a1b2c3d.tmp").write_text("{}")
    (cluster_tree.submissions / "by-hand").mkdir()
    everything = found(cluster_tree, plan)
    assert everything.pop(f"runs/{run_id[:2]}/{run_id}/attempts/1") == "old attempt"
    assert everything == {
        "submissions/small-0003": "unfinished submission",
        "submissions/other-0001": "unfinished submission",
        "submissions/..lock.0a1b2c3d.tmp": "temporary file",
    }
    assert "submissions/other-0001" not in found(cluster_tree, plan, sweep="small")


def test_a_submission_all_of_whose_runs_went_again_is_old(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    submit(plan, cluster_tree)
    job_states(fake_slurm, "FAILED")
    for run_id, spec in plan.runs.items():
        begin(cluster_tree, run_id, "small-0001")
        finish(cluster_tree, run_id, spec, "failed", 1)
    submit(plan, cluster_tree, RunSelection(frozenset({"failed"}), only_again=True))
    # Their results are still those of its attempts.
    assert found(cluster_tree, plan) == {}
    for run_id, spec in plan.runs.items():
        begin(cluster_tree, run_id, "small-0002")
        finish(cluster_tree, run_id, spec, "ok", 2)
    assert sorted(found(cluster_tree, plan).values()) == ["old attempt"] * 4 + ["old submission"]
    search = remove_leftovers(cluster_tree, plan.profile, sweep=None, min_age_s=0, now_unix_s=time.time() + 60)
    assert (len(search.items), search.failed, found(cluster_tree, plan)) == (5, [], {})
    assert [folder.name for folder, _ in list_submissions(cluster_tree)] == ["small-0002"]
    assert {cluster_tree.read_result(key).status for key in plan.runs} == {"ok"}  # type: ignore[union-attr]


@pytest.mark.parametrize(("status", "is_orphan"), [(None, True), ("failed", True), ("ok", False), ("oom", False)])
def test_orphans_are_attempts_without_a_measurement(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, status: str | None, is_orphan: bool
) -> None:
    other = list(plan.runs)[1]
    begin(cluster_tree, other, "small-0001")
    if status is not None:
        finish(cluster_tree, other, plan.runs[other], status, 1)
    record = read_sweep_record(cluster_tree, "small")
    assert record is not None
    record.run_ids.remove(other)
    path = cluster_tree.sweep_path("small")
    path.write_bytes(msgspec.json.encode(record))
    orphan = f"runs/{other[:2]}/{other}"
    assert (found(cluster_tree, plan, sweep="small").get(orphan) == "orphan") is is_orphan
    # A record that cannot be read may be the one that contains it.
    (path.parent / "broken.json").write_text("{")
    assert orphan not in found(cluster_tree, plan)


def test_a_submission_that_cannot_be_read_keeps_all(plan: SweepPlan, cluster_tree: ClusterTree, run_id: str) -> None:
    (cluster_tree.submissions / "small-0002" / "submission.json").write_text("{")
    search = find_leftovers(cluster_tree, plan.profile, sweep=None, min_age_s=0, now_unix_s=time.time() + WEEKS_S)
    assert (search.items, "cannot be read" in search.kept[0]) == ([], True)


def test_links_are_neither_followed_nor_removed(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (outside / "attempts" / "1").mkdir(parents=True)
    (outside / "attempts" / "2").mkdir()
    (cluster_tree.root / "runs" / "ab").mkdir()
    (cluster_tree.root / "runs" / "ab" / "ab00000000000000").symlink_to(outside)
    (cluster_tree.submissions / "small-0009").symlink_to(outside)
    remove_leftovers(cluster_tree, plan.profile, sweep=None, min_age_s=0, now_unix_s=time.time() + 60)
    assert sorted(path.name for path in (outside / "attempts").iterdir()) == ["1", "2"]
    assert (cluster_tree.submissions / "small-0009").is_symlink()


def test_a_refused_removal_is_an_error(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    search = remove_leftovers(cluster_tree, plan.profile, sweep=None, min_age_s=0, now_unix_s=time.time() + 60)
    assert search.items == []
    assert isinstance(search.failed[0], StorageError)


def test_the_command_clean_removes_only_with_its_option(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "test.toml").write_text('name = "test"\n')
    attempt = cluster_tree.run_folder(run_id) / "attempts" / "1"
    arguments = ("clean", "small", "--older-than", "0 s")
    shown = hpcbench(*arguments, cwd=tmp_path)
    assert (shown.returncode, "old attempt" in shown.stdout, attempt.is_dir()) == (0, True, True), shown.stderr
    assert "1 leftover, " in shown.stderr
    assert "nothing was changed, --yes removes them" in shown.stderr
    young = hpcbench("clean", "--all", cwd=tmp_path)
    assert "1 leftovers that changed a short time ago" in young.stderr, young.stderr
    done = hpcbench(*arguments, "--yes", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, document["removed"], attempt.exists()) == (0, True, False), done.stderr
    assert [leftover["path"] for leftover in document["clusters"][0]["leftovers"]] == [os.fspath(attempt)]
    neither = hpcbench("clean", cwd=tmp_path)
    assert (neither.returncode, "one of SWEEP and --all" in neither.stderr) == (2, True)
