"""Pipelines as a job script starts them: what their results say of a step, and of a schedule that is stuck."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.results.schema import RunResult
from hpcbench.strategies.pipeline.schedules import PipelineLayout, schedule_actions
from tests.distributed.launching import ROOT, Launch
from tests.worker.helpers import make_spec, tree_of, write_tasks

pytestmark = pytest.mark.slow

SILENT = [str(ROOT / "tests" / "distributed" / "silent.py")]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started = Launch(tmp_path, forks=True)
    yield started
    started.kill()


def pipeline(**more: Any) -> RunSpec:
    return make_spec(model="vgg11", strategy="1f1b", tasks_per_node=2, pp_degree=2, micro_batches=4, **more)


def result_of(folder: Path, spec: RunSpec, launch: Launch) -> RunResult:
    found = tree_of(folder).read_result(run_id(spec))
    assert found is not None, launch.logs()
    return found


def test_a_result_holds_the_measured_timeline_over_the_planned_one(tmp_path: Path, launch: Launch) -> None:
    spec = pipeline(profile_steps=1, verify=True)
    launch.by_hand(2, write_tasks(tmp_path, spec)).wait()
    result = result_of(tmp_path, spec, launch)
    assert result.status == "ok", launch.logs()
    timeline = result.timeline
    assert timeline is not None
    assert timeline.measured_s is not None
    assert timeline.planned_s is not None
    assert result.metrics.bubble_fraction == timeline.bubble_fraction
    for rank, own in zip(timeline.ranks, schedule_actions("1f1b", PipelineLayout(2), 4), strict=True):
        for spans, length_s in ((rank.measured, timeline.measured_s), (rank.planned, timeline.planned_s)):
            assert [(one.kind, one.chunk, one.micro_batch) for one in spans] == [tuple(action) for action in own]
            edges = [edge for one in spans for edge in (one.begin_s, one.end_s)]
            assert edges == sorted(edges)
            assert edges[-1] <= length_s


def test_a_schedule_that_is_stuck_fails_with_the_state_of_every_rank(tmp_path: Path, launch: Launch) -> None:
    """Rank 1 computes its first gradient and keeps it."""
    spec = pipeline()
    codes = launch.by_hand(2, write_tasks(tmp_path, spec), SILENT, SILENT="1").wait()
    result = result_of(tmp_path, spec, launch)
    assert (codes, result.status) == ([1, 1], "failed"), launch.logs()
    assert result.error is not None
    assert "the pipeline is stuck: rank" in result.error.message
    states = [rank["state"] for rank in result.ranks]
    assert states[0] == "stage 0 of 2: waiting for what it needs before B(chunk 0, micro-batch 0)"
    assert states[1] == "stage 1 of 2: waiting for what it needs before F(chunk 1, micro-batch 2)"
