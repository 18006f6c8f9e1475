"""Steps of pipelines: the bubbles that their papers say, what is sent, and the speed of one device at the edges."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.collective_formulas import HockneyLink
from hpcbench.predict.cost_model import CostModel, StepBreakdown
from hpcbench.predict.machine import Machine, nominal_machine
from hpcbench.predict.placement import are_on_one_node, place_group, place_neighbour_pair
from hpcbench.predict.prediction import predict
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.layer_table import LayerTable, TensorShape
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from hpcbench.strategies.pipeline.step_cost import PipelineStep
from tests.layer_tables import table_of

SYNCHRONOUS = ("model", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
EVERY = (*SYNCHRONOUS, "pipedream")
NOMINAL = nominal_machine(load_cluster("slurmbox")[0])


def with_links(link: HockneyLink) -> Machine:
    comm = msgspec.structs.replace(NOMINAL.comm, intra_node=link, inter_node=link)
    return msgspec.structs.replace(NOMINAL, comm=comm)


FREE = with_links(HockneyLink(0.0, 0.0))
"""A machine whose messages cost nothing."""


TABLE = table_of("resnet18", "cifar10")


def equal_blocks(count: int) -> LayerTable:
    """A model of ``count`` alike convolutions, a block each, that updates nothing to speak of."""
    row = next(row for row in TABLE.layers if row.name == "3.conv1")
    rows = [msgspec.structs.replace(row, name=f"{place}.conv", block=place, parameters=0) for place in range(count)]
    tensors = [TensorShape(f"{place}.conv.weight", [0]) for place in range(count)]
    return msgspec.structs.replace(TABLE, blocks=count, layers=rows, parameter_tensors=tensors, buffers=[])


def spec_of(strategy: str, pp_degree: int, micro_batches: int = 8, **more: Any) -> RunSpec:
    ranks = pp_degree * more.get("dp_degree", 1) * more.get("tp_degree", 1)
    given = {"model": "resnet18", "dataset": "cifar10", "nodes": ranks, "batch_size": 64, **more}
    return RunSpec(strategy=strategy, pp_degree=pp_degree, micro_batches=micro_batches, **given)


def step(spec: RunSpec, table: LayerTable = TABLE, machine: Machine = NOMINAL) -> StepBreakdown:
    found: StepBreakdown = resolve_cost(spec.strategy).step(spec, table, CostModel(machine, spec))
    return found


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_a_pipeline_of_one_stage_takes_the_time_of_one_device(strategy: str) -> None:
    one, alone = step(spec_of(strategy, 1)), step(spec_of("single", 1))
    assert one.step_time_s == pytest.approx(alone.step_time_s)
    assert one.compute_s == pytest.approx(alone.compute_s)
    assert (one.comm_s, one.exposed_comm_s) == (0, 0)
    assert one.bubble_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 128)])
@pytest.mark.parametrize("strategy", ["gpipe", "1f1b", "interleaved_1f1b", "pipedream"])
def test_equal_stages_with_free_messages_have_the_papers_bubble(strategy: str, stages: int, count: int) -> None:
    """The share of one device's time with the same micro-batches: (m + p - 1) / (m p), interleaved
    (v m + p - 1) / (v m p), and without a bubble 1 / p."""
    table = equal_blocks(8)
    spec = spec_of(strategy, stages, count, batch_size=count * 4)
    one = step(spec, table, FREE)
    alone = step(spec_of("single", 1, count, batch_size=count * 4), table, FREE)
    slots = {"interleaved_1f1b": 2 * count, "pipedream": 10**9}.get(strategy, count)
    assert one.step_time_s == pytest.approx(alone.step_time_s * (slots + stages - 1) / (slots * stages), rel=1e-6)
    assert one.compute_s == pytest.approx(alone.compute_s / stages)
    assert one.bubble_s == pytest.approx(one.step_time_s - one.compute_s)
    assert one.exposed_comm_s == 0


@pytest.mark.parametrize("count", [4, 128])
def test_zero_bubble_fills_with_gradients_of_weights(count: int) -> None:
    """ZB-H1's bubble is (p - 1)(F + B - W), B being the gradient of the input (Qi et al. 2023, table 1), where the
    halves of a backward pass are as long as a forward pass."""
    stages, table = 4, equal_blocks(8)
    spec = spec_of("zero_bubble", stages, count, batch_size=count * 4)
    busy = PipelineStep(PipelineRank(spec, table, 0), CostModel(FREE, spec)).pass_times(0, 4, False)
    assert busy.weights_s == pytest.approx(busy.backward_s / 2)
    one, plain = step(spec, table, FREE), step(spec_of("1f1b", stages, count, batch_size=count * 4), table, FREE)
    assert one.compute_s == pytest.approx(plain.compute_s)
    bubble_s = (stages - 1) * (busy.forward_s + busy.backward_s - 2 * busy.weights_s)
    assert one.bubble_s == pytest.approx(bubble_s, rel=1e-6)
    assert plain.bubble_s == pytest.approx((stages - 1) * (busy.forward_s + busy.backward_s), rel=1e-6)


@pytest.mark.parametrize("strategy", EVERY)
def test_a_pipeline_step_is_the_sum_of_its_parts(strategy: str) -> None:
    one = step(spec_of(strategy, 4, dp_degree=2))
    parts = one.compute_s + one.exposed_comm_s + one.bubble_s + one.straggler_s
    assert one.step_time_s == pytest.approx(parts)
    assert 0 < one.latency_s < one.exposed_comm_s <= one.comm_s
    assert one.step_time_s > step(spec_of(strategy, 4, dp_degree=2), machine=FREE).step_time_s


PRICED = [
    spec_of("model", 4),
    spec_of("gpipe", 4, 3, dp_degree=2),
    spec_of("1f1b", 2, dp_degree=4),
    spec_of("interleaved_1f1b", 2, dp_degree=2),
    spec_of("zero_bubble", 4, dp_degree=2),
    spec_of("gpipe", 3, options={"stage_replicas": "2-1"}),
    spec_of(
        "1f1b", 2, 3, dp_degree=2, model="gpt", dataset="tokens", batch_size=8, model_options={"tied": True}
    ),
    spec_of("zero_bubble", 2, 2, tp_degree=2, model="gpt", dataset="tokens", batch_size=8),
    spec_of(
        "1f1b", 2, 4, tp_degree=2, model="gpt", dataset="tokens", batch_size=8, options={"recompute": "except_last"}
    ),
]  # fmt: skip


@pytest.mark.parametrize("spec", PRICED, ids=lambda spec: f"{spec.strategy}-{spec.model}")
def test_every_call_of_a_pipelines_traffic_is_priced(spec: RunSpec) -> None:
    table = TABLE if spec.model == "resnet18" else tied(table_of("gpt", "tokens"), spec)
    clock = CostModel(NOMINAL, spec)
    pipeline = PipelineStep(PipelineRank(spec, table, 0), clock)
    for place in range(spec.pp_degree):
        traffic = resolve_cost(spec.strategy).traffic(spec, table, place * spec.tp_degree)
        groups = {
            "send": place_neighbour_pair(spec, "pp"),
            "all_reduce": place_group(spec, "tp") if spec.tp_degree > 1 else pipeline.replicas(place),
        }
        priced = sum(call.seconds for one in traffic for call in clock.calls(one, groups[one.operation]))
        assert pipeline.rank_times(place).comm_s == pytest.approx(priced)


def tied(table: LayerTable, spec: RunSpec) -> LayerTable:
    """The table of a model whose output layer has the embedding's weight, where ``spec`` asks for that."""
    if not spec.model_options.get("tied"):
        return table
    output = table.layers[-2]
    assert output.name.endswith("output")
    rows = [*table.layers[:-2], msgspec.structs.replace(output, parameters=0), table.layers[-1]]
    tensors = [one for one in table.parameter_tensors if one.name != f"{output.name}.weight"]
    return msgspec.structs.replace(table, layers=rows, parameter_tensors=tensors)


