"""The partitioner against every plan there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcbench.errors import ConfigError
from hpcbench.parallel.pipeline.stage_partition import (
    BlockCost,
    InterconnectLevel,
    PipelinePartition,
    balanced_cuts,
    block_ranges,
    minimax_cuts,
    partition_pipeline,
)

Nested = tuple[float, list[tuple[int, int, int]]]
"""Cost, and (first, last, replicas) of each stage."""


def plans(chain: Sequence[BlockCost], levels: Sequence[InterconnectLevel], first: int, last: int) -> Iterator[Nested]:
    """Every way to lay blocks ``first`` to ``last`` - 1 over all workers of ``levels``, as the paper nests them."""
    if not levels:
        yield sum(block.forward_s + block.backward_s for block in chain[first:last]), [(first, last, 1)]
        return
    *inner, (count, bandwidth) = levels
    for stages in range(1, min(count, last - first) + 1):
        for inner_cuts in combinations(range(first + 1, last), stages - 1):
            edges = [first, *inner_cuts, last]
            links = [2 * chain[cut - 1].output_bytes / bandwidth for cut in inner_cuts]
            for copies in shares(count, stages):
                yield from nested(chain, inner, edges, copies, links, bandwidth)


def nested(
    chain: Sequence[BlockCost], inner: Sequence[InterconnectLevel], edges: list[int], copies: list[int], links: list[float],
    bandwidth: float,
) -> Iterator[Nested]:  # fmt: skip
    """Every choice of inner plans for stages between ``edges``."""

    def choose(stage: int) -> Iterator[Nested]:
        if stage == len(copies):
            yield max(links, default=0.0), []
            return
        begin, end, times = edges[stage], edges[stage + 1], copies[stage]
        weights = sum(block.parameter_bytes for block in chain[begin:end])
        for cost, parts in plans(chain, inner, begin, end):
            own = max(cost, 2 * (times - 1) * weights / bandwidth) / times
            for others, more in choose(stage + 1):
                yield max(own, others), [*((a, b, r * times) for a, b, r in parts), *more]

    return choose(0)


def shares(total: int, parts: int) -> Iterator[list[int]]:
    """Every way to write ``total`` as a sum of ``parts`` positive numbers."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = [0, *cuts, total]
        yield [b - a for a, b in pairwise(edges)]


def needed(chain: Sequence[BlockCost], stages: list[tuple[int, int, int]], states: int) -> list[int]:
    """Bytes of a worker of each stage."""
    found = []
    for place, (first, last, replicas) in enumerate(stages):
        behind = sum(more for _, _, more in stages[place + 1 :])
        versions = 1 + ceil(behind / replicas)
        blocks = chain[first:last]
        weights = sum(block.parameter_bytes for block in blocks)
        kept = sum(block.kept_bytes for block in blocks)
        found.append(versions * (weights + kept) + (1 + states) * weights)
    return found


small = st.integers(0, 9)
chains = st.integers(1, 8).flatmap(
    lambda blocks: st.lists(
        st.builds(BlockCost, small.map(float), small.map(float), small, small, small), min_size=blocks, max_size=blocks
    )
)
LEVELS = [[1], [2], [3], [4], [1, 2], [2, 1], [2, 2]]


@given(
    chain=chains,
    counts=st.sampled_from(LEVELS),
    bandwidths=st.tuples(st.sampled_from([0.5, 2.0, 64.0]), st.sampled_from([0.5, 2.0, 64.0])),
    memory_bytes=st.one_of(st.just(inf), st.integers(0, 250).map(float)),
    replicated=st.booleans(),
    states=st.integers(0, 2),
)
@settings(max_examples=250, deadline=None)
def test_the_partition_is_the_best_of_all(
    chain: list[BlockCost],
    counts: list[int],
    bandwidths: tuple[float, float],
    memory_bytes: float,
    replicated: bool,
    states: int,
) -> None:
    levels = [InterconnectLevel(count, bandwidth) for count, bandwidth in zip(counts, bandwidths, strict=False)]
    possible = [
        (cost, stages, max(needed(chain, stages, states)))
        for cost, stages in plans(chain, levels, 0, len(chain))
        if replicated or all(replicas == 1 for _, _, replicas in stages)
    ]
    fitting = [cost for cost, _, held in possible if held <= memory_bytes]
    if not fitting:
        with pytest.raises(ConfigError) as raised:
            partition_pipeline(chain, levels, memory_bytes, replicated, states)
        if possible:
            least = min(held for _, _, held in possible)
            assert f"needs {least} bytes, and the limit is {memory_bytes:.0f}" in raised.value.message
        return
    found = partition_pipeline(chain, levels, memory_bytes, replicated, states)
    assert found.bottleneck_s == pytest.approx(min(fitting))
    check(found, chain, possible, memory_bytes, states)


