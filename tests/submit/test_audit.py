"""``status --audit`` and ``cancel``: what is in the queue and should not be, and what stays there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from hpcbench.cli.main import cli
from hpcbench.config.run_spec import read_task
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RunResult
from hpcbench.submit.journal import JobBatch, JournalWriter, drop_runs
from hpcbench.submit.submission_record import Submission, list_submissions
from tests.submit.conftest import SWEEP

FOUR = SWEEP.replace("batch_size = [8, 16]\nnodes = [1, 2]", "seed = [0, 1, 2, 3]").replace(
    '"ddp"', '"ddp"\nbatch_size = 8'
)
Put = Callable[..., None]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: Path) -> ClusterTree:
    """A project whose four runs are one array, 4711."""
    for name, text in (("clusters/test", 'name = "test"\n[scheduler]\nkind = "slurm"\n'), ("sweeps/small", FOUR)):
        path = tmp_path / f"{name}.toml"
        path.parent.mkdir()
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["submit", "small", "--cluster", "test"]).exit_code == 0
    return ClusterTree(tmp_path / "results" / "test")


@pytest.fixture
def put(project: ClusterTree, fake_slurm: Path) -> Put:
    """Put jobs into the queue; NAME and FOLDER are those of the project's array."""

    def write(*rows: str) -> None:
        ((folder, record),) = list_submissions(project)[:1]
        name = record.batch_name(0, 0, 4)
        text = "".join(f"{row}\n".replace("NAME", name).replace("FOLDER", str(folder)) for row in rows)
        (fake_slurm / "squeue").write_text(text)

    return write


def audit(*options: str) -> tuple[int, list[dict[str, str]]]:
    done = CliRunner().invoke(cli, ["status", "--audit", "--json", *options])
    return done.exit_code, json.loads(done.stdout)["findings"]


def submission(tree: ClusterTree) -> tuple[Path, Submission]:
    return list_submissions(tree)[0]


@pytest.mark.parametrize(
    ("row", "kind", "command"),
    [
        ("4709_[0-3]|PENDING|Priority|N/A|NAME||ada|FOLDER|FOLDER/0.sh 0", "second job", "scancel '4709_[0-3]'"),
        ("4709_1|RUNNING|None|N/A|NAME|n1|ada|FOLDER|FOLDER/0.sh 0", "second job", "scancel 4709_1"),
        ("4709|RUNNING|None|N/A|acct42-bench|n1|ada|FOLDER|FOLDER/0.sh 0", "second job", "scancel 4709"),
        ("4711_2|PENDING|launch failed requeued held|N/A|NAME||ada|FOLDER|x", "held job", "scontrol release 4711"),
        ("4711_2|PENDING|JobHeldAdmin|N/A|NAME||ada|FOLDER|x", "held job", "scontrol release 4711"),
        ("4711_2|REQUEUE_HOLD|None|N/A|NAME||ada|FOLDER|x", "held job", "scontrol release 4711"),
        ("4711_2|PENDING|AccountNotAllowed|N/A|NAME||ada|FOLDER|x", "barred job", "scancel 4711_2"),
        ("4711_2|PENDING|DependencyNeverSatisfied|N/A|NAME||ada|FOLDER|x", "barred job", "scancel 4711_2"),
        ("4711_[0-3]|PENDING|Priority|N/A|NAME||ada|FOLDER|x", None, ""),
        ("4711_2|RUNNING|None|N/A|NAME|n1|ada|FOLDER|x", None, ""),
        ("4709_2|COMPLETED|None|N/A|NAME|n1|ada|FOLDER|x", None, ""),
        ("4709|RUNNING|None|N/A|hpcbench-small-0001-00000000-0.0-3|n1|ada|/elsewhere/small-0001|x", None, ""),
        ("4709|RUNNING|None|N/A|bash|n1|ada|/home/ada|bash", None, ""),
    ],
)
def test_the_audit_names_what_should_not_be_there_and_what_frees_it(
    row: str, kind: str | None, command: str, put: Put
) -> None:
    put(row)
    code, findings = audit()
    assert [finding["kind"] for finding in findings] == ([kind] if kind else [])
    assert code == (1 if kind else 0)
    if kind:
        assert findings[0]["command"] == command


def test_a_job_of_a_removed_submission_is_found_by_its_folder(project: ClusterTree, put: Put) -> None:
    put("4711_[0-3]|PENDING|Priority|N/A|NAME||ada|FOLDER|x")
    shutil.rmtree(submission(project)[0])
    ((finding,),) = (audit()[1],)
    assert "its submission small-0001 was removed" in finding["reason"]


def test_a_job_whose_runs_were_all_cancelled_is_empty(project: ClusterTree, put: Put) -> None:
    folder, record = submission(project)
    put("4711_[0-1]|PENDING|Priority|N/A|NAME||ada|FOLDER|x", "4711_[2-3]|PENDING|Priority|N/A|NAME||ada|FOLDER|x")
    drop_runs(folder, record.arrays[0].run_ids[:2])
    (finding,) = audit()[1]
    assert (finding["kind"], finding["job_id"], "cancelled" in finding["reason"]) == ("empty job", "4711_[0-1]", True)


