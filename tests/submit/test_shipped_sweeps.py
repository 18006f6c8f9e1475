"""The papers' matrices: what they hold on the clusters that they are for, and that nothing is dropped but by a rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.plan import SweepPlan, make_plan

SWEEPS = Path(__file__).resolve().parents[2] / "sweeps"
DDLBENCH_MODELS = {"resnet18", "resnet50", "resnet152", "vgg11", "vgg16", "mobilenetv2"}
DDLBENCH_DATA = {"mnist", "cifar10", "imagenet", "highres"}
DDLBENCH_SYSTEMS = {"single", "horovod", "ddp", "model", "gpipe", "fairscale_pipe", "pipedream", "1f1b"}
PARADL_MODELS = {"resnet50", "resnet152", "vgg16", "cosmoflow"}


def plan_of(sweep: str, cluster: str, tmp_path: Path) -> SweepPlan:
    return make_plan(load_sweep(SWEEPS / f"{sweep}.toml"), load_cluster(cluster)[0], ClusterTree(tmp_path))


def specs_of(plan: SweepPlan) -> list[RunSpec]:
    return list(plan.runs.values())


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_sweep_is_named_as_its_file(path: Path) -> None:
    sweep = load_sweep(path)
    assert sweep.name == path.stem
    assert sweep.description


@pytest.mark.parametrize(("sweep", "cluster"), [("ddlbench", "snellius"), ("ddlbench-small", "slurmbox")])
def test_ddlbench_has_every_system_model_and_data_set(sweep: str, cluster: str, tmp_path: Path) -> None:
    specs = specs_of(plan_of(sweep, cluster, tmp_path))
    cells = {(spec.strategy, spec.model, spec.dataset) for spec in specs}
    assert len(cells) == len(DDLBENCH_SYSTEMS) * len(DDLBENCH_MODELS) * len(DDLBENCH_DATA)
    assert {cell[0] for cell in cells} == DDLBENCH_SYSTEMS
    assert {cell[1] for cell in cells} == DDLBENCH_MODELS
    assert {cell[2] for cell in cells} == DDLBENCH_DATA


def test_ddlbench_covers_one_to_sixteen_devices(tmp_path: Path) -> None:
    plan = plan_of("ddlbench", "snellius", tmp_path)
    devices = {
        system: sorted({one.devices for one in specs_of(plan) if one.strategy == system}) for system in DDLBENCH_SYSTEMS
    }
    assert devices == {
        **{system: [2, 4, 8, 16] for system in DDLBENCH_SYSTEMS}, "single": [1], "fairscale_pipe": [4],
    }  # fmt: skip
    rules = {one.reason.partition(" (")[0] for one in plan.dropped}
    # Networks of fewer blocks than stages.
    assert {rule for rule in rules if not rule.startswith("[[exclude]]")} == {
        f"{strategy} on 16 stages, but {model} on {dataset} has {blocks} blocks: each needs one"
        for strategy in ("model", "gpipe", "pipedream", "1f1b")
        for model, dataset, blocks in (
            *(("resnet18", dataset, 10) for dataset in DDLBENCH_DATA),
            ("vgg11", "mnist", 13),
            ("vgg11", "cifar10", 14),
        )
    }


def test_the_paradl_sweep_has_its_strategies_and_devices(tmp_path: Path) -> None:
    plan = plan_of("paradl", "abci-v100", tmp_path)
    specs = specs_of(plan)
    assert {one.model for one in specs} == PARADL_MODELS
    shapes = Counter((one.strategy, one.dp_degree > 1) for one in specs if one.model == "resnet50")
    assert set(shapes) == {
        ("single", False), ("ddp", True), ("spatial", False), ("filter", False), ("channel", False), ("gpipe", False),
        ("filter", True), ("spatial", True),
    }  # fmt: skip
    scales = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert sorted({one.devices for one in specs if one.strategy == "ddp"}) == scales
    hybrids = [one for one in specs if one.dp_degree > 1 and one.strategy != "ddp"]
    assert sorted({one.devices for one in hybrids}) == scales[1:]
    assert {one.tp_degree * one.sp_degree for one in hybrids} == {4}
    # Weak scaling: what a device computes stays.
    assert {one.batch_size for one in specs if one.strategy == "ddp" and one.model == "resnet50"} == {32}


def test_paradl_small_has_every_strategy_of_the_large_one(tmp_path: Path) -> None:
    small, large = (
        {(one.strategy, one.dp_degree > 1, one.model) for one in specs_of(plan_of(*names, tmp_path))}
        for names in (("paradl-small", "slurmbox"), ("paradl", "abci-v100"))
    )
    assert small == large
