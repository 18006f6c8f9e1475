from __future__ import annotations

import re
import socket
from collections.abc import Callable

import msgspec
import pytest

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.profile_tables import PartitionConfig
from hpcbench.config.run_spec import config_id
from hpcbench.config.sweep_loader import Sweep
from hpcbench.errors import ConfigError, ConfigErrors
from hpcbench.render.job_script import sbatch_directives
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RunResult
from hpcbench.submit.plan import SweepPlan, make_plan, partition_limits

Write = Callable[[str], Sweep]

BASE = """name = "s"
[fixed]
model = "resnet18"
dataset = "imagenet"
strategy = "ddp"
"""


def finish(tree: ClusterTree, plan: SweepPlan, run_id: str, status: str) -> None:
    spec = plan.runs[run_id]
    result = RunResult(
        run_id=run_id, config_id=config_id(spec), attempt=1, sweep="s", cluster="test", status=status, spec=spec
    )
    assert tree.write_result(result)


@pytest.mark.parametrize("runs", [4, 400])
def test_results_are_found_in_small_and_large_sweeps(
    write_sweep: Write, slurm_profile: ClusterProfile, cluster_tree: ClusterTree, runs: int
) -> None:
    sweep = write_sweep(f"{BASE}batch_size = 8\n[grid]\nseed = {list(range(runs))}\n")
    plan = make_plan(sweep, slurm_profile, cluster_tree)
    keys = list(plan.runs)
    for key, status in zip(keys, ("ok", "timeout", "failed"), strict=False):
        finish(cluster_tree, plan, key, status)
    (cluster_tree.run_folder(keys[3]) / "attempts").mkdir(parents=True)
    again = make_plan(sweep, slurm_profile, cluster_tree)
    assert again.finished == {keys[0]: "ok", keys[1]: "timeout"}
    assert list(again.missing) == keys[2:]


def test_runs_of_equal_scripts_form_one_group(
    write_sweep: Write, slurm_profile: ClusterProfile, cluster_tree: ClusterTree
) -> None:
    sweep = write_sweep(
        f"{BASE}batch_size = 8\n[grid]\nseed = [0, 1]\nnodes = [1, 2]\ntasks_per_node = [1, 2]\n[derive]\ntime_limit_min = '30 * nodes'\n"
    )
    plan = make_plan(sweep, slurm_profile, cluster_tree)
    groups = plan.groups(plan.missing)
    assert {(one.nodes, one.tasks_per_node, one.time_limit_s): len(keys) for one, keys in groups.items()} == {
        (nodes, tasks, 1800.0 * nodes): 2 for nodes in (1, 2) for tasks in (1, 2)
    }
    assert plan.node_hours(plan.missing) == pytest.approx(2 * 2 * (1 * 0.5 + 2 * 1.0))


def test_stopped_runs_are_not_missing(
    write_sweep: Write, slurm_profile: ClusterProfile, cluster_tree: ClusterTree
) -> None:
    sweep = write_sweep(f'{BASE}[grid]\nbatch_size = [8, 16, 32]\nsteps = [10, 20]\n[stop]\noom = "batch_size"\n')
    plan = make_plan(sweep, slurm_profile, cluster_tree)
    keys = list(plan.runs)
    assert list(plan.missing) == keys
    finish(cluster_tree, plan, keys[2], "oom")
    again = make_plan(sweep, slurm_profile, cluster_tree)
    assert again.stopped == {keys[4]: f"run {keys[2]} with batch_size 16 ended as oom"}
    assert list(again.missing) == [keys[0], keys[1], keys[3], keys[5]]


def test_runs_on_more_nodes_than_their_partition_has_are_named(
    write_sweep: Write, slurm_profile: ClusterProfile, cluster_tree: ClusterTree
) -> None:
    """A warning, not an infeasible point: a partition grows, and what the profile states may be old."""
    partitions = {"small": PartitionConfig(nodes=2), "large": PartitionConfig(nodes=8), "any": PartitionConfig()}
    profile = slurm_profile.model_copy(update={"partitions": partitions, "default_partition": "small"})
    sweep = write_sweep(
        f"{BASE}batch_size = 8\n[grid]\nseed = [0, 1]\nnodes = [2, 4]\npartition = ['small', 'large', 'any']\n"
    )
    plan = make_plan(sweep, profile, cluster_tree)
    assert len(plan.runs) == 12
    (warning,) = plan.node_warnings()
    assert warning.startswith("2 runs on 4 nodes, but small has 2: ")


