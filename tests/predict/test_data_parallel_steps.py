"""Properties of every strategy's step on a nominal machine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel, StepBreakdown
from hpcbench.predict.machine import nominal_machine
from hpcbench.predict.placement import place_group
from hpcbench.predict.prediction import peak_rank_memory, predict
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.predict.tensor_sizes import parameter_bytes
from hpcbench.strategies.gradient_buckets import MIB
from tests.layer_tables import table_of

REPLICAS = ("ddp", "zero1", "fsdp", "fairscale_oss", "fairscale_sddp", "fairscale_fsdp", "horovod")
PROFILE, _ = load_cluster("slurmbox")


TABLE = table_of()
GRADIENTS = sum(parameter_bytes(RunSpec(model="resnet18", dataset="cifar10", strategy="single", batch_size=8), TABLE))


def spec_of(strategy: str, dp_degree: int, **more: Any) -> RunSpec:
    return RunSpec(
        model="resnet18", dataset="cifar10", strategy=strategy, batch_size=8, nodes=dp_degree, dp_degree=dp_degree,
        **more,
    )  # fmt: skip


def step(spec: RunSpec) -> StepBreakdown:
    found: StepBreakdown = resolve_cost(spec.strategy).step(spec, TABLE, CostModel(nominal_machine(PROFILE), spec))
    return found


@pytest.mark.parametrize("strategy", REPLICAS)
def test_one_replica_takes_the_time_of_one_device(strategy: str) -> None:
    alone = step(spec_of("single", 1))
    # Flat parameters are fewer tensors to update.
    assert step(spec_of(strategy, 1)).step_time_s == pytest.approx(alone.step_time_s, rel=1e-3)
    assert step(spec_of(strategy, 1)).comm_s == 0


@pytest.mark.parametrize("strategy", REPLICAS)
def test_a_data_parallel_step_is_the_sum_of_its_parts(strategy: str) -> None:
    one = step(spec_of(strategy, 4))
    parts = one.compute_s + one.exposed_comm_s + one.bubble_s + one.straggler_s
    assert one.step_time_s == pytest.approx(parts)
    assert 0 < one.exposed_comm_s <= one.comm_s * (1 + 1e-9)
    assert 0 < one.latency_s <= one.exposed_comm_s


@pytest.mark.parametrize("strategy", REPLICAS)
def test_every_call_of_data_parallel_traffic_is_priced(strategy: str) -> None:
    spec = spec_of(strategy, 4)
    # NCCL has one call under way at a time, so that the time of all is their sum.
    clock = CostModel(msgspec.structs.replace(nominal_machine(PROFILE), device="cuda"), spec)
    priced = all_calls_s(spec, clock)
    found = resolve_cost(strategy).step(spec, TABLE, clock)
    assert found.comm_s == pytest.approx(priced, rel=0.2 if strategy == "horovod" else 1e-9)


def all_calls_s(spec: RunSpec, clock: CostModel) -> float:
    traffic = resolve_cost(spec.strategy).traffic(spec, TABLE, 0)
    return sum(call.seconds for one in traffic for call in clock.calls(one, place_group(spec, "dp")))


def test_a_prediction_names_its_depth_and_its_bounds() -> None:
    found = predict(spec_of("ddp", 4), TABLE, nominal_machine(PROFILE))
    assert found.depth == "nominal"
    assert found.interval.low < found.step_time_s < found.interval.high
    assert found.bound_by == "compute"
    assert found.fits
    assert found.samples_per_s == pytest.approx(32 / found.step_time_s)


@pytest.mark.parametrize(("threshold_mb", "untouched"), [(64.0, 64 * MIB - GRADIENTS), (16.0, 0)])
def test_unfilled_bytes_of_a_fusion_buffer_count_on_accelerators_only(threshold_mb: float, untouched: int) -> None:
    spec = spec_of("horovod", 2, options={"fusion_threshold_mb": threshold_mb})
    held, on_a_cpu = peak_rank_memory(spec, TABLE, "cuda"), peak_rank_memory(spec, TABLE, "cpu")
    assert held.total_bytes - (on_a_cpu.total_bytes - on_a_cpu.processor_bytes) == untouched
    assert held.communication_bytes + held.untouched_bytes == threshold_mb * MIB