@pytest.mark.parametrize("versions", ["stash", "2bw"])
def test_every_call_of_pipedream_is_priced(versions: str) -> None:
    spec = spec_of("pipedream", 2, 4, dp_degree=2, options={"weight_versions": versions, "cuts": "7"})
    clock, cost = CostModel(with_links(HockneyLink(0.0, 1e-12)), spec), resolve_cost("pipedream")
    groups = {"send": place_neighbour_pair(spec, "pp"), "all_reduce": place_group(spec, "dp")}
    found = cost.step(spec, TABLE, clock)
    priced = [
        sum(call.seconds for one in cost.traffic(spec, TABLE, rank) for call in clock.calls(one, groups[one.operation]))
        for rank in (0, 1)
    ]
    assert min(abs(found.comm_s / one - 1) for one in priced) < 1e-6


def test_replicas_of_a_stage_share_its_micro_batches() -> None:
    """The first of two stages takes most of the time, and two ranks halve it."""
    cuts = {"cuts": "8"}
    two = step(spec_of("gpipe", 2, options=cuts), machine=FREE)
    three = step(spec_of("gpipe", 3, options={**cuts, "stage_replicas": "2-1"}), machine=FREE)
    assert three.step_time_s < 0.7 * two.step_time_s


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fairscale_pipe_is_priced_as_gpipe_on_gpus(device: str) -> None:
    """GPUs act as gpipe on a node; a cpu shares work and memory with none."""
    spec = RunSpec(
        model="resnet18", dataset="cifar10", strategy="fairscale_pipe", pp_degree=4, devices_per_task=4, batch_size=64,
        micro_batches=8,
    )  # fmt: skip
    machine = msgspec.structs.replace(NOMINAL, device=device)
    other = spec_of("gpipe", 4, nodes=1, tasks_per_node=4) if device == "cuda" else spec_of("single", 1)
    assert step(spec, machine=machine).step_time_s == pytest.approx(step(other, machine=machine).step_time_s)
    assert resolve_cost("fairscale_pipe").traffic(spec, TABLE, 0) == []
    gpipe = spec_of("gpipe", 4)
    of_gpipe = [resolve_cost("gpipe").memory(gpipe, TABLE, rank) for rank in range(4)]
    held = [
        # One process has the samples once, on its first device.
        memory.total_bytes - (memory.samples_bytes if rank else 0)
        + max(PipelineRank(gpipe, TABLE, rank).parameter_bytes(rank))
        # The last device has the 10 outputs of all samples, and two gradients of those of 7 more micro-batches.
        + (64 * 40 + 56 * 80) * (rank == 3)
        for rank, memory in enumerate(of_gpipe)
    ]  # fmt: skip
    found = predict(spec, TABLE, machine).memory.total_bytes
    assert found == (sum(held) if device == "cpu" else max(held))


