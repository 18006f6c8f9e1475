"""Steps of strategies whose ranks share layers: what is passed, and what they are made of."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.collective_formulas import HockneyLink
from hpcbench.predict.cost_model import CostModel, StepBreakdown
from hpcbench.predict.machine import Machine, nominal_machine
from hpcbench.predict.placement import halo_placement, place_group
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.channel.cost import FilterCost
from hpcbench.strategies.layer_table import LayerTable, TensorShape, read_shipped_table
from hpcbench.strategies.spatial.cost import SpatialCost
from hpcbench.strategies.spatial.spatial_split import spatial_grid
from tests.layer_tables import layer
from tests.predict.heard import heard

MACHINE = nominal_machine(load_cluster("slurmbox")[0])
BATCH = 8

SHARED = [
    *(("vgg11-digits", one, {"form": form}) for one in ("filter", "channel") for form in ("sharded", "gathered")),
    ("gpt-tokens", "tensor", {}),
    ("gpt-tokens", "tensor", {"sequence_parallel": True}),
    ("gpt-tokens", "tensor", {"sequence_parallel": True, "vocabulary_parallel": False}),
    ("vit-digits", "tensor", {}),
    ("vit-digits", "tensor", {"sequence_parallel": True}),
    ("resnet18-cifar10", "spatial", {}),
    ("resnet18-cifar10", "spatial", {"overlap": False, "batch_norm": "local", "global_pool": "gather"}),
    ("vgg11-cifar10", "spatial", {"grid": "1xN"}),
    ("cosmoflow-cosmoflow", "spatial", {}),
]
"""Table, strategy and options."""
VARIANTS: list[dict[str, Any]] = [
    {},
    {"micro_batches": 4},
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "micro_batches": 2, "precision": "bf16"},
    {"precision": "fp64"},
]


def table_of(name: str) -> LayerTable:
    model, dataset = name.split("-")
    found = read_shipped_table(model, dataset)
    assert found is not None
    return found


def spec_of(table: str, strategy: str, options: dict[str, Any], degree: int, dp: int = 1, **more: Any) -> RunSpec:
    model, dataset = table.split("-")
    own = {"sp_degree" if strategy == "spatial" else "tp_degree": degree}
    given_ = {"batch_size": BATCH, "tasks_per_node": degree, "nodes": dp, "dp_degree": dp, **own, **more}
    # Of however many ranks.
    own_options = {
        name: value.replace("N", str(degree)) if name == "grid" else value for name, value in options.items()
    }
    return RunSpec(model=model, dataset=dataset, strategy=strategy, options=own_options, **given_)


def step(spec: RunSpec, machine: Machine = MACHINE) -> StepBreakdown:
    table = table_of(f"{spec.model}-{spec.dataset}")
    found: StepBreakdown = resolve_cost(spec.strategy).step(spec, table, CostModel(machine, spec))
    return found


def single(table: str, **more: Any) -> StepBreakdown:
    return step(spec_of(table, "single", {}, 1, **more))


@pytest.mark.parametrize("more", VARIANTS)
@pytest.mark.parametrize(("degree", "dp"), [(2, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize(("table", "strategy", "options"), SHARED)
def test_priced_calls_of_shared_layers_are_their_traffic(
    table: str, strategy: str, options: dict[str, Any], degree: int, dp: int, more: dict[str, Any]
) -> None:
    spec = spec_of(table, strategy, options, degree, dp, **more)
    rank = halo_placement(spatial_grid(spec), place_group(spec, "sp")).place if strategy == "spatial" else 0
    assert heard(spec, table_of(table), MACHINE) == resolve_cost(strategy).traffic(spec, table_of(table), rank)


@pytest.mark.parametrize("more", VARIANTS)
@pytest.mark.parametrize(("table", "strategy", "options"), SHARED)
def test_a_degree_of_one_costs_what_one_device_costs(
    table: str, strategy: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    alone = single(table, **more)
    assert step(spec_of(table, strategy, options, 1, **more)) == pytest.approx(alone)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("table", "strategy", "options"), SHARED)
def test_a_shared_layer_step_is_the_sum_of_its_parts(
    table: str, strategy: str, options: dict[str, Any], dp: int
) -> None:
    one = step(spec_of(table, strategy, options, 2, dp))
    assert one.step_time_s == pytest.approx(one.compute_s + one.exposed_comm_s + one.bubble_s + one.straggler_s)
    assert 0 < one.exposed_comm_s <= one.comm_s * (1 + 1e-9)
    assert 0 < one.latency_s <= one.exposed_comm_s


def chain(*channels: int) -> LayerTable:
    """3 x 3 convolutions of 4 x 4 positions, and a loss."""
    window = {"groups": 1, "kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1]}
    layers = [
        layer(
            str(number), number, "Conv2d", input_shape=[ins, 4, 4], output_shape=[outs, 4, 4],
            parameters=9 * ins * outs, forward_flops=10_000, backward_flops=20_000 if number else 10_000,
            activation_bytes=1, output_bytes=64 * outs, forward_moved_bytes=1, backward_moved_bytes=1,
            attributes={"in_channels": ins, "out_channels": outs, **window},
        )
        for number, (ins, outs) in enumerate(pairwise(channels))
    ]  # fmt: skip
    loss = replace(layers[-1], name="loss", block=len(layers), kind="Loss", parameters=0, attributes={})
    tensors = [TensorShape(f"{one.name}.weight", [one.parameters]) for one in layers]
    return LayerTable(
        model="chain", dataset="digits", input_size=4, blocks=len(layers), parameter_tensors=tensors, buffers=[],
        layers=[*layers, loss],
    )  # fmt: skip


def test_gathered_filter_communicates_as_paradl_states() -> None:
    channels, positions, ranks, samples, latency_s, beta = [4, 8, 16, 8, 4], 16, 4, 8, 1e-6, 1e-9
    spec = RunSpec(
        model="chain", dataset="digits", strategy="filter", batch_size=samples, tasks_per_node=ranks, tp_degree=ranks,
        options={"form": "gathered"},
    )  # fmt: skip
    machine = replace(MACHINE, comm=replace(MACHINE.comm, intra_node=HockneyLink(latency_s, beta)))
    outputs = [positions * each for each in channels[1:-1]]
    paradl = 3 * (ranks - 1) * sum(latency_s + samples * one * 4 * beta / ranks for one in outputs)
    of_the_last_input = 2 * (ranks - 1) * (latency_s + samples * outputs[-1] * 4 * beta / ranks)
    found = FilterCost().step(spec, chain(*channels), CostModel(machine, spec))
    assert found.comm_s == pytest.approx(paradl - of_the_last_input)
    assert found.comm_s == pytest.approx(51.72e-6)


@pytest.mark.parametrize("overlap", [True, False])
def test_spatial_passes_halos_together(overlap: bool) -> None:
    spec = RunSpec(
        model="chain", dataset="digits", strategy="spatial", batch_size=2, nodes=4, sp_degree=4,
        options={"overlap": overlap},
    )  # fmt: skip
    # So little latency that rings are faster than trees.
    latency_s, beta = 1e-7, 1e-9
    machine = replace(MACHINE, comm=replace(MACHINE.comm, inter_node=HockneyLink(latency_s, beta)))
    # Of 4 channels a row of 4 positions to either side; three layers forward, two backward; the whole, and gradients.
    exchange = latency_s + 2 * (2 * 4 * 4 * 4) * beta
    gather = 3 * (latency_s + 2 * 4 * 4 * 4 * beta)
    gradients = 6 * (latency_s + 3 * 9 * 16 * 4 / 4 * beta)
    found = SpatialCost().step(spec, chain(4, 4, 4, 4), CostModel(machine, spec))
    assert found.comm_s == pytest.approx(5 * exchange + gather + gradients)
    assert found.comm_s == pytest.approx(5.656e-6)
    # With a row a rank no output can do without its halo, but the weights' gradients can.
    assert found.exposed_comm_s < found.comm_s if overlap else found.exposed_comm_s == pytest.approx(found.comm_s)
