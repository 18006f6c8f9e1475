from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.sweep_file import SubmitTable
from hpcbench.config.sweep_loader import Sweep
from hpcbench.errors import ConfigError, ConfigErrors
from hpcbench.render.job_script import LAUNCH_OVERHEAD_S, JobShape, make_job_shape
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import group_jobs, make_plan, runs_per_job
from hpcbench.submit.submit import RunSelection, submit
from tests.submit.conftest import SWEEP


def shape(limit_min: float, max_time_min: float | None = None) -> JobShape:
    profile = ClusterProfile.model_validate({"name": "t", "partitions": {"short": {"max_time_min": max_time_min}}})
    return make_job_shape(profile, 2, 4, 1, limit_min * 60, partition="short")


@pytest.mark.parametrize(
    ("table", "limit_min", "max_time_min", "size"),
    [
        ({}, 10.0, 1000.0, 1),
        ({"pack": 8}, 10.0, 1000.0, 8),
        ({"pack": 8}, 10.0, 60.0, 5),
        ({"pack": 8}, 60.0, 60.0, 1),
        ({"pack_minutes": 60.0}, 10.0, 1000.0, 5),
        ({"pack_minutes": 60.0}, 9.5, 1000.0, 6),
        ({"pack_minutes": 5.0}, 10.0, 1000.0, 1),
        ({"pack_minutes": 600.0}, 10.0, 60.0, 5),
    ],
)
def test_the_runs_of_a_job_follow_pack_and_time_limit(
    table: dict[str, Any], limit_min: float, max_time_min: float, size: int
) -> None:
    assert runs_per_job(shape(limit_min, max_time_min), SubmitTable(**table)) == size


def test_the_time_limit_of_a_job_covers_all_its_runs() -> None:
    assert shape(10).job_limit_s() == 600
    assert shape(10).job_limit_s(3) == 3 * (600 + LAUNCH_OVERHEAD_S)


def test_a_partial_pack_has_a_shorter_time_limit() -> None:
    (group,) = group_jobs([(shape(10), ["a", "b"])], SubmitTable(pack=8))
    assert (group.pack, group.jobs, group.limit_s) == (2, 1, 2 * (600 + LAUNCH_OVERHEAD_S))
    assert group.node_hours == pytest.approx(2 * 2 * 600 / 3600)


def test_the_last_pack_is_what_is_left() -> None:
    (group,) = group_jobs([(shape(10), [str(run) for run in range(10)])], SubmitTable(pack=4))
    assert group.jobs == 3


def test_pack_and_pack_minutes_exclude_each_other(write_sweep: Callable[[str], Sweep]) -> None:
    with pytest.raises(ConfigErrors, match="pack and pack_minutes exclude each other"):
        write_sweep(SWEEP + "[submit]\npack = 2\npack_minutes = 30\n")


@pytest.mark.parametrize(
    ("sweep_budget", "cluster_budget", "owner"), [("1.9", None, "sweep small"), ("99", 0.5, "cluster test")]
)
def test_a_plan_above_the_budget_is_refused_without_yes(
    write_sweep: Callable[[str], Sweep],
    cluster_tree: ClusterTree,
    fake_slurm: Any,
    sweep_budget: str,
    cluster_budget: float | None,
    owner: str,
) -> None:
    """Four runs of half an hour at most, two of them on two nodes: three node-hours."""
    test = ClusterProfile.model_validate({"name": "test", "budget_node_hours": cluster_budget})
    plan = make_plan(write_sweep(SWEEP + f"[submit]\nbudget_node_hours = {sweep_budget}\n"), test, cluster_tree)
    with pytest.raises(ConfigError, match=f"4 runs may cost 3.00 node-hours .* budget of {owner} is") as caught:
        submit(plan, cluster_tree)
    assert "--yes" in str(caught.value)
    assert not (fake_slurm / "calls").exists()
    assert not cluster_tree.sweep_path("small").exists()
    assert len(submit(plan, cluster_tree, RunSelection(over_budget=True)).run_ids) == 4


def test_a_plan_of_very_many_jobs_is_refused_without_yes(
    write_sweep: Callable[[str], Sweep], fake_slurm: Path, cluster_tree: ClusterTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = ClusterProfile.model_validate({"name": "test"})
    monkeypatch.setattr("hpcbench.submit.plan.MAX_JOBS", 3)
    with pytest.raises(ConfigError, match="4 runs are 4 jobs, more than 3") as caught:
        submit(make_plan(write_sweep(SWEEP), test, cluster_tree), cluster_tree)
    assert "--yes" in str(caught.value.hint)
    packed = make_plan(write_sweep(SWEEP + "[submit]\npack = 2\n"), test, cluster_tree)
    assert len(submit(packed, cluster_tree).run_ids) == 4
