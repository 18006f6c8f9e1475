"""Limits, answers that do not come, and submits that died: against an sbatch that does as it is told."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.sweep_loader import Sweep
from hpcbench.identity import account_name
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit import sbatch
from hpcbench.submit.journal import JobBatch, JournalWriter, drop_runs, read_journal
from hpcbench.submit.lock import exclusive_lock
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.run_state import run_states
from hpcbench.submit.scheduler import SendOutcome
from hpcbench.submit.slurm_scheduler import SlurmScheduler
from hpcbench.submit.submission_record import Submission, next_submission_folder
from hpcbench.submit.submit import render_submission, submit, write_submission
from tests.submit.conftest import SWEEP

TEN = SWEEP.replace("batch_size = [8, 16]\nnodes = [1, 2]", "seed = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]").replace(
    '"ddp"', '"ddp"\nbatch_size = 8'
)


@pytest.fixture
def ten(write_sweep: Callable[[str], Sweep], cluster_tree: ClusterTree) -> Callable[..., SweepPlan]:
    """Ten runs of one shape, on a profile that is given more keys."""

    def make(more: str = "", **scheduler: Any) -> SweepPlan:
        profile = ClusterProfile.model_validate({"name": "test", "scheduler": {"kind": "slurm", **scheduler}})
        return make_plan(write_sweep(TEN + more), profile, cluster_tree)

    return make


def calls(fake_slurm: Path) -> list[list[str]]:
    return [line.split() for line in (fake_slurm / "calls").read_text().splitlines()]


def options(fake_slurm: Path, name: str) -> list[str | None]:
    prefix = f"--{name}="
    return [
        next((word.removeprefix(prefix) for word in call if word.startswith(prefix)), None)
        for call in calls(fake_slurm)
    ]


def written(plan: SweepPlan, tree: ClusterTree) -> tuple[Path, Submission]:
    """A submission whose submit died before it sent anything."""
    folder = next_submission_folder(tree, plan.sweep.name)
    rendered = render_submission(plan, plan.missing, tree, folder)
    write_submission(rendered, folder)
    return folder, rendered.record


def hand_over(plan: SweepPlan, tree: ClusterTree, folder: Path, record: Submission) -> SendOutcome:
    return SlurmScheduler(plan.profile).submit(folder, record, tree, lambda text: None)


def test_a_limit_is_met_with_smaller_arrays_and_the_rest_waits(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "limit")
    monkeypatch.setenv("FAKE_LIMIT", "7")
    monkeypatch.setenv("FAKE_COUNT_IDS", "1")
    (fake_slurm / "squeue.user").write_text("1|gpu|normal\n")
    sent = submit(ten(), cluster_tree).sent
    assert (sent.jobs, sent.waiting, sent.refused, sent.failed) == (7, 3, [], None)
    assert "QOSMaxSubmitJobPerUserLimit" in sent.reason
    assert options(fake_slurm, "array") == ["0-9", "0-4", "0-4", "0-1", "0-1", "0-0"]
    plan = ten()
    states = run_states(cluster_tree, plan.runs, plan.profile, time.time())
    assert [state.state for state in states.values()].count("waiting") == 3
    (fake_slurm / "queued").write_text("0")
    again = submit(ten(), cluster_tree)
    assert (again.run_ids, again.sent.jobs, again.sent.waiting) == ([], 3, 0)
    assert calls(fake_slurm)[-1][-1] == "7"
    numbers = [
        number
        for chunk in read_journal(next(cluster_tree.submissions.glob("small-*"))).of(0)
        for number in range(chunk.first, chunk.first + chunk.count)
    ]
    assert numbers == list(range(10))


def test_a_limit_that_not_even_one_job_meets_is_a_refusal(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "limit")
    monkeypatch.setenv("FAKE_LIMIT", "0")
    (refused,) = submit(ten(), cluster_tree).sent.refused
    assert "QOSMaxSubmitJobPerUserLimit" in refused.message
    assert list(cluster_tree.submissions.iterdir()) == []


def test_a_profile_limits_submitted_jobs(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    (fake_slurm / "squeue.user").write_text("1|gpu|normal\n2|gpu|normal\n3|cpu|low\n")
    sent = submit(ten(max_submitted_jobs=7), cluster_tree).sent
    assert (sent.jobs, sent.waiting) == (4, 6)
    assert options(fake_slurm, "array") == ["0-3"]
    assert "7 submitted jobs" in sent.reason


@pytest.mark.parametrize(
    ("cap", "arrays", "dependencies"),
    [
        (100, ["0-3", "0-3", "0-1"], [None, None, None]),
        (9, ["0-3", "0-3%3", "0-1"], [None, None, None]),
        (4, ["0-3%2", "0-3%2", "0-1"], [None, None, "afterany:4711"]),
        (2, ["0-3%2", "0-3%2", "0-1"], [None, "afterany:4711", "afterany:4712"]),
        (1, ["0-3%1", "0-3%1", "0-1%1"], [None, "afterany:4711", "afterany:4712"]),
    ],
)
def test_the_cap_on_running_jobs_is_shared_among_arrays(
    ten: Callable[..., SweepPlan],
    cluster_tree: ClusterTree,
    fake_slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
    cap: int,
    arrays: list[str],
    dependencies: list[str | None],
) -> None:
    monkeypatch.setenv("FAKE_COUNT_IDS", "1")
    submit(ten(f"[submit]\nmax_running_jobs = {cap}\n", max_array_size=4), cluster_tree)
    assert options(fake_slurm, "array") == arrays
    assert options(fake_slurm, "dependency") == dependencies


def test_a_scheduler_that_fails_once_is_called_again(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "away-first")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    told: list[str] = []
    sent = submit(ten(), cluster_tree, notify=told.append).sent
    assert (sent.jobs, sent.waiting, len(calls(fake_slurm))) == (10, 0, 2)
    (said,) = told
    assert "sbatch could not send" in said
    assert said.endswith("Unable to contact slurm controller (connect failure): asking again")


def test_a_scheduler_that_stays_away_leaves_the_jobs_waiting(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "away")
    sent = submit(ten(retry_s=0.0), cluster_tree).sent
    assert (sent.jobs, sent.waiting, sent.refused) == (0, 10, [])
    assert "Unable to contact slurm controller" in str(sent.failed)
    monkeypatch.setenv("FAKE_SBATCH", "ok")
    again = submit(ten(), cluster_tree)
    assert (again.run_ids, again.sent.jobs, again.sent.waiting) == ([], 10, 0)


def test_no_array_is_sent_by_a_guess_at_the_largest(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    (fake_slurm / "scontrol.error").write_text("slurm_load_ctl_conf error: Unable to contact slurm controller")
    sent = submit(ten(retry_s=0.0), cluster_tree).sent
    assert (sent.jobs, sent.waiting, "scontrol" in str(sent.failed)) == (0, 10, True)
    assert not (fake_slurm / "calls").exists()
    (fake_slurm / "scontrol.error").unlink()
    (fake_slurm / "scontrol").write_text("MaxArraySize            = 4\n")
    assert submit(ten(), cluster_tree).sent.jobs == 10
    assert options(fake_slurm, "array") == ["0-3", "0-3", "0-1"]


def test_a_submission_locked_by_another_process_is_not_sent(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record = written(ten(), cluster_tree)
    monkeypatch.setattr("hpcbench.submit.send.exclusive_lock", functools.partial(exclusive_lock, wait_s=0.1))
    with exclusive_lock(folder / ".sending"):
        sent = hand_over(ten(), cluster_tree, folder, record)
    assert (sent.jobs, sent.waiting, sent.failed) == (0, 10, None)
    assert "whose lock has not changed" in sent.reason
    assert not (fake_slurm / "calls").exists()


def test_an_accepted_job_without_an_answer_is_found_by_name(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "unclear")
    sent = submit(ten(), cluster_tree).sent
    assert (sent.jobs, len(calls(fake_slurm))) == (10, 1)
    (folder,) = cluster_tree.submissions.glob("small-*")
    assert read_journal(folder).job_ids() == [f"4999_{number}" for number in range(10)]


@pytest.mark.parametrize(
    ("behaviour", "job_id"), [("banner-before", "4711"), ("wrapper", "4711"), ("silent-wrapper", "4999")]
)
def test_the_job_number_is_read_despite_banners_and_wrappers(
    behaviour: str, job_id: str, ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A site's banner holds other numbers, and its wrapper may fail once the job is queued."""
    monkeypatch.setenv("FAKE_SBATCH", behaviour)
    outcome = submit(ten(), cluster_tree)
    assert (outcome.sent.jobs, outcome.sent.refused) == (10, [])
    assert outcome.folder is not None
    assert [batch.job_id for batch in read_journal(outcome.folder).batches] == [job_id]


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("4711\n", ("4711", "")),
        ("4711;beta\n", ("4711", "beta")),
        ("Submitted batch job 4711\n", ("4711", "")),
        ("Submitted batch job 4711 on cluster two\n", ("4711", "two")),
        ("see job 2024 policy\nSubmitted batch job 167\n", ("167", "")),
        ("12 jobs of 2024\n", None),
        ("", None),
    ],
)
def test_the_job_number_is_parsed_from_sbatchs_output(output: str, number: tuple[str, str] | None) -> None:
    assert sbatch.parse_job_number(output) == number


