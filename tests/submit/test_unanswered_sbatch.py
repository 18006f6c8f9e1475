"""An sbatch without an answer is resolved by squeue's answers alone: prompt ones, with a table, for long enough."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcbench.errors import SubmitError
from hpcbench.identity import account_name
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit import sbatch
from hpcbench.submit.journal import JobBatch, JournalWriter, read_journal
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.run_state import run_states
from hpcbench.submit.slurm_queue import JobLookup, SbatchOutcome
from hpcbench.submit.submit import submit
from tests.submit.test_send import calls, ten, written

__all__ = ["ten"]

ABSENT, LATE, NO_TABLE = JobLookup([], True, 0.1), JobLookup([], True, 25.0), JobLookup([], False, 0.1)
FOUND = JobLookup([("4999", "")], True, 25.0)
AWAY = SubmitError("the scheduler does not answer: squeue: timed out")


Outcome = tuple[int, float, SubmitError | None]


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def time(self) -> float:
        return 4e9  # a login node's clock may show anything


@pytest.fixture
def settle(
    monkeypatch: pytest.MonkeyPatch, ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> Callable[..., Outcome]:
    """Submit with an sbatch that does not answer and a squeue that answers in turn, the last for ever.

    Returns how often sbatch was called, how long it all took by the clock, and the error.
    """

    def run(*answers: JobLookup | SubmitError, retry_s: float = 60.0) -> Outcome:
        clock, left, called = Clock(), list(answers), []
        monkeypatch.setattr(sbatch, "time", clock)

        def look(*_: object) -> JobLookup:
            answer = left.pop(0) if len(left) > 1 else left[0]
            clock.sleep(answer.wall_s if isinstance(answer, JobLookup) else 60.0)
            if isinstance(answer, SubmitError):
                raise answer
            return answer

        def call(*_: object) -> tuple[str, str]:
            called.append(clock.now_s)
            if len(called) == 1:
                raise sbatch.SbatchError("sbatch: Socket timed out", SbatchOutcome.UNCLEAR)
            return "5000", ""

        monkeypatch.setattr(sbatch, "find_jobs", look)
        monkeypatch.setattr(sbatch.SbatchExecutor, "submit_script", call)
        sent = submit(ten(retry_s=retry_s), cluster_tree).sent
        return len(called), clock.now_s - 1000.0, sent.failed

    return run


def test_a_job_that_squeue_never_lists_is_sent_again_after_the_settle_time(settle: Callable[..., Outcome]) -> None:
    sent, took_s, failed = settle(ABSENT)
    assert (sent, failed) == (2, None)
    assert sbatch.SBATCH_SETTLE_S < took_s < sbatch.SBATCH_SETTLE_S + 10


@pytest.mark.parametrize("answer", [LATE, NO_TABLE, AWAY], ids=["late", "no table", "away"])
def test_an_answer_of_a_scheduler_that_hangs_begins_the_time_anew(
    answer: JobLookup | SubmitError, settle: Callable[..., Outcome]
) -> None:
    """The hang may have begun after the first answer: only unbroken prompt answers count."""
    sent, took_s, failed = settle(ABSENT, ABSENT, ABSENT, answer, ABSENT, retry_s=300.0)
    assert (sent, failed) == (2, None)
    before_s = 3 * sbatch._MIN_RETRY_PAUSE_S
    assert took_s > sbatch.SBATCH_SETTLE_S + before_s + 1


def test_a_job_that_appears_after_the_hang_is_the_batchs(settle: Callable[..., Outcome]) -> None:
    assert settle(ABSENT, LATE, FOUND)[::2] == (1, None)


@pytest.mark.parametrize("answer", [LATE, NO_TABLE, AWAY], ids=["late", "no table", "away"])
def test_without_a_prompt_answer_nothing_is_sent_again(
    answer: JobLookup | SubmitError, settle: Callable[..., Outcome], cluster_tree: ClusterTree
) -> None:
    sent, _, failed = settle(answer)
    assert sent == 1
    assert "it is not certain whether sbatch submitted hpcbench-small-0001-" in str(failed)
    (folder,) = cluster_tree.submissions.glob("small-*")
    assert [batch.is_unanswered for batch in read_journal(folder).batches] == [True]


def test_a_scheduler_that_answers_again_is_worth_the_settle_time(settle: Callable[..., Outcome]) -> None:
    """The patience is for a scheduler that does not answer."""
    sent, took_s, failed = settle(ABSENT, retry_s=2.0)
    assert (sent, failed) == (2, None)
    assert took_s > sbatch.SBATCH_SETTLE_S


def unanswered(folder: Path, name: str, user: str) -> None:
    JournalWriter(folder).record(JobBatch(array=0, first=0, count=10, name=name, is_array=True, user=user))


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbatch, "SBATCH_SETTLE_S", 0.05)
    monkeypatch.setattr(sbatch, "_MIN_RETRY_PAUSE_S", 0.02)


@pytest.mark.usefixtures("no_waiting")
def test_only_the_account_that_called_sbatch_finds_that_its_job_is_absent(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    folder, record = written(ten(), cluster_tree)
    unanswered(folder, record.batch_name(0, 0, 10), "alice")
    sent = submit(ten(), cluster_tree).sent
    assert (sent.jobs, sent.waiting) == (0, 10)
    assert "an sbatch of alice has not answered" in sent.reason
    assert not (fake_slurm / "calls").exists()
    plan = ten()
    states = run_states(cluster_tree, plan.runs, plan.profile, time.time())
    assert {state.state for state in states.values()} == {"waiting"}
    assert "alice" in next(iter(states.values())).reason
    # What another account sees is there for certain.
    (fake_slurm / "squeue.named").write_text(f"4321|{record.batch_name(0, 0, 10)}\n")
    submit(ten(), cluster_tree)
    assert read_journal(folder).job_ids()[0] == "4321_0"


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(("queue", "kept", "cancelled"), [("4711 4999", "4711", "4999"), ("4600 4711", "4600", "4711")])
def test_of_two_jobs_of_one_name_the_older_is_kept(
    queue: str, kept: str, cancelled: str, ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    """The job of the call that had no answer appears once the second was accepted."""
    folder, record = written(ten(), cluster_tree)
    name = record.batch_name(0, 0, 10)
    writer = JournalWriter(folder)
    writer.record(JobBatch(array=0, first=0, count=10, name=name, is_array=True, user=account_name()))
    writer.withdraw(JobBatch(array=0, first=0, count=10, name=name, is_array=True), doubtful=True)
    (fake_slurm / "squeue.named").write_text("".join(f"{number}|{name}\n" for number in queue.split()))
    told: list[str] = []
    submit(ten(), cluster_tree, notify=told.append)
    assert [batch.job_id for batch in read_journal(folder).batches] == [kept]
    assert [line for line in queries(fake_slurm) if line.startswith("scancel")] == [f"scancel {cancelled}"]
    assert any(f"job {cancelled} is a second one" in text for text in told)


@pytest.mark.usefixtures("no_waiting")
def test_of_two_jobs_of_one_name_the_one_that_has_begun_a_run_is_kept(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    folder, record = written(ten(), cluster_tree)
    name = record.batch_name(0, 0, 10)
    JournalWriter(folder).withdraw(JobBatch(array=0, first=0, count=10, name=name, is_array=True), doubtful=True)
    begin_attempt(
        cluster_tree.run_folder(record.arrays[0].run_ids[2]),
        launch="l", host="h", started_unix_s=1.0, job_id="4999_2", task_file=str(folder / "0.jsonl"),
    )  # fmt: skip
    (fake_slurm / "squeue.named").write_text(f"4711|{name}\n4999|{name}\n")
    submit(ten(), cluster_tree)
    assert [batch.job_id for batch in read_journal(folder).batches] == ["4999"]
    assert "scancel 4711" in queries(fake_slurm)


def test_a_usual_submit_looks_for_no_second_job(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    submit(ten(), cluster_tree)
    assert len(calls(fake_slurm)) == 1
    assert [line for line in queries(fake_slurm) if line.startswith("squeue")] == []


def queries(fake_slurm: Path) -> list[str]:
    path = fake_slurm / "queries"
    return path.read_text().splitlines() if path.exists() else []


def test_the_number_of_a_submission_is_never_used_again(
    ten: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a folder that was removed by hand nor a clock that goes back changes the order."""
    first = submit(ten(), cluster_tree).folder
    assert first is not None
    shutil.rmtree(first)
    monkeypatch.setattr("hpcbench.submit.submit.time.time", lambda: 0.0)
    second = submit(ten(), cluster_tree).folder
    assert (first.name, second and second.name) == ("small-0001", "small-0002")
