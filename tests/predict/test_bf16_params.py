"""Predictions of ``precision = "bf16_params"`` beside those of fp32 and bf16, where the numbers follow from the definition."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel
from hpcbench.predict.machine import nominal_machine
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.layer_table import LayerTable, read_shipped_table
from hpcbench.strategies.resolve import PartitionLimits, resolve_point
from hpcbench.strategies.traffic import total_payload_bytes


def resolved(strategy: str, precision: str, **more: Any) -> tuple[RunSpec, LayerTable]:
    point = {
        "model": "gpt_13b", "dataset": "tokens", "strategy": strategy, "precision": precision, "batch_size": 8,
        "optimizer": "adamw", **more,
    }  # fmt: skip
    spec = resolve_point(point, PartitionLimits("any"))
    assert isinstance(spec, RunSpec), spec
    table = read_shipped_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
    assert table is not None
    return spec, table


def test_adam_keeps_sixteen_bytes_a_parameter() -> None:
    """2 of the parameter, 2 of its gradient, and 12 in fp32 (ZeRO's K = 12); an update adds what a part of it needs."""
    spec, table = resolved("single", "bf16_params")
    count = sum(row.parameters for row in table.layers)
    memory = resolve_cost("single").memory(spec, table, 0)
    assert (memory.parameters_bytes, memory.gradients_bytes) == (2 * count, 2 * count)
    # The peak is the update's: fp32 gradients of its largest tensor, and two temporaries of Adam's.
    assert 12 * count < memory.optimizer_bytes < 12.3 * count


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "1f1b"])
def test_messages_have_half_the_bytes_of_fp32(strategy: str) -> None:
    payloads = []
    for precision in ("fp32", "bf16_params"):
        spec, table = resolved(strategy, precision, tasks_per_node=4, micro_batches=4)
        payloads.append(total_payload_bytes(resolve_cost(strategy).traffic(spec, table, 0)))
    assert payloads[0] == 2 * payloads[1] > 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_that_communicates_is_shorter_than_with_autocast(strategy: str) -> None:
    machine = nominal_machine(load_cluster("snellius")[0], None, 4)
    steps = []
    for precision in ("bf16", "bf16_params"):
        spec, table = resolved(strategy, precision, nodes=4, tasks_per_node=4)
        steps.append(resolve_cost(strategy).step(spec, table, CostModel(machine, spec)))
    autocast, ours = steps
    assert ours.exposed_comm_s < 0.6 * autocast.exposed_comm_s
    assert ours.step_time_s < autocast.step_time_s
