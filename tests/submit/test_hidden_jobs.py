"""A results tree of several users where SLURM shows each of them their own jobs alone (PrivateData = jobs)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.toml_tables import TomlSource
from hpcbench.identity import account_name
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.site.cluster_doctor import _check_slurm
from hpcbench.submit.journal import journal_paths, read_journal
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.run_state import RunState, run_states
from hpcbench.submit.submit import RunSelection, submit

_UNKNOWN_JOB = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def foreign_submission(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> Path:
    """A submission by the account ``alice``, of which squeue and sacct show nothing."""
    folder = submit(plan, cluster_tree).folder
    assert folder is not None
    for path in journal_paths(folder):
        path.write_text(path.read_text().replace(f'"user":"{account_name()}"', '"user":"alice"'))
    (fake_slurm / "squeue.error").write_text(_UNKNOWN_JOB)
    return folder


def states(plan: SweepPlan, tree: ClusterTree, after_s: float = 3600.0) -> list[RunState]:
    return list(run_states(tree, plan.runs, plan.profile, time.time() + after_s).values())


def test_the_journal_names_the_account_that_submitted(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    folder = submit(plan, cluster_tree).folder
    assert folder is not None
    assert {batch.user for batch in read_journal(folder).batches} == {account_name()}


@pytest.mark.parametrize("after_s", [3600.0, 14 * 86400.0])
def test_hidden_jobs_of_another_account_are_not_lost(
    foreign_submission: Path, plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, after_s: float
) -> None:
    (fake_slurm / "scontrol").write_text("PrivateData             = jobs,usage\n")
    found = states(plan, cluster_tree, after_s)
    assert {state.state for state in found} == {"pending"}
    assert "submitted by alice" in found[0].reason


def test_hidden_jobs_are_neither_submitted_nor_retried(
    foreign_submission: Path, plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    (fake_slurm / "scontrol").write_text("PrivateData             = jobs\n")
    record = foreign_submission / "submission.json"
    created = record.read_text().split('"created_unix_s":')[1].split(",")[0]
    record.write_text(record.read_text().replace(created, "1.0"))
    assert submit(plan, cluster_tree).run_ids == []
    assert submit(plan, cluster_tree, RunSelection(frozenset({"lost"}), only_again=True)).run_ids == []


def test_visible_jobs_of_another_account_can_be_lost(
    foreign_submission: Path, plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    (fake_slurm / "scontrol").write_text("PrivateData             = none\n")
    assert {state.state for state in states(plan, cluster_tree)} == {"lost"}


def test_without_scontrol_jobs_of_other_accounts_count_as_hidden(
    foreign_submission: Path, plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    (fake_slurm / "scontrol.error").write_text("Unable to contact slurm controller")
    assert {state.state for state in states(plan, cluster_tree)} == {"pending"}


def test_a_hidden_job_that_began_is_lost_only_past_its_time_limit(
    foreign_submission: Path, plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    (fake_slurm / "scontrol").write_text("PrivateData             = jobs\n")
    key = next(iter(plan.runs))
    begin_attempt(
        cluster_tree.run_folder(key), launch="l", host="h", started_unix_s=time.time(),
        task_file=str(foreign_submission / "0.jsonl"),
    )  # fmt: skip
    assert states(plan, cluster_tree, 3600.0)[0].state == "running"
    assert states(plan, cluster_tree, 3 * 86400.0)[0].state == "lost"


@pytest.mark.parametrize(("config", "named"), [("PrivateData = jobs,usage\n", True), ("PrivateData = none\n", False)])
def test_doctor_reads_private_data(config: str, named: bool, fake_slurm: Path) -> None:
    (fake_slurm / "scontrol").write_text(config)
    profile = ClusterProfile.model_validate({"name": "test", "scheduler": {"kind": "slurm"}})
    rows = [check for check in _check_slurm(profile, TomlSource(Path("c.toml"), "")) if check.what == "PrivateData"]
    assert [row.works for row in rows] == [True] * named
