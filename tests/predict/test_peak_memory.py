"""The terms of a rank's memory, one by one; ``tests/distributed/test_live_memory.py`` and ``test_dry_run.py`` compare their sums."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.machine import nominal_machine
from hpcbench.predict.peak_memory import MemoryBreakdown
from hpcbench.predict.prediction import MemoryFit, predict
from hpcbench.predict.row_cost import unsharded_rows
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.predict.tensor_sizes import held_sample_bytes
from tests.layer_tables import table_of_run

VOLUME = 4 * 128**3 * 4
"""Bytes of a sample of CosmoFlow."""


def memory_of(spec: RunSpec, rank: int = 0) -> MemoryBreakdown:
    return resolve_cost(spec.strategy).memory(spec, table_of_run(spec), rank)


def volumes(strategy: str = "single", **more: Any) -> RunSpec:
    return RunSpec(**{"model": "cosmoflow", "dataset": "cosmoflow", "strategy": strategy, "batch_size": 8, **more})


def pipeline(strategy: str, model: str = "resnet18", dataset: str = "cifar10", **more: Any) -> RunSpec:
    values = {"batch_size": 8, "micro_batches": 4, "pp_degree": 4, "dp_degree": 2, "tasks_per_node": 8, **more}
    return RunSpec(model=model, dataset=dataset, strategy=strategy, **values)


@pytest.mark.parametrize(
    ("dataset", "model", "data", "expected"),
    [
        ("cosmoflow", "cosmoflow", "device", 2 * 8 * (VOLUME + 4 * 4)),
        ("cosmoflow", "cosmoflow", "host", 8 * (VOLUME + 4 * 4)),
        ("cosmoflow_512", "cosmoflow", "device", 8 * (64 * VOLUME + 4 * 4)),
        ("digits", "vit", "device", (1500 + 297 + 8) * (64 * 4 + 8)),
        ("cifar10", "vit", "real", (60_000 + 8) * (3 * 32 * 32 * 4 + 8)),
        ("cifar10", "vit", "device", 2 * 8 * (3 * 32 * 32 * 4 + 8)),
        ("tokens", "gpt", "device", 2 * 8 * (128 * 8 + 128 * 8)),
    ],
)
def test_samples_are_held_as_the_feed_holds_them(dataset: str, model: str, data: Any, expected: int) -> None:
    spec = RunSpec(model=model, dataset=dataset, strategy="single", batch_size=8, data=data)
    assert held_sample_bytes(spec, table_of_run(spec)) == memory_of(spec).samples_bytes == expected


def test_fp64_convolutions_hold_no_weights_in_the_layout_of_the_library() -> None:
    table = table_of_run(volumes())
    narrow, wide = (unsharded_rows(volumes(precision=precision), table) for precision in ("fp32", "fp64"))
    for layer, single, double in zip(table.layers, narrow, wide, strict=True):
        copies = 4 * layer.parameters * 4 if layer.kind == "Conv3d" else 0
        assert double.working_bytes == 2 * (single.working_bytes - copies), layer.name


def test_samples_of_the_host_are_on_the_first_and_the_last_stage() -> None:
    spec = pipeline("1f1b", "cosmoflow", "cosmoflow", data="host", dp_degree=1, tasks_per_node=4)
    held = [memory_of(spec, rank).samples_bytes for rank in range(4)]
    assert [size > 0 for size in held] == [True, False, False, True]


@pytest.mark.parametrize(("cluster", "workspace_bytes"), [("h100-80gb-ib", 32 * 2**20), ("a100-80gb-ib", 8_519_680)])
def test_a_peak_on_a_gpu_has_workspaces_and_its_limit_no_context(cluster: str, workspace_bytes: int) -> None:
    """torch's allocator, whose peak is measured, gives workspaces to two cuBLAS handles and knows no context."""
    profile, _ = load_cluster(cluster)
    spec = RunSpec(model="resnet18", dataset="cifar10", strategy="single", batch_size=64)
    found = predict(spec, table_of_run(spec), nominal_machine(profile))
    assert found.peak_memory_bytes == memory_of(spec).on("cuda").total_bytes + 2 * workspace_bytes
    assert found.memory_limit_bytes == 80e9 - 600 * 2**20


@pytest.mark.parametrize("room_bytes", [-1, 0])
def test_a_run_fits_beside_the_context_of_its_process(room_bytes: int) -> None:
    profile, _ = load_cluster("h100-80gb-ib")
    spec = RunSpec(model="resnet18", dataset="cifar10", strategy="single", batch_size=64)
    needed = predict(spec, table_of_run(spec), nominal_machine(profile)).peak_memory_bytes + 600 * 2**20
    device = profile.devices["h100"].model_copy(update={"memory_bytes": needed + room_bytes})
    small = profile.model_copy(update={"devices": {"h100": device}})
    assert predict(spec, table_of_run(spec), nominal_machine(small)).fits is (room_bytes == 0)
    assert memory_fit(small, spec).is_enough is (room_bytes == 0)


def memory_fit(profile: ClusterProfile, spec: RunSpec) -> MemoryFit:
    fit = Forecast(profile).memory_fit(spec)
    assert isinstance(fit, MemoryFit)
    return fit