def check(
    found: PipelinePartition,
    chain: list[BlockCost],
    possible: list[tuple[float, list[tuple[int, int, int]], int]],
    memory_bytes: float,
    states: int,
) -> None:
    """The plan itself is one of the possible ones, costs what it says and keeps to the limit."""
    shape = [(stage.first, stage.last, stage.replicas) for stage in found.stages]
    assert any(stages == shape and cost == pytest.approx(found.bottleneck_s) for cost, stages, _ in possible)
    held = [stage.held_bytes for stage in found.stages]
    assert held == needed(chain, shape, states)
    assert max(held) <= memory_bytes


EQUAL = [BlockCost(1.0, 2.0, 10, 100, 50)] * 4


def test_equal_blocks_without_replicas_are_shared_out_evenly() -> None:
    found = partition_pipeline(EQUAL, [InterconnectLevel(4, 1e9)], replicated=False)
    assert found.cuts == (1, 2, 3)
    assert [stage.versions for stage in found.stages] == [4, 3, 2, 1]
    assert [stage.held_bytes for stage in found.stages] == [800, 650, 500, 350]
    assert found.bottleneck_s == 3.0


def test_small_weights_are_replicated_and_large_ones_are_not() -> None:
    """Convolutions as replicas, one large fully connected layer alone: the paper's 15-1 for VGG-16."""
    convolutions = [BlockCost(1.0, 2.0, 10, 1, 1)] * 3
    found = partition_pipeline([*convolutions, BlockCost(1.0, 2.0, 1, 10_000, 1)], [InterconnectLevel(4, 100.0)])
    assert [(stage.first, stage.last, stage.replicas) for stage in found.stages] == [(0, 3, 3), (3, 4, 1)]
    assert [stage.versions for stage in found.stages] == [2, 1]


def test_slow_links_between_nodes_are_crossed_where_little_is_handed_on() -> None:
    chain = [BlockCost(1.0, 1.0, out, 1000, 0) for out in (1000, 1, 1000, 1)]
    found = partition_pipeline(chain, [InterconnectLevel(2, 1e6), InterconnectLevel(2, 10.0)], replicated=False)
    assert found.cuts == (1, 2, 3)
    assert found.bottleneck_s == 2.0


def test_pure_data_parallelism_and_the_last_stage_keep_to_the_limit() -> None:
    """350 bytes are what a stage with one version of one block needs, 700 what the whole chain on two workers does."""
    fast = [InterconnectLevel(2, 1e9)]
    assert partition_pipeline(EQUAL[:2], fast, 700).cuts == ()
    assert partition_pipeline(EQUAL[:2], fast, 500).cuts == (1,)
    message = r"stage 0 \(blocks 0 to 0, 2 micro-batches in flight\) needs 500 bytes, and the limit is 499"
    with pytest.raises(ConfigError, match=message):
        partition_pipeline(EQUAL[:2], fast, 499)


def test_more_workers_than_blocks_need_replicas() -> None:
    assert partition_pipeline(EQUAL[:2], [InterconnectLevel(4, 1e9)]).bottleneck_s == 1.5
    with pytest.raises(ConfigError, match="4 workers without replicas need as many stages, and there are 2 blocks"):
        partition_pipeline(EQUAL[:2], [InterconnectLevel(4, 1e9)], replicated=False)


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), stages=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_a_balance_is_the_best_of_all(costs: list[int], stages: int) -> None:
    if stages > len(costs):
        with pytest.raises(ConfigError, match=f"{stages} stages of {len(costs)} blocks"):
            balanced_cuts(costs, stages)
        return

    def largest(cuts: Sequence[int]) -> int:
        return max(sum(costs[place] for place in blocks) for blocks in block_ranges(cuts, len(costs)))

    every = [*combinations(range(1, len(costs)), stages - 1)]
    found = balanced_cuts(costs, stages)
    assert found in every
    assert largest(found) == min(map(largest, every))


def test_stages_that_keep_more_micro_batches_get_fewer_blocks() -> None:
    """The first of two stages keeps two micro-batches of each block's bytes, the second one."""
    assert minimax_cuts(6, 2, lambda stage, first, last: (2 - stage) * (last - first)) == (2,)
