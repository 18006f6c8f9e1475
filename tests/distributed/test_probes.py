"""Probes measure every block of a model, and messages in groups of given places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.results.probe_records import CollectiveProbe, ProbeResults
from hpcbench.strategies.catalog import exclusion_reason
from hpcbench.strategies.probes.train import ProbeBlocksStrategy
from hpcbench.strategies.traffic import OVERLAPPED_OPERATIONS, MessageShape, format_messages
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.microbench.block_probes import measure_blocks
from hpcbench.worker.microbench.message_probes import (
    Collective,
    ProbeGroup,
    check_collective,
    make_collective,
    measure_collectives,
)
from hpcbench.worker.models.build import build_model
from tests.distributed.pool import Pool
from tests.layer_tables import table_of

CPU = torch.device("cpu")


def spec_of(strategy: str = "probe_blocks", **more: Any) -> RunSpec:
    given: dict[str, Any] = {"model": "vit", "dataset": "digits", "batch_size": 4, "options": {"budget_s": 0.01}}
    return RunSpec(strategy=strategy, **(given | more))


@pytest.mark.parametrize("model", ["vit", "resnet18"])
def test_every_block_is_measured_as_a_whole(model: str) -> None:
    spec = spec_of("probe_blocks", model=model, options={"budget_s": 0.01})
    strategy = ProbeBlocksStrategy()
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    found = strategy.measure(make_feed(spec, CPU), lambda: None)
    table = table_of(model, "digits")
    assert [one.block for one in found.blocks] == list(range(table.blocks + 1))
    assert {row.block for row in table.layers} == set(range(table.blocks + 1))
    assert all(one.forward_s > 0 and (one.backward_s or 0) > 0 and one.samples == 4 for one in found.blocks)
    assert found.pass_s is not None
    # Forward and backward without a clock between them; a busy machine makes it longer.
    assert found.pass_s > 0.3 * sum(one.forward_s + (one.backward_s or 0) for one in found.blocks)
    assert (found.base_memory_bytes or 0) > 2**26
    assert {one.parameter_bytes for one in found.updates} == {4 * one.numel() for one in strategy.module.parameters()}


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
    readings = measure_blocks(strategy, batch, 0.0, lambda: None)
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


def collectives(spec: RunSpec, group: Any) -> Any:
    place = RankContext(torch.distributed.get_rank(), spec.ranks, CPU, group)
    return measure_collectives(spec, place, lambda: None)


def one_more_group(group: Any) -> None:
    torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)


def collectives_spec(**more: Any) -> RunSpec:
    given: dict[str, Any] = {"warmup_steps": 1, "steps": 3, "message_bytes": 1000}
    return RunSpec(workload="collectives", strategy="collectives", **(given | more))


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "tasks"), [(1, 4), (2, 2), (4, 1)])
def test_messages_are_timed_in_their_groups(pool: Pool, nodes: int, tasks: int) -> None:
    width = min(tasks, 2)
    shapes = [
        MessageShape("all_reduce", nodes * width, width, 1, 4096),
        MessageShape("all_gather", nodes * tasks, tasks, 1, 2**20),
        *([MessageShape("send", 2, 2 // nodes, 2, 64)] if nodes <= 2 else []),
    ]
    # The budget is too small for any of them: all are measured nevertheless.
    options = {"messages": format_messages(shapes), "budget_s": 1e-9}
    spec = collectives_spec(nodes=nodes, tasks_per_node=tasks, options=options)
    found: list[CollectiveProbe] = pool.call(4, collectives, spec)[0]
    assert [(one.operation, one.ranks, one.nodes, one.payload_bytes) for one in found] == [
        (shape.operation, shape.ranks, nodes, shape.payload_bytes) for shape in shapes
    ]
    assert all(one.seconds > 0 and one.repeats >= 3 for one in found)
    groups = [tasks // shape.ranks_per_node for shape in shapes]
    expected = groups if nodes == 1 else [min(count, shape.rivals) for count, shape in zip(groups, shapes, strict=True)]
    assert [one.groups for one in found] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "ranks", "payload_bytes"),
    [
        ("all_reduce", 4, 1008),
        ("reduce_scatter", 4, 1008),
        ("all_gather", 4, 252),
        ("all_to_all", 4, 1008),
        ("broadcast", 4, 1008),
        ("reduce", 4, 1008),
        ("send", 2, 1000),
    ],
)
def test_one_operation_is_checked_and_timed(pool: Pool, operation: str, ranks: int, payload_bytes: int) -> None:
    spec = collectives_spec(tasks_per_node=ranks, operation=operation)
    for (found,) in pool.call(ranks, collectives, spec):
        assert (found.operation, found.ranks, found.payload_bytes) == (operation, ranks, payload_bytes)
        assert (found.repeats, len(found.readings_s), found.groups) == (3, 3, 1)


@pytest.mark.slow
def test_every_two_nodes_are_measured(pool: Pool) -> None:
    spec = collectives_spec(nodes=2, tasks_per_node=2, operation="pairs")
    assert [[one.pair for one in found] for found in pool.call(4, collectives, spec)] == [[[0, 2]], [], [], []]
    # torch names a group by its ranks and by how many groups a rank is in. Under the name of the pair above, ranks
    # would read its addresses from the store.
    pool.call(4, one_more_group)
    spec = collectives_spec(tasks_per_node=3, operation="pairs")
    assert [[one.pair for one in found] for found in pool.call(3, collectives, spec)] == [
        [[0, 1], [0, 2]],
        [[1, 2]],
        [],
    ]


def wrong_collective(operation: str, group: Any) -> str:
    """The operation, of which the last rank changes one element of its result afterwards."""
    ranks = torch.distributed.get_process_group_ranks(group)
    team = ProbeGroup(group, ranks, torch.distributed.get_rank(), CPU)
    right = make_collective(team, operation, 64)

    def call(number: int) -> None:
        right.call(number)
        if team.own == team.size - 1:
            right.received[3] += 1

    try:
        check_collective(team, operation, Collective(call, right.sent, right.received))
    except WorkerError as error:
        return error.message
    return ""


@pytest.mark.slow
def test_a_wrong_result_is_an_error_on_every_rank(pool: Pool) -> None:
    for operation, is_right in (("all_reduce", "7"), ("all_gather", "3"), ("broadcast", "3"), ("send", "3")):
        first, last = pool.call(2, wrong_collective, operation)
        assert f"{operation} of 64 bytes over 2 ranks gave a wrong result: on rank 0 all is right" in first
        assert f"on rank 1 element 3 is {int(is_right) + 1}, {is_right} is right" in last


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


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (spec_of(), None),
        (spec_of(verify=True), "is not a training"),
        (spec_of(compile=True), "one by one"),
        (spec_of(micro_batches=2), "micro_batches 2, 1 is right"),
        (spec_of(options={"budget_s": 0.0}), "budget_s 0"),
        (spec_of("probe_blocks", activation_checkpointing=True), "one by one"),
        (collectives_spec(tasks_per_node=2), "without operation or message_bytes"),
        (collectives_spec(tasks_per_node=2, operation="all_reduce", message_bytes=None), "without operation or"),
        (collectives_spec(tasks_per_node=2, operation="all_reduce"), None),
        (collectives_spec(operation="all_reduce"), "all_reduce in a group of 1: two or more are right"),
        (collectives_spec(nodes=2, tasks_per_node=2, operation="send"), "send in a group of 4: 2 ranks are right"),
        (collectives_spec(nodes=2, tasks_per_node=2, operation="pairs"), None),
        (collectives_spec(operation="pairs"), "takes"),
        (collectives_spec(tasks_per_node=4, operation="reduce", group_tasks=3), "groups of 3 ranks on a node do not"),
        (collectives_spec(tasks_per_node=4, operation="reduce", group_tasks=2), None),
        (collectives_spec(tasks_per_node=2, options={"messages": "all_reduce:2:1:1:64"}), "takes 2 nodes"),
        (collectives_spec(tasks_per_node=2, options={"messages": "all_sum:2:2:1:64"}), "begins with no operation"),
    ],
)
def test_probes_refuse_parameters_that_they_ignore(spec: RunSpec, said: str | None) -> None:
    reason = exclusion_reason(spec)
    assert reason is None if said is None else said in (reason or "")
