"""Cuts into stages against all possible cuts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcbench.errors import ConfigError
from hpcbench.strategies.pipeline.stage_partition import balanced_cuts, block_ranges, minimax_cuts


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
