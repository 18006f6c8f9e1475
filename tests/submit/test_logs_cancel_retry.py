"""logs, cancel, retry: as a person types them, against commands of SLURM that do as they are told."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcbench.cli.run_commands import print_submit_outcome
from hpcbench.config.run_spec import config_id, read_task
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RunResult
from hpcbench.submit.journal import read_journal
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.run_state import RunState
from hpcbench.submit.submission_record import list_submissions
from hpcbench.submit.submit import RunSelection, submit
from hpcbench.units import pluralize
from tests.submit.conftest import SWEEP


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: Path) -> Path:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "test.toml").write_text('name = "test"\n')
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "small.toml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hpcbench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcbench", *arguments],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )


def finish(tree: ClusterTree, plan: SweepPlan, run_id: str, status: str) -> None:
    error = None if status == "ok" else FailureRecord(type="Test", message="as told")
    named: dict[str, Any] = {
        "run_id": run_id,
        "config_id": config_id(plan.runs[run_id]),
        "attempt": 1,
        "sweep": "small",
        "cluster": "test",
    }
    assert tree.write_result(RunResult(**named, status=status, spec=plan.runs[run_id], error=error))


def running(fake_slurm: Path) -> None:
    (fake_slurm / "squeue").write_text("4711_0|RUNNING|None\n4711_1|PENDING|Resources\n")


def cancelled(fake_slurm: Path) -> list[str]:
    lines = (fake_slurm / "queries").read_text().splitlines()
    return [line.removeprefix("scancel ") for line in lines if line.startswith("scancel")]


def test_cancelling_a_sweep_cancels_its_array_once(project: Path, fake_slurm: Path) -> None:
    assert hpcbench("submit", "small", "--cluster", "test").returncode == 0
    running(fake_slurm)
    done = hpcbench("cancel", "small")
    assert "asked 4 runs to stop" in done.stderr
    assert cancelled(fake_slurm) == ["4711"]


def test_runs_are_cancelled_by_expression_or_run_id(project: Path, fake_slurm: Path) -> None:
    hpcbench("submit", "small", "--cluster", "test")
    running(fake_slurm)
    assert "asked 2 runs to stop" in hpcbench("cancel", "small", "--where", "batch_size == 8 and devices <= 2").stderr
    ((_, record),) = list_submissions(ClusterTree(project / "results" / "test"))
    assert "asked 1 run to stop" in hpcbench("cancel", "small", "--run", record.arrays[1].run_ids[1][:12]).stderr
    assert cancelled(fake_slurm)[-1] == "4711_1"
    wrong = hpcbench("cancel", "small", "--where", "batch_sise == 8")
    assert (wrong.returncode, "did you mean 'batch_size'" in wrong.stderr) == (2, True)


def test_a_refusal_of_scancel_fails_the_command(project: Path, fake_slurm: Path) -> None:
    hpcbench("submit", "small", "--cluster", "test")
    running(fake_slurm)
    (fake_slurm / "scancel.error").write_text("scancel: error: Access/permission denied")
    done = hpcbench("cancel", "small")
    assert (done.returncode, "permission denied" in done.stderr) == (3, True)
    (fake_slurm / "scancel.error").write_text(
        "scancel: error: Kill job error on job id 4711: Job/step already completing or completed"
    )
    assert hpcbench("cancel", "small").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "again"),
    [
        ([], ["failed", "timeout"]),
        (["--status", "oom"], ["oom"]),
        (["--status", "timeout", "--status", "oom"], ["oom", "timeout"]),
        (["--status", "lost"], []),
    ],
)
def test_retry_takes_runs_of_the_chosen_status(
    project: Path, fake_slurm: Path, plan: SweepPlan, cluster_tree: ClusterTree, arguments: list[str], again: list[str]
) -> None:
    ended = dict(zip(plan.runs, ("ok", "failed", "timeout", "oom"), strict=True))
    for run_id, status in ended.items():
        finish(cluster_tree, plan, run_id, status)
    done = hpcbench("retry", "small", "--cluster", "test", *arguments)
    assert f"{pluralize(len(again), 'run')} submitted again" in done.stderr, done.stderr
    taken = [
        run_id for _, record in list_submissions(cluster_tree) for array in record.arrays for run_id in array.run_ids
    ]
    assert sorted(ended[run_id] for run_id in taken) == again


def test_a_larger_time_limit_keeps_the_run_the_same(
    project: Path, fake_slurm: Path, plan: SweepPlan, cluster_tree: ClusterTree
) -> None:
    first = next(iter(plan.runs))
    finish(cluster_tree, plan, first, "timeout")
    assert hpcbench("retry", "small", "--cluster", "test", "--time-limit", "2 h").returncode == 0
    ((folder, record),) = list_submissions(cluster_tree)
    _, task = read_task(folder / "0.jsonl", 0)
    assert (record.arrays[0].run_ids, task.run_id, task.time_limit_s) == ([first], first, 7200.0)
    assert "#SBATCH --time=0-02:00:00" in (folder / "0.sh").read_text()
    assert hpcbench("retry", "small", "--cluster", "test", "--time-limit", "soon").returncode == 2


def test_lost_runs_are_retried_and_planned_ones_are_not(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    only_two = make_plan(plan.sweep, plan.profile, cluster_tree)
    only_two.runs = dict(list(plan.runs.items())[:2])
    submit(only_two, cluster_tree)
    (fake_slurm / "sacct").write_text("4711|COMPLETED|None\n")
    (fake_slurm / "squeue").write_text("")
    again = submit(plan, cluster_tree, RunSelection(frozenset({"lost"}), only_again=True))
    assert sorted(again.run_ids) == sorted(only_two.runs)


def test_logs_print_the_error_output_without_escape_codes(
    project: Path, fake_slurm: Path, plan: SweepPlan, cluster_tree: ClusterTree
) -> None:
    run_id = next(iter(plan.runs))
    attempt = begin_attempt(cluster_tree.run_folder(run_id), launch="l", host="h", started_unix_s=1.0)
    (attempt.folder / "err.log").write_text("what went wrong\x1b[2J\n")
    done = hpcbench("logs", run_id[:8])
    assert (done.returncode, done.stdout) == (0, "what went wrong\ufffd[2J\n")
    assert "attempt 1 of 1" in done.stderr
    assert "no runs begin with 'zz'" in hpcbench("logs", "zz").stderr
    assert "has no attempt 7" in hpcbench("logs", run_id, "--attempt", "7").stderr


def test_submitted_is_what_the_scheduler_took(
    project: Path, fake_slurm: Path, plan: SweepPlan, cluster_tree: ClusterTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "refuse")
    done = hpcbench("submit", "small", "--cluster", "test")
    assert (done.returncode, f"{len(plan.runs)} runs, 0 submitted, {len(plan.runs)} not" in done.stderr) == (3, True), (
        done.stderr
    )


def test_submit_leaves_lost_and_ended_runs_to_retry(
    project: Path, fake_slurm: Path, plan: SweepPlan, cluster_tree: ClusterTree
) -> None:
    lost, oom, *others = plan.runs
    for run_id in (lost, *others):
        finish(cluster_tree, plan, run_id, "ok")
    finish(cluster_tree, plan, oom, "oom")
    path = cluster_tree.run_folder(lost) / "result.json"
    path.write_text(path.read_text()[:20])
    done = hpcbench("submit", "small", "--cluster", "test")
    for status in ("oom", "lost"):
        assert (
            f"1 ended as {status} and is not run again by submit: hpcbench retry small --cluster test --status {status}"
            in done.stderr
        ), done.stderr


def test_status_and_logs_select_runs_by_parameter(
    project: Path, fake_slurm: Path, plan: SweepPlan, cluster_tree: ClusterTree
) -> None:
    submit(plan, cluster_tree)
    first, second, *_ = plan.runs
    finish(cluster_tree, plan, second, "oom")
    tasks = str(list_submissions(cluster_tree)[0][0] / "0.jsonl")
    for run_id in (first, second):
        folder = cluster_tree.run_folder(run_id)
        attempt = begin_attempt(folder, launch="x", host="n", started_unix_s=1.0, task_file=tasks)
        (attempt.folder / "err.log").write_text(f"log of {run_id}\n")
    document = json.loads(hpcbench("status", "small", "--json", "--where", "batch_size == 8").stdout)["sweeps"][0]
    assert {run["run_id"] for run in document["runs"]} == {
        run_id for run_id, spec in plan.runs.items() if spec.batch_size == 8
    }
    (failed,) = json.loads(hpcbench("status", "small", "--json", "--state", "oom").stdout)["sweeps"][0]["runs"]
    assert (failed["run_id"], failed["spec"]["model"]) == (second, "resnet18")
    assert failed["elapsed_s"] > 1e9
    assert failed["submitted_by"] == cluster_tree.root.owner()
    every = hpcbench("status", "small", "--all").stdout.splitlines()
    assert every[2].split()[:4] == ["run", "configuration", "state", "elapsed"]
    assert len([line for line in every if " resnet18 ddp " in line]) == 4
    assert "did you mean 'failed'?" in hpcbench("status", "--state", "fialed").stderr
    done = hpcbench("logs", "small", "--failed", "--follow")
    assert (done.returncode, done.stdout) == (0, f"log of {second}\n"), done.stderr
    assert "no run of small matches" in hpcbench("logs", "small", "--where", "batch_size == 3").stderr
    (entry,) = json.loads(hpcbench("logs", second, "--json").stdout)["logs"]
    assert [file["text"] for file in entry["files"]] == [f"log of {second}\n"]


def test_check_render_cancel_and_retry_print_json_documents(project: Path, fake_slurm: Path) -> None:
    def document(*arguments: str) -> dict[str, Any]:
        done = hpcbench(*arguments, "--json")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    (project / "wrong.toml").write_text("name = 'wrong'\n[fixed]\nstpes = 5\n")
    right, wrong = document("check", "small", "wrong.toml")["files"]
    assert (right["valid"], wrong["valid"], wrong["errors"][0]["where"]) == (True, False, "wrong.toml:3")
    files = document("render", "small", "--cluster", "test")["files"]
    assert [file["name"] for file in files][:2] == ["0.sh", "0.jsonl"]
    assert hpcbench("submit", "small", "--cluster", "test").returncode == 0
    running(fake_slurm)
    (entry,) = document("cancel", "small")["cancelled"]
    assert (entry["sweep"], entry["cluster"], len(entry["run_ids"]) > 0) == ("small", "test", True)
    assert document("bundle", "small")["path"] == "small.hpcbench.tar.gz"
    assert document("retry", "small", "--cluster", "test")["done"] == []


def test_a_run_that_only_the_scheduler_saw_end_has_its_time(
    project: Path, fake_slurm: Path, plan: SweepPlan, cluster_tree: ClusterTree
) -> None:
    """A node failed three minutes after the run began, and nobody looked for the rest of an hour."""
    submit(plan, cluster_tree)
    folder, _ = list_submissions(cluster_tree)[0]
    run_id = json.loads((folder / "0.jsonl").read_text().splitlines()[1])["run_id"]
    batch = next(batch for batch in read_journal(folder).batches if batch.array == 0)
    ended_unix_s = float(int(time.time()) - 3000)
    begin_attempt(
        cluster_tree.run_folder(run_id), launch="x", host="n", started_unix_s=ended_unix_s - 180, job_id=batch.job_of(0),
        task_file=str(folder / "0.jsonl"),
    )  # fmt: skip
    end = datetime.datetime.fromtimestamp(ended_unix_s).isoformat()
    (fake_slurm / "squeue").write_text("")
    (fake_slurm / "sacct").write_text(f"{batch.job_of(0)}|NODE_FAIL|None|{end}|{batch.name}|n1\n")
    for _ in range(2):  # by the scheduler, and by the result that was written then
        states = json.loads(hpcbench("status", "small", "--json", "--state", "failed").stdout)["sweeps"][0]["runs"]
        assert [(run["run_id"], run["elapsed_s"]) for run in states] == [(run_id, 180.0)]
    result = cluster_tree.read_result(run_id)
    assert result is not None
    assert result.ended_at_s == ended_unix_s


def test_a_submit_without_an_answer_about_earlier_jobs_counts_them_as_sent(
    project: Path, fake_slurm: Path, plan: SweepPlan, cluster_tree: ClusterTree, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = submit(plan, cluster_tree)
    outcome.run_ids, outcome.active = [], list(plan.runs)
    sent = RunState("waiting", "the scheduler does not answer", job_id="4711")
    outcome.states = {**dict.fromkeys(plan.runs, sent), next(iter(plan.runs)): RunState("waiting")}
    print_submit_outcome(plan, outcome)
    printed = capsys.readouterr().err
    assert "1 of earlier submissions that were not sent before" in printed
    assert f"{len(plan.runs) - 1} of which it is not known whether they run" in printed
