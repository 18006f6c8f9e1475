from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec, config_id, read_task
from hpcbench.config.sweep_loader import Sweep
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RunResult
from hpcbench.results.stop_rules import find_stop_reason, read_stop_group
from hpcbench.submit.plan import SweepPlan, make_plan, stop_groups, stopped_runs
from hpcbench.submit.submit import RunSelection, submit
from tests.submit.conftest import SWEEP

Write = Callable[[str], Sweep]
Planned = Callable[[str], SweepPlan]
Label = Callable[[RunSpec], str]

BASE = """name = "s"
[fixed]
model = "resnet18"
dataset = "imagenet"
"""


@pytest.fixture
def planned(write_sweep: Write, slurm_profile: ClusterProfile, cluster_tree: ClusterTree) -> Planned:
    return lambda text: make_plan(write_sweep(BASE + text), slurm_profile, cluster_tree)


def grouped(plan: SweepPlan, label: Label) -> set[frozenset[str]]:
    """The groups, each as the labels of its runs."""
    return {frozenset(label(plan.runs[run_id]) for run_id, _ in group.runs) for group in plan.stops.groups}


def sets(*groups: Collection[str]) -> set[frozenset[str]]:
    return {frozenset(group) for group in groups}


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        (
            "strategy = 'ddp'\n[grid]\nbatch_size = [8, 16]\nprecision = ['fp32', 'bf16']\n[stop]\noom = 'batch_size'",
            lambda spec: f"{spec.precision}:{spec.batch_size}",
            sets(["fp32:8", "fp32:16"], ["bf16:8", "bf16:16"]),
        ),
        (
            "strategy = 'ddp'\nbatch_size = 8\n[grid]\nnodes = [1, 2, 4]\ntasks_per_node = [1, 2]\n[stop]\noom = 'nodes'",
            lambda spec: f"{spec.nodes}x{spec.tasks_per_node}",
            sets(["1x1", "2x1", "4x1"], ["1x2", "2x2", "4x2"]),
        ),
        (
            "strategy = 'ddp'\n[scaling]\nkind = 'strong'\nglobal_batch_size = 64\nnodes = [1, 2]\n[stop]\nfailed = 'nodes'",
            lambda spec: f"{spec.nodes}:{spec.batch_size}",
            sets(["1:64", "2:32"]),
        ),
        (
            "strategy = 'ddp'\n[grid]\nnodes = [1, 2]\nglobal_batch_size = [32, 64]\n[stop]\noom = 'global_batch_size'",
            lambda spec: f"{spec.nodes}:{spec.batch_size}",
            sets(["1:32", "1:64"], ["2:16", "2:32"]),
        ),
        (
            "strategy = 'ddp'\n[grid]\nnodes = [1, 2]\nglobal_batch_size = [32, 64]\n[stop]\noom = 'nodes'",
            lambda spec: f"{spec.nodes}:{spec.batch_size}",
            sets(["1:32", "2:16"], ["1:64", "2:32"]),
        ),
        (
            "strategy = 'ddp'\n[[zip]]\nbatch_size = [8, 16]\nlearning_rate = [0.1, 0.2]\n[stop]\noom = 'batch_size'",
            lambda spec: f"{spec.batch_size}:{spec.learning_rate}",
            sets(["8:0.1", "16:0.2"]),
        ),
        (
            "strategy = 'ddp'\n[grid]\nbatch_size = [8, 16]\n[derive]\nsteps = 'batch_size * 2'\n[stop]\noom = 'batch_size'",
            lambda spec: f"{spec.batch_size}:{spec.steps}",
            sets(["8:16", "16:32"]),
        ),
        (
            "batch_size = 8\n[grid]\nstrategy = ['single', 'ddp']\noptions = { bucket_cap_mb = [1.0, 25.0] }\n[stop]\ntimeout = 'options.bucket_cap_mb'",
            lambda spec: f"{spec.strategy}:{spec.options}",
            sets(["ddp:{'bucket_cap_mb': 1.0}", "ddp:{}"]),
        ),
        (
            "strategy = 'ddp'\nbatch_size = 8\n[grid]\nsteps = [3]\n[[include]]\nsteps = 4\n[[include]]\nsteps = 5\nnodes = 2\n[stop]\nfailed = 'steps'",
            lambda spec: f"{spec.nodes}:{spec.steps}",
            sets(["1:3", "1:4"]),
        ),
    ],
)
def test_stop_rules_group_runs_by_their_other_parameters(
    planned: Planned, text: str, label: Label, expected: set[frozenset[str]]
) -> None:
    assert grouped(planned(text), label) == expected