def test_a_job_whose_sbatch_has_not_answered_yet_is_no_second_one(project: ClusterTree, put: Put) -> None:
    folder, record = submission(project)
    put("4711_[0-3]|PENDING|Priority|N/A|NAME||ada|FOLDER|FOLDER/0.sh 0")
    (folder / "sent-1.jsonl").unlink()
    JournalWriter(folder).record(JobBatch(array=0, first=0, count=4, name=record.batch_name(0, 0, 4), is_array=True))
    assert audit() == (0, [])


@pytest.mark.parametrize(("supersedes", "kinds"), [(None, ["empty job"]), ("old", []), ("other", ["empty job"])])
def test_a_job_that_measures_an_ok_run_again_is_not_empty(
    supersedes: str | None, kinds: list[str], project: ClusterTree, put: Put
) -> None:
    folder, _ = submission(project)
    put("4711_0|PENDING|Priority|N/A|NAME||ada|FOLDER|x")
    header, *lines = (folder / "0.jsonl").read_bytes().splitlines()
    task = msgspec.json.decode(lines[0])
    lines[0] = msgspec.json.encode(task | {"supersedes": supersedes})
    (folder / "0.jsonl").write_bytes(b"\n".join([header, *lines]) + b"\n")
    _, first = read_task(folder / "0.jsonl", 0)
    result = RunResult(
        run_id=first.run_id, config_id=first.config_id, attempt=1, sweep="small", cluster="test", status="ok",
        spec=first.spec, provenance={"environment_key": "old"},
    )  # fmt: skip
    project.write_result(result)
    assert [finding["kind"] for finding in audit()[1]] == kinds


def test_two_attempts_at_work_are_a_doubled_run(project: ClusterTree, put: Put) -> None:
    folder, record = submission(project)
    for job_id in ("4711_0", "4709_0"):
        begin_attempt(
            project.run_folder(record.arrays[0].run_ids[0]),
            launch="l", host="h", started_unix_s=1.0, job_id=job_id, task_file=str(folder / "0.jsonl"),
        )  # fmt: skip
    put("4711_0|RUNNING|None|N/A|NAME|n1|ada|FOLDER|x", "4709_0|RUNNING|None|N/A|NAME|n1|ada|FOLDER|x")
    assert [finding["kind"] for finding in audit()[1]] == ["doubled run", "second job"]


def test_cancel_reaches_jobs_that_no_journal_knows(project: ClusterTree, put: Put, fake_slurm: Path) -> None:
    put(
        "4711_[0-3]|PENDING|JobHeldAdmin|N/A|NAME||ada|FOLDER|x",
        "4709_[0-3]|PENDING|Priority|N/A|NAME||ada|FOLDER|FOLDER/0.sh 0",
    )
    (fake_slurm / "queries").unlink(missing_ok=True)
    done = CliRunner().invoke(cli, ["cancel", "small", "--json"])
    assert done.exit_code == 0, done.stderr
    (document,) = json.loads(done.stdout)["cancelled"]
    assert (len(document["run_ids"]), document["further_jobs"]) == (4, ["4709_[0-3]"])
    asked = (fake_slurm / "queries").read_text().splitlines()
    assert [line for line in asked if line.startswith("scancel")] == ["scancel 4711", "scancel 4709_[0-3]"]
    # One table of the whole queue serves the states and the audit.
    assert sum(line.startswith("squeue") for line in asked) == 1


def test_cancel_states_what_it_could_not_do_and_what_stays(project: ClusterTree, put: Put, fake_slurm: Path) -> None:
    put("4711_0|RUNNING|None|N/A|NAME|n1|ada|FOLDER|x", "4711_[1-3]|PENDING|Priority|N/A|NAME||ada|FOLDER|x")
    (fake_slurm / "scancel.error").write_text("scancel: error: Kill job error on job id 4711: Access/permission denied")
    done = CliRunner().invoke(cli, ["cancel", "small", "--json"])
    assert "asked 0 runs to stop" in done.stderr
    message = str(done.exception)
    assert "the scheduler did not cancel job 4711 of" in message
    assert "Access/permission denied" in message
    assert "3 runs removed from the submission, so that the job does nothing for them; 1 run still running" in message
    (document,) = json.loads(done.stdout)["cancelled"]
    assert len(document["not_cancelled"]) == 4


def test_a_cancelled_run_whose_job_ended_without_a_result_is_cancelled(
    project: ClusterTree, put: Put, fake_slurm: Path
) -> None:
    """Its job was put back into the queue, and found that it had been cancelled."""
    folder, record = submission(project)
    run_ids = record.arrays[0].run_ids
    begin_attempt(
        project.run_folder(run_ids[0]), launch="l", host="h", started_unix_s=1.0, job_id="4711_0",
        task_file=str(folder / "0.jsonl"),
    )  # fmt: skip
    drop_runs(folder, run_ids)
    put()
    (fake_slurm / "sacct").write_text(
        "4711_0|COMPLETED|None|2026-01-01T00:00:00|NAME|n1\n".replace("NAME", record.batch_name(0, 0, 4))
    )
    document = json.loads(CliRunner().invoke(cli, ["status", "small", "--json"]).stdout)
    states = {run["run_id"]: run["state"] for run in document["sweeps"][0]["runs"]}
    assert [states[run_id] for run_id in run_ids] == ["cancelled", "planned", "planned", "planned"]


def test_an_audit_needs_an_answer(put: Put, fake_slurm: Path) -> None:
    (fake_slurm / "squeue.silent").touch()
    done = CliRunner().invoke(cli, ["status", "--audit"])
    assert "squeue: it printed nothing" in str(done.exception)
    assert done.exit_code != 0
