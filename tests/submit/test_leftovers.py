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
from hpcbench.submit.submit import submit
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


def found(tree: ClusterTree, *, after_s: float = 60.0, min_age_s: float = 0.0) -> dict[str, str]:
    leftovers = find_leftovers(tree, min_age_s=min_age_s, now_unix_s=time.time() + after_s)
    return {leftover.path.relative_to(tree.root).as_posix(): leftover.kind for leftover in leftovers}


def take_out(tree: ClusterTree, *run_ids: str) -> Path:
    """Remove runs from the sweep's record, as a sweep that was edited and submitted again does."""
    record = read_sweep_record(tree, "small")
    assert record is not None
    record.run_ids = [run_id for run_id in record.run_ids if run_id not in run_ids]
    path = tree.sweep_path("small")
    path.write_bytes(msgspec.json.encode(record))
    return path


@pytest.fixture
def run_id(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> str:
    """A run with an attempt that failed and one that is ok."""
    submit(plan, cluster_tree)
    run_id = next(iter(plan.runs))
    for attempt, status in ((1, "failed"), (2, "ok")):
        begin(cluster_tree, run_id, "small-0001")
        finish(cluster_tree, run_id, plan.runs[run_id], status, attempt)
    return run_id


def test_an_empty_tree_has_none(cluster_tree: ClusterTree) -> None:
    assert found(cluster_tree) == {}


def test_the_runs_of_a_sweep_keep_everything(plan: SweepPlan, cluster_tree: ClusterTree, run_id: str) -> None:
    begin(cluster_tree, list(plan.runs)[1], "small-0001")
    assert found(cluster_tree, after_s=WEEKS_S) == {}


def test_leftovers_of_a_killed_submit_are_found(plan: SweepPlan, cluster_tree: ClusterTree, run_id: str) -> None:
    killed = cluster_tree.submissions / "small-0003"
    killed.mkdir()
    (killed / "0.sh").write_text("#!/bin/sh\n")
    (cluster_tree.submissions / "other-0001").mkdir()
    (cluster_tree.submissions / "..lock.0a1b2c3d.tmp").write_text("{}")
    (cluster_tree.submissions / "by-hand").mkdir()
    assert found(cluster_tree) == {
        "submissions/small-0003": "unfinished submission",
        "submissions/other-0001": "unfinished submission",
        "submissions/..lock.0a1b2c3d.tmp": "temporary file",
    }


def test_a_submission_of_runs_in_no_sweep_is_old(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> None:
    submit(plan, cluster_tree)
    take_out(cluster_tree, *plan.runs)
    assert found(cluster_tree, min_age_s=3600) == {}
    assert found(cluster_tree) == {"submissions/small-0001": "old submission"}
    first = next(iter(plan.runs))
    begin(cluster_tree, first, "small-0001")
    finish(cluster_tree, first, plan.runs[first], "ok", 1)
    assert found(cluster_tree) == {}
    cluster_tree.result_path(first).unlink()
    removed, failed = remove_leftovers(cluster_tree, min_age_s=0, now_unix_s=time.time() + 60)
    assert ({one.kind for one in removed}, failed) == ({"orphan", "old submission"}, [])
    assert found(cluster_tree) == {}
    assert list_submissions(cluster_tree) == []


@pytest.mark.parametrize(("status", "is_orphan"), [(None, True), ("failed", True), ("ok", False), ("oom", False)])
def test_orphans_are_attempts_without_a_measurement(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, status: str | None, is_orphan: bool
) -> None:
    other = list(plan.runs)[1]
    begin(cluster_tree, other, "small-0001")
    if status is not None:
        finish(cluster_tree, other, plan.runs[other], status, 1)
    path = take_out(cluster_tree, other)
    orphan = f"runs/{other[:2]}/{other}"
    assert (found(cluster_tree).get(orphan) == "orphan") is is_orphan
    # A record that cannot be read may be the one that contains it.
    (path.parent / "broken.json").write_text("{")
    with pytest.raises(StorageError, match="broken"):
        found(cluster_tree)


def test_a_deadline_ahead_keeps_a_run_of_no_sweep(plan: SweepPlan, cluster_tree: ClusterTree, run_id: str) -> None:
    other = list(plan.runs)[1]
    begin(cluster_tree, other, "small-0001", deadline_unix_s=time.time() + 9000)
    take_out(cluster_tree, other)
    assert found(cluster_tree) == {}
    orphan = {f"runs/{other[:2]}/{other}": "orphan"}
    assert found(cluster_tree, after_s=9001) == orphan
    finish(cluster_tree, other, plan.runs[other], "failed", 1)
    assert found(cluster_tree) == orphan, "its attempt has ended"
    begin(cluster_tree, other, "small-0001", deadline_unix_s=time.time() + 9000)
    assert found(cluster_tree) == {}, "a second attempt is at work"


def test_a_submission_that_cannot_be_read_keeps_all(plan: SweepPlan, cluster_tree: ClusterTree, run_id: str) -> None:
    take_out(cluster_tree, *plan.runs)
    (cluster_tree.submissions / "small-0001" / "submission.json").write_text("{")
    with pytest.raises(StorageError, match="submission.json is no record of a submission: Input data was truncated"):
        found(cluster_tree, after_s=WEEKS_S)
    record = cluster_tree.submissions / "small-0001" / "submission.json"
    record.rename(record.with_name("elsewhere.json"))
    record.symlink_to("elsewhere.json")
    with pytest.raises(StorageError, match="no record of a submission: it is a link, which is not followed"):
        found(cluster_tree, after_s=WEEKS_S)


def test_links_are_neither_followed_nor_removed(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (outside / "attempts" / "1").mkdir(parents=True)
    (outside / "attempts" / "2").mkdir()
    (cluster_tree.root / "runs" / "ab").mkdir()
    (cluster_tree.root / "runs" / "ab" / "ab00000000000000").symlink_to(outside)
    (cluster_tree.submissions / "small-0009").symlink_to(outside)
    remove_leftovers(cluster_tree, min_age_s=0, now_unix_s=time.time() + 60)
    assert sorted(path.name for path in (outside / "attempts").iterdir()) == ["1", "2"]
    assert (cluster_tree.submissions / "small-0009").is_symlink()


def test_a_refused_removal_is_an_error(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    take_out(cluster_tree, *plan.runs)
    begin(cluster_tree, list(plan.runs)[1], "small-0001")
    monkeypatch.setattr(shutil, "rmtree", refuse)
    removed, failed = remove_leftovers(cluster_tree, min_age_s=0, now_unix_s=time.time() + 60)
    assert (removed, type(failed[0])) == ([], StorageError)


def test_the_command_clean_removes_only_with_its_option(
    plan: SweepPlan, cluster_tree: ClusterTree, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "test.toml").write_text('name = "test"\n')
    killed = cluster_tree.submissions / "small-0003"
    killed.mkdir()
    arguments = ("clean", "--older-than", "0 s")
    shown = hpcbench(*arguments, cwd=tmp_path)
    assert (shown.returncode, "unfinished submission" in shown.stdout, killed.is_dir()) == (0, True, True), shown.stderr
    assert "1 leftover, " in shown.stderr
    assert "nothing was changed, --yes removes them" in shown.stderr
    assert "nothing to remove" in hpcbench("clean", cwd=tmp_path).stderr
    done = hpcbench(*arguments, "--yes", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, document["removed"], killed.exists()) == (0, True, False), done.stderr
    assert [leftover["path"] for leftover in document["leftovers"]] == [os.fspath(killed)]