def test_an_unclear_sbatch_call_is_not_repeated_while_squeue_fails(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "unclear-lost")
    (fake_slurm / "squeue.error").write_text("Unable to contact slurm controller")
    sent = submit(ten(retry_s=1.5), cluster_tree).sent
    assert (sent.jobs, sent.waiting, len(calls(fake_slurm))) == (0, 10, 1)
    again = submit(ten(retry_s=0.0), cluster_tree).sent
    assert (again.jobs, again.waiting, len(calls(fake_slurm))) == (0, 10, 1)


def test_a_submit_killed_before_sending_is_completed(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    written(ten(), cluster_tree)
    again = submit(ten(), cluster_tree)
    assert (again.folder, again.run_ids, again.sent.jobs) == (None, [], 10)
    assert len(calls(fake_slurm)) == 1


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_submit_killed_while_sending_is_completed(
    ten: Callable[..., SweepPlan],
    cluster_tree: ClusterTree,
    fake_slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_queued: bool,
) -> None:
    monkeypatch.setattr(sbatch, "SBATCH_SETTLE_S", 0.1)
    folder, record = written(ten(), cluster_tree)
    name = record.batch_name(0, 0, 10)
    batch = JobBatch(array=0, first=0, count=10, name=name, is_array=True, user=account_name())
    JournalWriter(folder).record(batch, durable=True)
    (fake_slurm / "squeue.named").write_text(f"4321|{name}\n4322|{name}x\n" if is_queued else "")
    sent = submit(ten(), cluster_tree).sent
    assert sent.jobs == (0 if is_queued else 10)
    assert read_journal(folder).job_ids()[0] == ("4321_0" if is_queued else "4711_0")


def test_a_job_that_ended_unseen_is_found_by_start_markers(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    folder, record = written(ten(), cluster_tree)
    batch = JobBatch(array=0, first=0, count=10, name=record.batch_name(0, 0, 10), is_array=True)
    JournalWriter(folder).record(batch, durable=True)
    begin_attempt(
        cluster_tree.run_folder(record.arrays[0].run_ids[6]),
        launch="l", host="h", started_unix_s=1.0, job_id="4321_6", task_file=str(folder / "0.jsonl"),
    )  # fmt: skip
    sent = submit(ten(), cluster_tree).sent
    assert (sent.jobs, sent.waiting) == (0, 0)
    assert read_journal(folder).job_ids()[6] == "4321_6"


def test_a_reused_job_number_of_another_job_is_ignored(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    plan = ten()
    submit(plan, cluster_tree)
    later = time.time() + 3600
    (fake_slurm / "squeue").write_text("4711_0|RUNNING|None|N/A|hpcbench-small-0001-ffffffff-0.0-9\n")
    states = run_states(cluster_tree, plan.runs, plan.profile, later)
    assert {state.state for state in states.values()} == {"lost"}


def test_dropped_runs_are_not_submitted(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    plan = ten("[submit]\npack = 2\n")
    folder, record = written(plan, cluster_tree)
    drop_runs(folder, [record.arrays[0].run_ids[number] for number in (2, 3, 4)])
    sent = hand_over(plan, cluster_tree, folder, record)
    assert (sent.jobs, sent.waiting) == (4, 0)
    assert [(call[-1], one) for call, one in zip(calls(fake_slurm), options(fake_slurm, "array"), strict=True)] == [
        ("0", "0-0"),
        ("2", "0-2"),
    ]
    states = run_states(cluster_tree, plan.runs, plan.profile, time.time())
    assert [state.state for state in states.values()] == ["pending"] * 2 + ["planned"] * 3 + ["pending"] * 5


def test_packs_are_jobs_of_several_runs(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    plan = ten("[submit]\npack = 4\n")
    submit(plan, cluster_tree)
    assert options(fake_slurm, "array") == ["0-2"]
    (fake_slurm / "squeue").write_text("4711_0|RUNNING|None\n4711_1|PENDING|Resources\n4711_2|TIMEOUT|None\n")
    states = run_states(cluster_tree, plan.runs, plan.profile, time.time() + 3600)
    assert [state.state for state in states.values()] == ["pending"] * 8 + ["planned"] * 2
    assert {state.job_id for state in states.values()} == {"4711_0", "4711_1", "4711_2"}
