"""Stages that hold alike: micro-batches under way and versions of weights count, not the layers alone."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.layer_table import LayerTable, read_shipped_table
from hpcbench.strategies.pipeline.entry import pipeline_layout
from hpcbench.strategies.pipeline.stage_balance import chunk_blocks, chunk_memory_cost, peak_micro_batches_in_flight
from hpcbench.strategies.pipeline.stage_partition import block_ranges


def spec_of(strategy: str, stages: int, micro_batches: int = 8, **more: Any) -> RunSpec:
    given: dict[str, Any] = {"model": "resnet50", "dataset": "imagenet", "batch_size": 64, **more}
    return RunSpec(strategy=strategy, pp_degree=stages, tasks_per_node=stages, micro_batches=micro_batches, **given)


def table_of(spec: RunSpec) -> LayerTable:
    table = read_shipped_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
    assert table is not None
    return table


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "expected"),
    [
        ("model", 8, [1, 1, 1, 1]),
        ("gpipe", 8, [8, 8, 8, 8]),
        ("fairscale_pipe", 8, [8, 8, 8, 8]),
        ("1f1b", 8, [4, 3, 2, 1]),
        ("1f1b", 2, [2, 2, 2, 1]),
        ("zero_bubble", 8, [4, 4, 4, 4]),
        ("pipedream", 1, [4, 3, 2, 1]),
    ],
)
def test_micro_batches_in_flight_are_those_of_the_table(strategy: str, micro_batches: int, expected: list[int]) -> None:
    spec = spec_of(strategy, 4, micro_batches)
    assert peak_micro_batches_in_flight(spec, pipeline_layout(spec)) == expected


@pytest.mark.parametrize("strategy", ["gpipe", "1f1b", "pipedream"])
@pytest.mark.parametrize("stages", [2, 3])
def test_no_other_cuts_hold_less(strategy: str, stages: int) -> None:
    spec = spec_of(strategy, stages, options={"balance": "memory"})
    table, options, layout = table_of(spec), options_with_defaults(spec), pipeline_layout(spec)
    cost = chunk_memory_cost(spec, options, layout, table)

    def largest(blocks: list[range]) -> float:
        return max(cost(chunk, held.start, held.stop) for chunk, held in enumerate(blocks))

    every = (block_ranges(cuts, table.blocks) for cuts in combinations(range(1, table.blocks), stages - 1))
    assert largest(chunk_blocks(spec, options, layout, table)) == min(map(largest, every))


@pytest.mark.parametrize("strategy", ["gpipe", "1f1b", "zero_bubble", "pipedream"])
@pytest.mark.parametrize("model", ["resnet50", "vgg16"])
def test_the_largest_rank_holds_less_than_with_other_balances(strategy: str, model: str) -> None:
    """The formulas of a rank's memory contain more than the balance."""

    def largest(balance: str) -> int:
        spec = spec_of(strategy, 4, options={"balance": balance}, model=model)
        cost, table = resolve_cost(strategy), table_of(spec)
        return max(int(cost.memory(spec, table, rank).total_bytes) for rank in range(4))

    assert largest("memory") <= 1.02 * min(largest("time"), largest("parameters"))
    assert largest("memory") < max(largest("time"), largest("parameters"))