def test_ranks_that_share_devices_have_room_on_a_node() -> None:
    local, _ = load_cluster("local")
    node = local.node.model_copy(update={"devices": 2, "ranks_per_device": 3})
    profile = local.model_copy(update={"device": "cuda", "node": node})
    assert partition_limits(profile, None).devices_per_node == 6
    assert partition_limits(profile.model_copy(update={"device": "cpu"}), None).devices_per_node is None


def test_each_node_of_this_machine_is_its_host(write_sweep: Write, cluster_tree: ClusterTree) -> None:
    local, _ = load_cluster("local")
    plan = make_plan(write_sweep(f'{BASE}batch_size = 8\n[grid]\nnode = "each"\nseed = [0, 1]\n'), local, cluster_tree)
    assert [spec.node for spec in plan.runs.values()] == [socket.gethostname()] * 2
    with pytest.raises(ConfigError, match="infeasible") as caught:
        make_plan(write_sweep(f'{BASE}batch_size = 8\nnode = "elsewhere"\n'), local, cluster_tree)
    assert f"node elsewhere, but local is this machine, {socket.gethostname()}" in str(caught.value)


def test_a_node_is_part_of_the_run_and_of_its_script(
    write_sweep: Write, slurm_profile: ClusterProfile, cluster_tree: ClusterTree
) -> None:
    text = f'{BASE}batch_size = 8\n[grid]\nnode = ["n1", "n2"]\nnodes = [1, 2]\n'
    plan = make_plan(write_sweep(text), slurm_profile, cluster_tree)
    assert [point.reason for point in plan.dropped] == [
        f"node {name} is for runs of one node, and nodes is 2" for name in ("n1", "n2")
    ]
    shapes = [plan.shape(spec) for spec in plan.runs.values()]
    assert [dict(sbatch_directives(shape, "job", "/f", 0))["nodelist"] for shape in shapes] == ["n1", "n2"]
    unpinned = plan.shape(msgspec.structs.replace(next(iter(plan.runs.values())), node=None))
    assert "nodelist" not in dict(sbatch_directives(unpinned, "job", "/f", 0))


def test_each_node_is_of_one_partition_and_of_a_scheduler_that_lists_nodes(
    write_sweep: Write, slurm_profile: ClusterProfile, cluster_tree: ClusterTree
) -> None:
    partitions = {"small": PartitionConfig(), "large": PartitionConfig()}
    profile = slurm_profile.model_copy(update={"partitions": partitions, "default_partition": "small"})
    text = f'{BASE}batch_size = 8\n[grid]\nnode = "each"\npartition = ["small", "large"]\n'
    with pytest.raises(ConfigError, match='node = "each" is of one partition, not of small, large'):
        make_plan(write_sweep(text), profile, cluster_tree)
    pbs = slurm_profile.model_copy(update={"scheduler": slurm_profile.scheduler.model_copy(update={"kind": "pbs"})})
    with pytest.raises(ConfigError, match="is run by PBS") as caught:
        make_plan(write_sweep(f'{BASE}batch_size = 8\n[grid]\nnode = "each"\n'), pbs, cluster_tree)
    assert re.search(r"sweep.toml:\d+$", caught.value.where or "")


def test_a_sweep_of_millions_of_points_is_refused_before_it_is_expanded(write_sweep: Write) -> None:
    with pytest.raises(
        ConfigErrors, match="3,000,000 points, at most 1,000,000: seed 3000 x batch_size 500 x repeats 2"
    ):
        write_sweep(
            f"{BASE}[grid]\nseed = {list(range(3000))}\nbatch_size = {list(range(1, 501))}\n".replace(
                'name = "s"', 'name = "s"\nrepeats = 2'
            )
        )


def test_the_progress_of_a_large_sweep_is_announced(
    write_sweep: Write, slurm_profile: ClusterProfile, cluster_tree: ClusterTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcbench.submit.plan._POINTS_PER_MESSAGE", 1000)
    lines: list[str] = []
    sweep = write_sweep(f"{BASE}batch_size = 8\n[grid]\nseed = {list(range(2500))}\n")
    make_plan(sweep, slurm_profile, cluster_tree, None, lines.append)
    assert lines == ["sweep s: 1,000 of 2,500 points expanded", "sweep s: 2,000 of 2,500 points expanded"]
