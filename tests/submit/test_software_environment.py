from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import config_id, read_task
from hpcbench.errors import SubmitError
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RunResult
from hpcbench.submit.job_software import environment_key, installed_versions
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.run_state import run_states
from hpcbench.submit.submit import RunSelection, submit
from hpcbench.submit.watcher import SweepWatcher


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    packages = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    for name in ("torch-2.6.0.dist-info", "numpy-2.1.0.dist-info", "click-8.0.dist-info", "torch"):
        (packages / name).mkdir()
    return packages


def profile(**environment: Any) -> ClusterProfile:
    return ClusterProfile.model_validate(
        {"name": "test", "environments": {"one": environment}, "default_environment": "one"}
    )


def test_versions_are_read_from_the_interpreters_folder(venv: Path) -> None:
    python = venv.parents[2] / "bin" / "python"
    assert installed_versions(python) == {"torch": "2.6.0", "numpy": "2.1.0"}
    assert installed_versions(Path("python3")) == {}
    assert "torch" in installed_versions(Path(sys.executable))


def test_the_key_follows_what_a_measurement_depends_on(venv: Path) -> None:
    same = profile(venv=str(venv.parents[2]))
    key = environment_key(same.environment(None))
    assert environment_key(same.environment("one")) == key
    assert environment_key(profile(venv=str(venv.parents[2]), modules=["cuda/12"]).environment(None)) != key
    (venv / "torch-2.6.0.dist-info").rename(venv / "torch-2.7.0.dist-info")
    assert environment_key(same.environment(None)) != key


def measured(plan: SweepPlan, tree: ClusterTree, key: str | None) -> None:
    for run_id, spec in plan.runs.items():
        result = RunResult(
            run_id=run_id, config_id=config_id(spec), attempt=1, sweep="small", cluster="test", status="ok", spec=spec,
            provenance={"environment_key": key} if key else {},
        )  # fmt: skip
        assert tree.write_result(result)


def test_results_of_another_environment_are_listed_and_measured_again_on_request(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    measured(plan, cluster_tree, "0123456789ab")
    again = make_plan(plan.sweep, plan.profile, cluster_tree)
    assert again.elsewhere == dict.fromkeys(plan.runs, "0123456789ab")
    assert submit(again, cluster_tree).run_ids == []
    submitted = submit(again, cluster_tree, RunSelection(remeasure=True))
    assert submitted.run_ids == list(plan.runs)
    assert submitted.folder is not None
    header, task = read_task(submitted.folder / "0.jsonl", 0)
    assert (task.supersedes, header.environment_key) == ("0123456789ab", plan.environment_key(None))
    (fake_slurm / "squeue").write_text("4711_0|PENDING|None\n4711_1|PENDING|None\n")
    twice = submit(again, cluster_tree, RunSelection(remeasure=True))
    assert (twice.run_ids, len(twice.active)) == ([], 4)
    # Until they are measured anew, the results that are there count.
    states = run_states(cluster_tree, plan.runs, plan.profile, 0.0)
    assert {state.state for state in states.values()} == {"ok"}

    # Whoever waits for the new ones is not told that all is done.
    watcher = SweepWatcher(cluster_tree.root, plan.profile, {"small": list(plan.runs)}, superseded=again.elsewhere)
    first, *others = plan.runs
    states = watcher.query()
    assert "ok" not in {state.state for state in states.values()}
    assert states[first].state == "pending"
    spec = plan.runs[first]
    result = RunResult(
        run_id=first, config_id=config_id(spec), attempt=1, sweep="small", cluster="test", status="ok", spec=spec,
        provenance={"environment_key": plan.environment_key(None)},
    )  # fmt: skip
    assert cluster_tree.write_result(result, "0123456789ab")
    assert {key for key, state in watcher.refresh_results(states).items() if state.state == "ok"} == {first}
    assert {watcher.query()[key].state for key in others[:1]} == {"pending"}


@pytest.mark.parametrize("key", ["today", None])
def test_results_of_this_or_an_unknown_environment_are_kept(
    plan: SweepPlan, cluster_tree: ClusterTree, key: str | None
) -> None:
    measured(plan, cluster_tree, plan.environment_key(None) if key else None)
    assert make_plan(plan.sweep, plan.profile, cluster_tree).elsewhere == {}


def lacking(plan: SweepPlan, tree: ClusterTree, key: str, hint: str | None) -> None:
    """Every run is ``unsupported`` in the environment ``key``."""
    for run_id, spec in plan.runs.items():
        error = FailureRecord(type="WorkerError", message="cannot import torch", hint=hint)
        result = RunResult(
            run_id=run_id, config_id=config_id(spec), attempt=1, sweep="small", cluster="test", status="unsupported",
            spec=spec, provenance={"environment_key": key}, error=error,
        )  # fmt: skip
        assert tree.write_result(result)


@pytest.mark.parametrize(
    ("hint", "is_same", "submitted"),
    [
        ("python -m pip install torch", False, 4),
        ("python -m pip install torch", True, 0),
        ("fp64, fp32 and bf16 run on a cpu", False, 0),
        (None, False, 0),
    ],
)
def test_runs_that_lacked_a_package_run_again_in_another_environment(
    hint: str | None, is_same: bool, submitted: int, plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    lacking(plan, cluster_tree, plan.environment_key(None) if is_same else "before", hint)
    again = make_plan(plan.sweep, plan.profile, cluster_tree)
    assert len(again.missing) == submitted
    assert len(submit(again, cluster_tree).run_ids) == submitted


def test_submit_refuses_before_it_writes_anything_where_the_jobs_lack_torch(
    plan: SweepPlan, cluster_tree: ClusterTree, fake_slurm: Path, tmp_path: Path
) -> None:
    python = tmp_path / "bare" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    bare = make_plan(plan.sweep, profile(venv=str(python.parents[1])), cluster_tree)
    with pytest.raises(SubmitError, match="has no torch") as caught:
        submit(bare, cluster_tree)
    assert str(caught.value.hint).startswith(f"{python} -m pip install torch")
    assert not cluster_tree.root.exists()
    modules = make_plan(plan.sweep, profile(venv=str(python.parents[1]), modules=["torch"]), cluster_tree)
    assert len(submit(modules, cluster_tree).run_ids) == 4