@pytest.mark.parametrize(
    ("nodes", "tasks", "degrees", "places", "expected"),
    [
        (2, 4, {"pp_degree": 8}, (2, 3), True),
        (2, 4, {"pp_degree": 8}, (3, 4), False),
        (2, 4, {"pp_degree": 4, "tp_degree": 2}, (1, 2), False),
        (2, 4, {"pp_degree": 4, "tp_degree": 2}, (2, 3), True),
        # The second replica begins in the middle of a node.
        (3, 4, {"pp_degree": 6, "dp_degree": 2}, (1, 2), False),
        (3, 4, {"pp_degree": 6, "dp_degree": 2}, (0, 1), True),
    ],
)
def test_stage_neighbours_are_on_one_node_by_their_ranks(
    nodes: int, tasks: int, degrees: dict[str, Any], places: tuple[int, int], expected: bool
) -> None:
    spec = RunSpec(
        model="m", dataset="d", strategy="1f1b", batch_size=8, nodes=nodes, tasks_per_node=tasks, **degrees
    )  # fmt: skip
    assert are_on_one_node(spec, "pp", *places) is expected


def test_deep_pipelines_are_predicted_without_full_simulation() -> None:
    """80 blocks on 64 stages, 512 micro-batches: what is not walked through fills most of the step."""
    spec = RunSpec(
        model="gpt_17b", dataset="tokens", strategy="1f1b", pp_degree=64, tp_degree=4, dp_degree=4, batch_size=512,
        micro_batches=512, nodes=256, tasks_per_node=4,
    )  # fmt: skip
    one = step(spec, table_of("gpt_17b", "tokens"), FREE)
    assert one.compute_s < one.step_time_s < 1.2 * one.compute_s