def test_defaults_are_values_too(planned: Planned) -> None:
    plan = planned(
        "strategy = 'ddp'\nbatch_size = 8\n[grid]\ninput_size = [32, 224]\noptions = { bucket_cap_mb = [1.0, 25.0] }\n"
        "[[include]]\nbatch_size = 8\n[stop]\noom = ['input_size', 'options.bucket_cap_mb']"
    )
    (group,) = plan.stops.groups
    assert sorted(values for _, values in group.runs) == [[32, 1], [32, 25], [224, 1], [224, 25], [224, 25]]


PLANE = """strategy = "ddp"
[grid]
batch_size = [8, 16, 32]
steps = [10, 20]
[stop]
oom = "batch_size"
timeout = ["batch_size", "steps"]
"""


@pytest.mark.parametrize(
    ("ended", "stopped"),
    [
        ({}, []),
        ({(8, 10): "ok", (16, 10): "failed"}, []),
        ({(8, 10): "oom"}, [(16, 10), (32, 10)]),
        ({(16, 10): "oom", (8, 20): "oom"}, [(16, 20), (32, 10), (32, 20)]),
        ({(8, 20): "timeout"}, [(16, 20), (32, 20)]),
        ({(8, 20): "timeout", (16, 10): "timeout", (32, 20): "skipped"}, [(16, 20), (32, 10)]),
    ],
)
def test_submit_and_the_start_of_a_run_stop_the_same_runs(
    planned: Planned, ended: dict[tuple[int, int], str], stopped: list[tuple[int, int]]
) -> None:
    plan = planned(PLANE)
    places = {key: (spec.batch_size, spec.steps) for key, spec in plan.runs.items()}
    statuses = {key: ended[place] for key, place in places.items() if place in ended}
    found = stopped_runs(plan.stops, statuses)
    assert sorted(places[key] for key in found) == stopped
    at_start = [
        key
        for key in plan.runs
        if key not in statuses
        and any(find_stop_reason(plan.stops.groups[line], key, statuses.get) for line in plan.stops.of_run[key])
    ]
    assert sorted(at_start) == sorted(found)


def test_the_worker_reads_the_groups_that_submit_wrote(planned: Planned, cluster_tree: ClusterTree) -> None:
    plan = planned(PLANE)
    path = cluster_tree.root / "stop.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(plan.stops.lines())
    assert [read_stop_group(path, line) for line in range(len(plan.stops.groups))] == plan.stops.groups
    for key, lines in plan.stops.of_run.items():
        assert all(key in dict(plan.stops.groups[line].runs) for line in lines)
    assert stop_groups(plan.sweep, {}).lines() == b""


def test_submit_leaves_out_what_a_smaller_run_has_stopped(
    write_sweep: Callable[[str], Sweep], slurm_profile: ClusterProfile, cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    """Two node counts, two batch sizes: the smaller batch on one node did not fit."""
    sweep = write_sweep(SWEEP + '[stop]\noom = "batch_size"\n')
    plan = make_plan(sweep, slurm_profile, cluster_tree)
    small = next(key for key, spec in plan.runs.items() if (spec.nodes, spec.batch_size) == (1, 8))
    large = next(key for key, spec in plan.runs.items() if (spec.nodes, spec.batch_size) == (1, 16))
    spec = plan.runs[small]
    assert cluster_tree.write_result(
        RunResult(
            run_id=small, config_id=config_id(spec), attempt=1, sweep="small", cluster="test", status="oom", spec=spec
        )
    )
    submitted = submit(make_plan(sweep, slurm_profile, cluster_tree), cluster_tree)
    assert {plan.runs[key].nodes for key in submitted.run_ids} == {2}
    assert submitted.folder is not None
    assert (submitted.folder / "stop.jsonl").exists()
    _, task = read_task(submitted.folder / "0.jsonl", 0)
    assert len(task.stop_groups) == 1
    result = cluster_tree.read_result(large)
    assert result is not None
    assert (result.status, result.attempt, result.ended_at_s is None) == ("skipped", 0, False)
    assert result.error is not None
    assert small in result.error.message
    again = submit(
        make_plan(sweep, slurm_profile, cluster_tree),
        cluster_tree,
        RunSelection(frozenset({"skipped"}), only_again=True),
    )
    assert again.run_ids == [large]
    assert again.folder is not None
    assert read_task(again.folder / "0.jsonl", 0)[1].stop_groups == []
    assert not (again.folder / "stop.jsonl").exists()
