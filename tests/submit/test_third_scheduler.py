"""A third scheduler is one module, which an entry point names: this file is the module.

The queue of the fake is a JSON file; jobs run when the test says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from hpcbench.cli.main import cli
from hpcbench.config.run_spec import read_task
from hpcbench.config.scheduler_kinds import SchedulerKind
from hpcbench.errors import SubmitError
from hpcbench.plugins import plugin_modules
from hpcbench.render.job_script import JobShape
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RunResult
from hpcbench.submit.journal import JobBatch, JournalWriter, read_journal
from hpcbench.submit.lock import exclusive_lock
from hpcbench.submit.scheduler import JobStatus, Notify, QueueTable, Scheduler, SendOutcome
from hpcbench.submit.submission_record import Submission, SubmittedRun, list_submissions
from tests.submit.conftest import SWEEP


class FakeScheduler(Scheduler):
    """Each run is one job; the queue maps job ids to states."""

    poll_s: ClassVar[float] = 0.05
    queue: ClassVar[Path]
    is_away: ClassVar[bool] = False

    @classmethod
    def jobs(cls) -> dict[str, str]:
        return dict(json.loads(cls.queue.read_text())) if cls.queue.exists() else {}

    @classmethod
    def set_states(cls, states: Mapping[str, str]) -> None:
        cls.queue.write_text(json.dumps(cls.jobs() | dict(states)))

    def submit(self, folder: Path, record: Submission, tree: ClusterTree, notify: Notify) -> SendOutcome:
        if self.is_away:
            return SendOutcome(waiting=4, reason="away", failed=SubmitError("the fake scheduler is away"))
        outcome = SendOutcome()
        with exclusive_lock(folder / ".sending"):
            journal, writer = read_journal(folder), JournalWriter(folder)
            for array in record.arrays:
                for first, count in journal.unsent(array.number, array.jobs):
                    for job in range(first, first + count):
                        job_id = str(100 + len(self.jobs()))
                        self.set_states({job_id: "pending"})
                        writer.record(JobBatch(array=array.number, first=job, count=1, job_id=job_id))
                        outcome.jobs += 1
        return outcome

    def state(self, runs: Mapping[str, SubmittedRun], queue: QueueTable | None = None) -> Mapping[str, JobStatus]:
        jobs = self.jobs()
        return {key: JobStatus(jobs[run.job_id], "by the fake") for key, run in runs.items() if run.job_id in jobs}

    def cancel(self, whole: Sequence[SubmittedRun], parts: Sequence[SubmittedRun]) -> dict[str, str]:
        assert not parts
        self.set_states({run.job_id: "cancelled" for run in whole if run.job_id})
        return {}


SCHEDULER: type[Scheduler] = FakeScheduler


def flux_directives(
    shape: JobShape, job_name: str, folder: str, number: int, pack: int, runs: int
) -> list[tuple[str, str | int | bool]]:
    return [("job-name", job_name), ("nodes", shape.nodes), ("exclusive", True)]


KIND = SchedulerKind(directives=flux_directives, directive_form=("# flux: --", "="), note="flux answers")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterTree:
    """A project whose cluster has the third scheduler, ``flux``."""
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "test.toml").write_text(
        'name = "test"\nlauncher = "torchrun"\n[scheduler]\nkind = "flux"\n'
    )
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "small.toml").write_text(SWEEP)
    monkeypatch.setattr(FakeScheduler, "queue", tmp_path / "queue.json", raising=False)
    monkeypatch.setitem(plugin_modules("hpcbench.schedulers"), "flux", __name__)
    monkeypatch.chdir(tmp_path)
    return ClusterTree(tmp_path / "results" / "test")


def hpcbench(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def status() -> dict[str, Any]:
    (sweep,) = json.loads(hpcbench("status", "small", "--json").stdout)["sweeps"]
    return dict(sweep)


def finish_runs(tree: ClusterTree) -> None:
    """Run every job: each leaves a start marker and a result."""
    for folder, record in list_submissions(tree):
        for array in record.arrays:
            for index, run_id in enumerate(array.run_ids):
                task_file = folder / f"{array.number}.jsonl"
                _, task = read_task(task_file, index)
                start: dict[str, Any] = {"launch": "l", "host": "h", "started_unix_s": 1.0, "task_file": str(task_file)}
                attempt = begin_attempt(tree.run_folder(run_id), **start)
                result = RunResult(
                    run_id=run_id,
                    config_id=task.config_id,
                    attempt=attempt.number,
                    sweep="small",
                    cluster="test",
                    status="ok",
                    spec=task.spec,
                )
                assert tree.write_result(result)
    FakeScheduler.set_states(dict.fromkeys(FakeScheduler.jobs(), "lost"))


def test_cluster_of_a_third_kind_is_planned_submitted_and_watched(tree: ClusterTree) -> None:
    assert hpcbench("plan", "small", "--cluster", "test").exit_code == 0
    submitted = hpcbench("submit", "small", "--cluster", "test", "--json")
    assert submitted.exit_code == 0, submitted.output
    assert json.loads(submitted.stdout)["jobs"] == ["100", "101", "102", "103"]
    FakeScheduler.set_states({"100": "running"})
    assert status()["counts"] == {"pending": 3, "running": 1}
    assert {run["job_id"] for run in status()["runs"]} == {"100", "101", "102", "103"}
    finish_runs(tree)
    watched = hpcbench("status", "small", "--watch")
    assert (watched.exit_code, "4 ok" in watched.output) == (0, True)
    assert json.loads(hpcbench("submit", "small", "--cluster", "test", "--json").stdout)["jobs"] == []


def test_submit_to_a_third_kind_that_is_away_sends_the_jobs_at_the_next_submit(
    tree: ClusterTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeScheduler, "is_away", True)
    away = hpcbench("submit", "small", "--cluster", "test")
    assert "the fake scheduler is away" in str(away.exception)
    assert status()["counts"] == {"waiting": 4}
    monkeypatch.setattr(FakeScheduler, "is_away", False)
    again = json.loads(hpcbench("submit", "small", "--cluster", "test", "--json").stdout)
    assert (again["submitted"], len(again["active"]), len(FakeScheduler.jobs())) == ([], 4, 4)


def test_wait_for_runs_of_a_third_kind_ends_with_the_last_run(
    tree: ClusterTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = FakeScheduler.submit

    def submit_and_run(self: FakeScheduler, *arguments: Any) -> SendOutcome:
        outcome = submit(self, *arguments)
        finish_runs(tree)
        return outcome

    monkeypatch.setattr(FakeScheduler, "submit", submit_and_run)
    assert hpcbench("submit", "small", "--cluster", "test", "--wait").exit_code == 0
    assert status()["counts"] == {"ok": 4}


def test_cancelled_runs_of_a_third_kind_are_planned_again(tree: ClusterTree) -> None:
    hpcbench("submit", "small", "--cluster", "test")
    cancelled = hpcbench("cancel", "small")
    assert cancelled.exit_code == 0, cancelled.output
    assert set(FakeScheduler.jobs().values()) == {"cancelled"}
    assert status()["counts"] == {"planned": 4}
    again = json.loads(hpcbench("submit", "small", "--cluster", "test", "--json").stdout)
    assert len(again["submitted"]) == 4


def test_failed_job_of_a_third_kind_is_reported_with_its_reason_and_log(tree: ClusterTree) -> None:
    hpcbench("submit", "small", "--cluster", "test")
    ((folder, record),) = list_submissions(tree)
    first = record.arrays[0].run_ids[0]
    (folder / f"0.100.{2**32 - 2}.log").write_text("the last line of the log\n")
    FakeScheduler.set_states({"100": "failed"})
    (run,) = [run for run in status()["runs"] if run["run_id"] == first]
    assert (run["state"], "by the fake" in run["reason"]) == ("failed", True)
    assert "the last line of the log" in run["reason"]


def test_job_script_of_a_third_kind_has_its_directives(tree: ClusterTree) -> None:
    rendered = hpcbench("render", "small", "--cluster", "test")
    assert rendered.exit_code == 0, rendered.output
    assert "# flux: --job-name=hpcbench-small-" in rendered.stdout
    assert "\n# flux: --nodes=1\n# flux: --exclusive\n" in rendered.stdout
    assert "#SBATCH" not in rendered.stdout


def test_doctor_reports_a_third_kind(tree: ClusterTree) -> None:
    assert "flux answers" in hpcbench("doctor", "--cluster", "test", "--json").stdout


def test_kind_without_a_module_is_refused(tree: ClusterTree) -> None:
    (tree.root.parents[1] / "clusters" / "test.toml").write_text('name = "test"\n[scheduler]\nkind = "pbs"\n')
    refused = hpcbench("submit", "small", "--cluster", "test")
    assert "run by PBS, which hpcbench writes for but does not submit to" in str(refused.exception)


@pytest.mark.parametrize("kind", ["'flax'", "'a.b'", "3", "[1]"])
def test_unknown_kind_in_a_profile_is_refused_with_the_choices(tree: ClusterTree, kind: str) -> None:
    (tree.root.parents[1] / "clusters" / "test.toml").write_text(f'name = "test"\n[scheduler]\nkind = {kind}\n')
    refused = hpcbench("submit", "small", "--cluster", "test")
    message = f"test.toml:3: scheduler.kind: input should be 'slurm', 'local', 'pbs', 'none' or 'flux', not {kind}"
    assert message in str(refused.exception)


def test_module_without_a_scheduler_is_refused(tree: ClusterTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCHEDULER", SchedulerKind)
    refused = hpcbench("submit", "small", "--cluster", "test")
    assert f"{__name__}.SCHEDULER is <class" in str(refused.exception)
    assert "not a subclass of Scheduler" in str(refused.exception)
