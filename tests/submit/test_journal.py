from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcbench.submit.journal import (
    JobBatch,
    Journal,
    JournalWriter,
    drop_runs,
    read_dropped_runs,
    read_journal,
)


def chunk(first: int, count: int, job_id: str | None = "7", **more: Any) -> JobBatch:
    return JobBatch(array=0, first=first, count=count, name=f"j{first}", job_id=job_id, is_array=True, **more)


@pytest.mark.parametrize(
    ("chunks", "jobs", "unsent"),
    [
        ([], 5, [(0, 5)]),
        ([chunk(0, 5)], 5, []),
        ([chunk(0, 2)], 5, [(2, 3)]),
        ([chunk(3, 1), chunk(1, 1)], 5, [(0, 1), (2, 1), (4, 1)]),
        ([chunk(0, 2, None)], 2, []),
        ([chunk(0, 2, None, refused=True)], 3, [(2, 1)]),
    ],
)
def test_unsent_slices_follow_from_the_journal(
    chunks: list[JobBatch], jobs: int, unsent: list[tuple[int, int]]
) -> None:
    assert Journal(chunks).unsent(0, jobs) == unsent


def test_an_array_task_counts_from_the_first_job_of_its_chunk() -> None:
    assert chunk(10, 3).job_of(12) == "7_2"
    assert JobBatch(array=0, first=4, count=1, job_id="8").job_of(4) == "8"
    assert Journal([chunk(2, 1), chunk(0, 2, "6")]).job_ids() == ["6_0", "6_1", "7_0"]


def test_a_process_goes_on_where_another_died(tmp_path: Path) -> None:
    first = JournalWriter(tmp_path)
    first.record(chunk(0, 4, None), durable=True)
    first.withdraw(chunk(0, 4, None), doubtful=True)
    first.record(chunk(0, 2))
    first.record(chunk(2, 2, None), durable=True)
    (open_one,) = [one for one in read_journal(tmp_path).batches if one.is_unanswered]
    assert open_one.first == 2
    second = JournalWriter(tmp_path)
    second.record(chunk(2, 2, "9"))
    second.record_waiting("too many jobs")
    journal = read_journal(tmp_path)
    assert journal.job_ids() == ["7_0", "7_1", "9_0", "9_1"]
    assert journal.waiting == "too many jobs"
    assert [(batch.first, batch.count) for batch in journal.doubtful] == [(0, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sent-1.jsonl", "sent-2.jsonl"]


def test_a_line_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    JournalWriter(tmp_path).record(chunk(0, 1))
    path = tmp_path / "sent-1.jsonl"
    path.write_bytes(path.read_bytes() + b'{"chunk":{"array":0,"fir')
    assert read_journal(tmp_path).job_ids() == ["7_0"]


def test_the_tenth_journal_comes_after_the_ninth(tmp_path: Path) -> None:
    for number in range(1, 11):
        JournalWriter(tmp_path).record_waiting(str(number))
    assert read_journal(tmp_path).waiting == "10"


def test_dropped_runs_are_recorded_once(tmp_path: Path) -> None:
    drop_runs(tmp_path, ["b"])
    drop_runs(tmp_path, ["a", "b"])
    assert read_dropped_runs(tmp_path) == {"a", "b"}
    (tmp_path / "dropped.json").write_text("[")
    assert read_dropped_runs(tmp_path) == set()
