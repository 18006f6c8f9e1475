"""Calibration runs measure every row of the table with its own operations, and every collective."""

from __future__ import annotations

from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.catalog import exclusion_reason
from hpcbench.parallel.gradient_buckets import MIB
from hpcbench.parallel.layer_table import read_shipped_table
from hpcbench.parallel.traffic import (
    COMM_OPERATIONS,
    OVERLAPPED_OPERATIONS,
    MessageShape,
    format_messages,
    parse_messages,
)
from hpcbench.results.probe_records import CollectiveProbe, OverlapProbe, ProbeResults
from hpcbench.results.timing_statistics import quantile
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.clocks import relative_spread
from hpcbench.worker.microbench import collective_probes, kernel_probes
from hpcbench.worker.microbench.block_probes import BlockReadings, measure_blocks
from hpcbench.worker.microbench.collective_probes import (
    EXCHANGE,
    ProbeGroup,
    measure_collectives,
    measure_messages,
    measure_overlap,
    message_sizes,
)
from hpcbench.worker.microbench.kernel_probes import capture_modules, isolate_module
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategies.probes import ProbeBlocksStrategy, ProbeLayersStrategy, largest_message_bytes
from tests.distributed.pool import Pool

CPU = torch.device("cpu")


def spec_of(strategy: str = "probe_layers", **more: Any) -> RunSpec:
    given: dict[str, Any] = {"model": "vit", "dataset": "digits", "batch_size": 4, "options": {"budget_s": 0.01}}
    return RunSpec(strategy=strategy, **(given | more))


def probed(spec: RunSpec) -> ProbeResults:
    strategy = ProbeLayersStrategy()
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    return strategy.measure(make_feed(spec, CPU), lambda: None)


@pytest.mark.parametrize("model", ["vit", "vgg11"])
def test_every_row_that_computes_is_measured(model: str) -> None:
    spec = spec_of(model=model, options={"shares": "1,2", "budget_s": 0.01})
    found = probed(spec)
    table = read_shipped_table(model, "digits")
    assert table is not None
    rows = {(layer.name, layer.kind): layer for layer in table.layers}
    whole = [one for one in found.kernels if one.split == "whole"]
    measured = {(one.row, one.kind) for one in whole}
    assert {kind for _, kind in rows} == {kind for _, kind in measured}
    known = [rows[one.row, one.kind] for one in whole if (one.row, one.kind) in rows]
    # Every other row of the table is as one of these.
    shapes = {(one.kind, *one.input_shape, 0, *one.output_shape, 0, one.parameters) for one in known}
    assert {(one.kind, *one.input_shape, 0, *one.output_shape, 0, one.parameters) for one in table.layers} == shapes
    assert all(one.forward_s > 0 and one.repeats >= 3 for one in found.kernels)
    backward = {(one.row, one.kind) for one in whole if one.backward_s is not None}
    assert {(row, kind) for (row, kind), layer in rows.items() if layer.backward_flops} & measured <= backward
    assert {one.split for one in found.kernels} == {"whole", "samples", "outputs", "inputs", "positions"}
    sizes = {4 * one.numel() for one in build_model(spec).parameters()}
    assert {one.parameter_bytes for one in found.updates} == sizes
    assert (found.base_memory_bytes or 0) > 2**26


