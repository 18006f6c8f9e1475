from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import config_id, read_task
from hpcbench.errors import StorageError, SubmitError
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RunResult
from hpcbench.submit.journal import read_journal
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.run_state import run_states
from hpcbench.submit.sbatch import SbatchExecutor
from hpcbench.submit.submission_record import next_submission_folder, read_sweep_record
from hpcbench.submit.submit import render_submission, submit


def finish(tree: ClusterTree, plan: SweepPlan, run_id: str, status: str = "ok") -> None:
    spec = plan.runs[run_id]
    error = None if status == "ok" else FailureRecord(type="Test", message="as told")
    result: dict[str, Any] = {
        "run_id": run_id,
        "config_id": config_id(spec),
        "attempt": 1,
        "sweep": "small",
        "cluster": "test",
    }
    assert tree.write_result(RunResult(**result, status=status, spec=spec, error=error))


def with_patience(profile: ClusterProfile, retry_s: float) -> ClusterProfile:
    return profile.model_copy(update={"scheduler": profile.scheduler.model_copy(update={"retry_s": retry_s})})


def refreshed(plan: SweepPlan, tree: ClusterTree) -> SweepPlan:
    return make_plan(plan.sweep, plan.profile, tree)


def sbatch_calls(fake_slurm: Path) -> list[str]:
    return (fake_slurm / "calls").read_text().splitlines()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_shape_has_one_script_task_file_and_sbatch_call(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    submitted = submit(plan, cluster_tree)
    assert submitted.folder is not None
    assert files(submitted.folder) == ["0.jsonl", "0.sh", "1.jsonl", "1.sh", "sent-1.jsonl", "submission.json"]
    assert submitted.record is not None
    names = [submitted.record.batch_name(number, 0, 2) for number in (0, 1)]
    assert sbatch_calls(fake_slurm) == [
        f"--parsable --job-name={name} --comment={name} --array=0-1 {submitted.folder}/{number}.sh 0"
        for number, name in enumerate(names)
    ]
    assert len(set(names)) == 2
    assert read_journal(submitted.folder).job_ids() == ["4711_0", "4711_1"] * 2
    header, task = read_task(submitted.folder / "1.jsonl", 1)
    assert (header.tree, task.spec.nodes, task.spec.batch_size) == (str(cluster_tree.root), 2, 16)
    record = read_sweep_record(cluster_tree, "small")
    assert record is not None
    assert record.run_ids == list(plan.runs)


def test_render_shows_the_bytes_that_submit_sends(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> None:
    rendered = render_submission(plan, plan.missing, cluster_tree, next_submission_folder(cluster_tree, "small"))
    submitted = submit(plan, cluster_tree)
    assert submitted.folder is not None
    assert {name: (submitted.folder / name).read_bytes() for name in rendered.files} == rendered.files


def test_submitting_again_skips_queued_and_running_runs(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    submit(plan, cluster_tree)
    (fake_slurm / "squeue").write_text("4711_0|RUNNING|None\n4711_1|PENDING|Resources\n")
    again = submit(refreshed(plan, cluster_tree), cluster_tree)
    assert (again.run_ids, len(again.active)) == ([], 4)
    assert len((fake_slurm / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("status", "again"),
    [
        ("ok", 0),
        ("failed", 1),
        ("cancelled", 1),
        ("preempted", 1),
        ("oom", 0),
        ("timeout", 0),
        ("unsupported", 0),
        ("skipped", 0),
    ],
)
def test_only_failed_cancelled_and_preempted_runs_run_again(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, status: str, again: int
) -> None:
    first, *others = plan.runs
    finish(cluster_tree, plan, first, status)
    for run_id in others:
        finish(cluster_tree, plan, run_id)
    assert len(submit(refreshed(plan, cluster_tree), cluster_tree).run_ids) == again


def test_a_lost_run_is_not_run_again_by_submit(plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path) -> None:
    submit(plan, cluster_tree)
    later = time.time() + 3600
    states = run_states(cluster_tree, plan.runs, plan.profile, later)
    assert {state.state for state in states.values()} == {"lost"}
    assert "job 4711_0 is unknown to the scheduler" in states[next(iter(plan.runs))].reason


def test_a_refusal_leaves_nothing_behind(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "refuse")
    refused = submit(plan, cluster_tree).sent.refused
    assert [error.exit_code for error in refused] == [3, 3]
    assert "Invalid account" in refused[0].message
    assert list(cluster_tree.submissions.iterdir()) == []


def test_jobs_accepted_before_a_refusal_stay(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "refuse-second")
    (refused,) = submit(plan, cluster_tree).sent.refused
    assert "Invalid account" in refused.message
    (fake_slurm / "squeue").write_text("4711_0|RUNNING|None\n4711_1|PENDING|Resources\n")
    states = run_states(cluster_tree, plan.runs, plan.profile, time.time())
    assert sorted(state.state for state in states.values()) == ["pending", "planned", "planned", "running"]
    monkeypatch.setenv("FAKE_SBATCH", "ok")
    assert len(submit(refreshed(plan, cluster_tree), cluster_tree).run_ids) == 2


def test_sbatch_output_without_a_job_number_is_an_error(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "banner")
    plan.profile = with_patience(plan.profile, 0)
    sent = submit(plan, cluster_tree).sent
    assert "names no job: 'Welcome to the cluster" in str(sent.failed)
    assert (sent.jobs, sent.waiting) == (0, 4)


def test_absent_sbatch_is_found_before_anything_is_written(
    plan: SweepPlan, cluster_tree: ClusterTree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match="sbatch is not on PATH"):
        submit(plan, cluster_tree)
    assert not cluster_tree.root.exists()


def test_submit_into_an_unwritable_tree_exits_with_code_3(plan: SweepPlan, tmp_path: Path, fake_slurm: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write") as caught:
        submit(plan, ClusterTree(tmp_path / "file" / "test"))
    assert caught.value.exit_code == 3
    assert not (fake_slurm / "calls").exists()


def test_the_submitters_job_does_not_leak(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CPU_BIND", "SLURM_NTASKS", "SBATCH_ACCOUNT", "PMIX_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "leaked")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    submitted = submit(plan, cluster_tree)
    seen = (fake_slurm / "environment").read_text()
    assert "leaked" not in seen
    assert "SLURM_CONF=/etc/slurm/slurm.conf" in seen
    assert submitted.folder is not None
    header, _ = read_task(submitted.folder / "0.jsonl", 0)
    assert {"SLURM_CPU_BIND", "PMIX_RANK", "MASTER_PORT"} <= set(header.scrubbed)


def test_arrays_are_cut_to_what_the_scheduler_takes(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    (fake_slurm / "scontrol").write_text("MaxArraySize            = 1\n")
    submitted = submit(plan, cluster_tree)
    assert [call.partition("--array")[2] for call in sbatch_calls(fake_slurm)] == [
        f"=0-0 {submitted.folder}/{number}.sh {offset}" for number in (0, 1) for offset in (0, 1)
    ]


def test_single_jobs_and_arrays_send_the_same_script(tmp_path: Path, fake_slurm: Path) -> None:
    script = tmp_path / "0.sh"
    script.write_text("#!/bin/bash\n")
    executor = SbatchExecutor(tmp_path, os.environ)
    assert executor.submit_script(script, [], 0) == ("4711", "")
    assert executor.submit_script(script, ["--array=0-1"], 0) == ("4711", "")
    assert (fake_slurm / "calls").read_text().splitlines() == [
        f"--parsable {script} 0",
        f"--parsable --array=0-1 {script} 0",
    ]
    assert script.read_text() == "#!/bin/bash\n"


def test_profile_names_the_configuration_file(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, tmp_path: Path
) -> None:
    scheduler = {"kind": "slurm", "config_file": str(tmp_path / "slurm.conf")}
    plan.profile = ClusterProfile.model_validate({"name": "test", "scheduler": scheduler})
    with pytest.raises(SubmitError, match=r"no file .*slurm.conf"):
        submit(plan, cluster_tree)
    (tmp_path / "slurm.conf").touch()
    submit(plan, cluster_tree)
    assert f"SLURM_CONF={tmp_path}/slurm.conf" in (fake_slurm / "environment").read_text()
    assert msgspec.json.decode((next(cluster_tree.submissions.glob("small-*")) / "submission.json").read_bytes())


def test_a_sweep_that_is_wholly_refused_is_planned(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "refuse")
    assert len(submit(plan, cluster_tree).sent.refused) == 2
    record = read_sweep_record(cluster_tree, "small")
    assert record is not None
    states = run_states(cluster_tree, record.run_ids, plan.profile, time.time())
    assert {state.state for state in states.values()} == {"planned"}
    monkeypatch.setenv("FAKE_SBATCH", "ok")
    assert len(submit(plan, cluster_tree).run_ids) == 4
