"""Requests to the scheduler: scancel takes a job or an array, and the profile sets the pause between queries."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.submit.journal import JobBatch
from hpcbench.submit.scheduler_registry import poll_period_s
from hpcbench.submit.slurm_scheduler import job_expressions
from hpcbench.submit.submission_record import JobArray, Submission, SubmittedRun

_SIZE = 2000


def runs_of(job_id: str, tasks: Collection[int], *, is_array: bool = True) -> list[SubmittedRun]:
    """Runs of one array, or of a job that is none."""
    array = JobArray(number=0, run_ids=[f"{task:016x}" for task in range(_SIZE)], ranks=1, nodes=1, job_limit_s=60)
    record = Submission(
        submission="s-0001", token="t", sweep="s", cluster="c", scheduler="slurm", created_unix_s=0.0, arrays=[array]
    )
    batch = JobBatch(array=0, first=0, count=_SIZE if is_array else 1, is_array=is_array, job_id=job_id)
    return [SubmittedRun(Path("s-0001"), record, array, task, batch) for task in tasks]


@pytest.mark.parametrize(
    ("tasks", "expression"),
    [
        (range(_SIZE), "4711"),
        ([3], "4711_3"),
        ([*range(10), 12], "4711_[0-9,12]"),
        ([1, 3, 5, 6], "4711_[1,3,5-6]"),
    ],
)
def test_the_jobs_of_an_array_are_one_expression(tasks: Collection[int], expression: str) -> None:
    assert job_expressions(runs_of("4711", tasks)) == [expression]


def test_every_array_and_single_job_is_one_expression() -> None:
    runs = [*runs_of("1", range(_SIZE)), *runs_of("2", [0, 1]), *runs_of("3", [0], is_array=False)]
    assert job_expressions(runs) == ["1", "2_[0-1]", "3"]


@pytest.mark.parametrize(
    ("kind", "keys", "expected"), [("slurm", {}, 30.0), ("local", {}, 1.0), ("slurm", {"poll_s": "2 min"}, 120.0)]
)
def test_the_profile_sets_the_pause_between_queries(kind: str, keys: dict[str, str], expected: float) -> None:
    profile = ClusterProfile.model_validate({"name": "c", "scheduler": {"kind": kind, **keys}})
    assert poll_period_s(kind, "c", profile) == expected