class _Named(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_probe_of_a_parent_module_excludes_its_children() -> None:
    spec = spec_of()
    model = build_model(spec)
    batch, _ = make_feed(spec, CPU).batch(0, 0)
    found, outputs = capture_modules(model, batch, model)
    assert torch.equal(outputs, model(batch))
    blocks = [one for one in found if one.kind in ("Attention.other", "Mlp.other")]
    expected = {
        "Attention.other": (["scaled_dot_product"], ["scaled_dot_product"]),
        "Mlp.other": (["gelu"], ["gelu_backward"]),
    }
    for one in blocks:
        alone, x = isolate_module(one), one.inputs[0].requires_grad_()
        forward, backward = _Named(), _Named()
        with forward:
            output = alone(x)
        assert output.shape == x.shape
        with backward:
            torch.autograd.backward(output, torch.ones_like(output))
        for seen, parts in zip((forward, backward), expected[one.kind], strict=True):
            assert all(any(part in name for name in seen.names) for part in parts), seen.names
            assert not any("mm" in name or "linear" in name for name in seen.names)


def test_children_of_a_module_keep_their_place_in_the_model() -> None:
    spec = spec_of()
    model = build_model(spec)
    batch, _ = make_feed(spec, CPU).batch(0, 0)
    before = model(batch)
    for one in capture_modules(model, batch, model)[0]:
        isolate_module(one)
    assert torch.equal(model(batch), before)


def blocks_of(spec: RunSpec, accumulates: bool) -> tuple[BlockReadings, ProbeBlocksStrategy]:
    torch.manual_seed(1)
    strategy = ProbeBlocksStrategy()
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    batch = make_feed(spec, CPU).batch(0, 0)
    torch.manual_seed(2)
    return measure_blocks(strategy, batch, 0.0, lambda: None, accumulates=accumulates), strategy


@pytest.mark.parametrize("model", ["vit", "resnet18"])
def test_every_block_is_measured_as_a_whole(model: str) -> None:
    spec = spec_of("probe_blocks", model=model, options={"shares": "1,2", "budget_s": 0.01})
    strategy = ProbeBlocksStrategy()
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    found = strategy.measure(make_feed(spec, CPU), lambda: None)
    table = read_shipped_table(model, "digits")
    assert table is not None
    assert [one.block for one in found.blocks] == list(range(table.blocks + 1))
    assert {row.block for row in table.layers} == set(range(table.blocks + 1))
    assert all(one.forward_s > 0 and (one.backward_s or 0) > 0 and one.samples == 4 for one in found.blocks)
    assert found.pass_s is not None
    # Forward and backward without a clock between them; a busy machine makes it longer.
    assert found.pass_s > 0.3 * sum(one.forward_s + (one.backward_s or 0) for one in found.blocks)
    splits = {"whole", "samples", "outputs", "inputs", "positions"} | ({"channels"} if model == "resnet18" else set())
    assert {one.split for one in found.kernels} == splits
    assert {one.parameter_bytes for one in found.updates} == {4 * one.numel() for one in strategy.module.parameters()}


def test_gradients_are_kept_where_micro_batches_follow_each_other() -> None:
    spec = spec_of("probe_blocks")
    readings, strategy = blocks_of(spec, accumulates=True)
    _, once = blocks_of(spec, accumulates=False)
    # Every round has two passes, and the first is not counted.
    passes = 2 * (readings.blocks[0].repeats + 1)
    for kept, plain in zip(strategy.module.parameters(), once.module.parameters(), strict=True):
        assert kept.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(
            kept.grad, passes * plain.grad, rtol=1e-3, atol=1e-4 * float(plain.grad.abs().max()) * passes
        )


def test_blocks_that_write_over_their_input_are_measured() -> None:
    spec = spec_of("probe_blocks")
    strategy = ProbeBlocksStrategy()
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    batch = make_feed(spec, CPU).batch(0, 0)
    strategy.module = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(batch[0][0].numel(), 16)),
        torch.nn.ReLU(inplace=True),
        torch.nn.Linear(16, 10),
    )
    readings = measure_blocks(strategy, batch, 0.0, lambda: None, accumulates=False)
    assert [one.backward_s is not None for one in readings.blocks] == [True, True, True, True]


class _Branches(torch.nn.Sequential):
    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs)  # type: ignore[no-untyped-call]


def test_block_probes_refuse_a_model_with_its_own_forward() -> None:
    spec = spec_of("probe_blocks")
    strategy = ProbeBlocksStrategy()
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    strategy.module = _Branches(*strategy.module.children())
    with pytest.raises(WorkerError, match="its blocks cannot be measured"):
        strategy.measure(make_feed(spec, CPU), lambda: None)


def messages(spec: RunSpec, budget_s: float, group: Any) -> Any:
    place = RankContext(torch.distributed.get_rank(), spec.ranks, CPU, group)
    shapes = parse_messages(str(spec.options["messages"]))
    return measure_messages(spec, place, shapes, budget_s, lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "tasks"), [(1, 4), (2, 2), (4, 1)])
