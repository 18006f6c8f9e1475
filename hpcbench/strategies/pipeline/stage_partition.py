"""Cuts of a chain of blocks into a given number of pipeline stages, so that the most expensive stage is cheapest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from hpcbench.errors import ConfigError
from hpcbench.strategies.layer_table import LayerTable


class BlockTimes(NamedTuple):
    """Times of one block for one micro-batch."""

    forward_s: float
    backward_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward pass."""
        return self.forward_s + self.backward_s


def minimax_cuts(blocks: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """Return the first blocks of all stages but the first that minimise the cost of the most expensive stage.

    ``cost(stage, first, last)`` is that of blocks ``first`` to ``last`` - 1 as stage number ``stage``. Every stage has
    a block. Among equals the earliest cuts win. ``ConfigError`` if there are more stages than blocks.

    >>> minimax_cuts(4, 2, lambda _stage, first, last: sum([3, 1, 1, 1][first:last]))
    (1,)
    """
    if stages > blocks:
        raise ConfigError(f"{stages} stages of {blocks} blocks: every stage needs one", hint=f"{blocks} stages or less")
    # best[first]: the largest cost of this and all later stages, and their cuts, if this one begins at block first.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        first: (cost(stages - 1, first, blocks), ()) for first in range(stages - 1, blocks)
    }
    for stage in range(stages - 2, -1, -1):
        ends = blocks - (stages - 1 - stage)
        best = {
            first: min(
                (max(cost(stage, first, last), best[last][0]), (last, *best[last][1]))
                for last in range(first + 1, ends + 1)
            )
            for first in range(stage, ends)
        }
    return best[0][1]


def balanced_cuts(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return ``minimax_cuts`` for blocks whose costs add up.

    >>> balanced_cuts([1, 1, 1, 1, 4], 2)
    (4,)
    """
    sums = [0, *accumulate(costs)]
    return minimax_cuts(len(costs), stages, lambda _stage, first, last: sums[last] - sums[first])


def block_ranges(cuts: Sequence[int], blocks: int) -> list[range]:
    """Return the blocks of every stage.

    >>> block_ranges((1, 3), 4)
    [range(0, 1), range(1, 3), range(3, 4)]
    """
    return [range(first, last) for first, last in zip([0, *cuts], [*cuts, blocks], strict=True)]


FP32_BYTES = 4


def parse_cuts(text: str) -> tuple[int, ...] | None:
    """Parse ``"3,7"`` as ``(3, 7)``; ``None`` if it is no ascending list of blocks after the first."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        return None
    cuts = tuple(int(part) for part in parts)
    return cuts if all(low < high for low, high in pairwise((0, *cuts))) else None


def block_costs(table: LayerTable, balance: str) -> list[int]:
    """Return the cost of each block by which ``options.balance`` balances stages.

    FLOPs of both passes for ``time`` (and for ``measured``, whose times are not known before the run), parameters for
    ``parameters``, and 1 for ``blocks``.
    """
    if balance == "blocks":
        return [1] * table.blocks
    if balance == "parameters":
        return [sum(row.parameters for row in rows) for rows in table.rows_by_block()]
    return [sum(row.forward_flops + row.backward_flops for row in rows) for rows in table.rows_by_block()]