def test_messages_are_timed_in_their_groups(pool: Pool, nodes: int, tasks: int) -> None:
    width = min(tasks, 2)
    shapes = [
        MessageShape("all_reduce", nodes * width, width, 1, 4096),
        MessageShape("all_gather", nodes * tasks, tasks, 1, 2**20),
        *([MessageShape("send", 2, 2 // nodes, 2, 64)] if nodes <= 2 else []),
    ]
    spec = spec_of("probe_messages", nodes=nodes, tasks_per_node=tasks, dp_degree=nodes * tasks,
                   options={"messages": format_messages(shapes)})  # fmt: skip
    # The budget is too small for any of them: all are measured nevertheless.
    found: list[CollectiveProbe] = pool.call(4, messages, spec, 1e-9)[0]
    assert [(one.operation, one.ranks, one.nodes, one.payload_bytes) for one in found] == [
        (shape.operation, shape.ranks, nodes, shape.payload_bytes) for shape in shapes
    ]
    assert all(one.seconds > 0 and one.repeats >= 3 for one in found)
    groups = [tasks // shape.ranks_per_node for shape in shapes]
    expected = groups if nodes == 1 else [min(count, shape.rivals) for count, shape in zip(groups, shapes, strict=True)]
    assert [one.groups for one in found] == expected


def pass_overlaps(spec: RunSpec, group: Any) -> Any:
    strategy = ProbeBlocksStrategy()
    strategy.setup(build_model(spec), spec, RankContext(torch.distributed.get_rank(), spec.ranks, CPU, group))
    return strategy.measure(make_feed(spec, CPU), lambda: None)


@pytest.mark.slow
def test_a_pass_is_timed_beside_collectives(pool: Pool) -> None:
    shapes = [MessageShape(operation, 2, 2, 1, 2**18) for operation in OVERLAPPED_OPERATIONS]
    options = {"overlaps": format_messages(shapes), "budget_s": 1e-9}
    spec = spec_of("probe_blocks", tasks_per_node=2, dp_degree=2, options=options)
    found: list[ProbeResults] = pool.call(2, pass_overlaps, spec)
    assert found[0].overlaps == found[1].overlaps
    assert found[0].blocks == []
    assert [(one.operation, one.payload_bytes) for one in found[0].overlaps] == [
        (operation, 2**18) for operation in OVERLAPPED_OPERATIONS
    ]
    for one in found[0].overlaps:
        assert one.both_s >= one.compute_under_comm_s > 0
        assert one.comm_s >= one.issue_s > 0
        assert one.calls >= 1


def collectives(spec: RunSpec, largest_bytes: int, budget_s: float, group: Any) -> Any:
    rank = torch.distributed.get_rank()
    place = RankContext(rank, spec.ranks, CPU, group)
    return measure_collectives(spec, place, largest_bytes, budget_s, lambda: None)


@pytest.mark.slow
def test_two_ranks_measure_every_operation_at_every_size(pool: Pool) -> None:
    spec = spec_of("probe_collectives", tasks_per_node=2, dp_degree=2)
    # Far more than is used: on a busy machine a small budget would leave out sizes.
    answers: list[tuple[list[CollectiveProbe], list[OverlapProbe]]] = pool.call(2, collectives, spec, 2**16, 60.0)
    found, overlaps = answers[0]
    assert found == answers[1][0]
    expected = {(operation, size) for operation in (*COMM_OPERATIONS, EXCHANGE) for size in message_sizes(2**16)}
    assert {(one.operation, one.payload_bytes) for one in found} == expected
    assert all(one.seconds > 0 and one.repeats >= 3 and (one.ranks, one.nodes) == (2, 1) for one in found)
    (overlap,) = overlaps
    assert overlap.both_s >= overlap.compute_under_comm_s > 0
    assert overlap.comm_s >= overlap.issue_s > 0


def convolved_batches(spec: RunSpec, shortest_kernel_s: float, group: Any) -> list[int]:
    batches = set()

    class RecordedConvolution(torch.nn.Conv2d):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            batches.add(len(images))
            return super().forward(images)

    place = ProbeGroup(group, [0, 1], torch.distributed.get_rank(), CPU)
    with (
        mock.patch.object(torch.nn, "Conv2d", RecordedConvolution),
        mock.patch.object(collective_probes, "_SHORTEST_KERNEL_S", shortest_kernel_s),
        mock.patch.object(collective_probes, "_MAX_IMAGES", 32),
    ):
        measure_overlap(place, spec, 1024, 0.01)
    return sorted(batches)


@pytest.mark.parametrize(("shortest_kernel_s", "batches"), [(0.0, [8]), (1e9, [8, 16, 32])])
def test_the_overlapped_kernel_grows_until_its_launch_is_negligible(
    pool: Pool, shortest_kernel_s: float, batches: list[int]
) -> None:
    spec = spec_of("probe_collectives", tasks_per_node=2, dp_degree=2)
    assert pool.call(2, convolved_batches, spec, shortest_kernel_s) == [batches, batches]


@pytest.mark.slow
def test_two_ranks_a_node_measure_how_groups_share_the_way_out(pool: Pool) -> None:
    spec = spec_of("probe_collectives", nodes=2, tasks_per_node=2, dp_degree=4)
    found, overlaps = pool.call(4, collectives, spec, 2**20, 60.0)[0]
    assert [(one.payload_bytes, one.groups) for one in found] == [(2**18, 1), (2**18, 2), (2**20, 1), (2**20, 2)]
    assert all((one.ranks, one.nodes) == (2, 2) for one in found)
    assert overlaps == []


@pytest.mark.parametrize("split", ["outputs", "inputs"])
@pytest.mark.parametrize("whole", [torch.nn.Linear(8, 4), torch.nn.Conv2d(8, 4, 3, padding=1)])
def test_a_part_of_a_layer_takes_no_memory_for_weights(whole: torch.nn.Module, split: str) -> None:
    x = torch.zeros(2, 8) if isinstance(whole, torch.nn.Linear) else torch.zeros(2, 8, 5, 5)
    sliced = kernel_probes.slice_layer(whole, x, split, 2)
    assert sliced is not None
    layer, part = sliced
    memory = {parameter.untyped_storage().data_ptr() for parameter in whole.parameters()}
    assert {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()} == memory
    assert layer(part).shape[1] == (2 if split == "outputs" else 4)


def test_no_gradient_of_a_group_of_layers_remains_for_the_next_one() -> None:
    spec = spec_of()
    strategy = ProbeLayersStrategy()
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    have_gradients: list[bool] = []

    def check() -> None:
        have_gradients.append(any(one.grad is not None for one in strategy.module.parameters()))

    kernel_probes.measure_kernels(strategy, make_feed(spec, CPU).batch(0, 0), [1, 2], 0.0, check)
    assert have_gradients == [False] * (kernel_probes.MIN_ROUNDS + 1)


def test_a_part_of_a_norm_keeps_its_settings() -> None:
    whole = torch.nn.BatchNorm2d(8, eps=1e-3, momentum=0.2, affine=False)
    part = kernel_probes._slice_norm(whole, torch.zeros(2, 8, 3, 3), 4)
    assert part is not None
    assert repr(part[0]) == repr(torch.nn.BatchNorm2d(2, eps=1e-3, momentum=0.2, affine=False))


def test_sizes_grow_to_the_largest() -> None:
    assert message_sizes(2**24)[0] == 1024
    assert message_sizes(2**24)[-1] == 2**24
    assert len(message_sizes(2**24)) == 12
    assert message_sizes(512) == [1024, 2048]


def test_quantiles_are_linear_and_spread_is_relative() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([1.0, 2.0]) == 1.5
    assert quantile([0.0, 10.0], 0.84) == pytest.approx(8.4)
    assert relative_spread([2.0, 2.0, 2.0]) == 0.0
    assert relative_spread([float(one) for one in range(101)]) == pytest.approx(34 / 50)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (spec_of(), None),
        (spec_of(verify=True), "no training"),
        (spec_of(compile=True), "one by one"),
        (spec_of(micro_batches=2), "micro_batches 2, 1 is right"),
        (spec_of(options={"shares": "1,x"}), "whole numbers"),
        (spec_of(options={"shares": "0"}), "whole numbers"),
        (spec_of(options={"budget_s": 0.0}), "budget_s 0"),
        (spec_of("probe_collectives"), "2 ranks or more"),
        (spec_of("probe_collectives", tasks_per_node=2, dp_degree=2), None),
        (spec_of("probe_blocks", activation_checkpointing=True), "one by one"),
        (spec_of("probe_blocks", options={"shares": "x"}), "whole numbers"),
        (spec_of("probe_messages"), "without messages"),
        (spec_of("probe_messages", options={"messages": "all_reduce:2:1:1:64"}), "takes 2 nodes"),
        (spec_of("probe_messages", options={"messages": "all_sum:2:2:1:64"}), "begins with no operation"),
    ],
)
def test_probes_refuse_parameters_that_they_ignore(spec: RunSpec, said: str | None) -> None:
    reason = exclusion_reason(spec)
    assert reason is None if said is None else said in (reason or "")


@pytest.mark.parametrize(
    ("options", "memory_bytes", "expected"),
    [
        ({}, None, 16 * MIB),
        ({}, 80 * 2**30, 1024 * MIB),
        ({}, 8 * 2**30, 256 * MIB),
        ({"largest_mb": 4}, 80 * 2**30, 4 * MIB),
    ],
)
def test_the_largest_message_follows_the_device(
    options: dict[str, Any], memory_bytes: int | None, expected: int
) -> None:
    spec = spec_of("probe_collectives", tasks_per_node=8, dp_degree=8, options=options)
    assert largest_message_bytes(spec, memory_bytes) == expected
