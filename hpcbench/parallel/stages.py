"""Which blocks of a model each chunk of a pipeline holds: one answer for the worker and the oracle."""

from __future__ import annotations

from itertools import pairwise

from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.partition import balanced, ranges

BYTES = 4


def given_cuts(text: str) -> tuple[int, ...] | None:
    """``"3,7"`` as ``(3, 7)``; ``None`` where it is no ascending list of blocks after the first."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        return None
    cuts = tuple(int(part) for part in parts)
    return cuts if all(low < high for low, high in pairwise((0, *cuts))) else None


def chunk_blocks(cuts: str, balance: str, chunks: int, table: LayerTable) -> list[range]:
    """The blocks of every chunk: cut as ``cuts`` says, or else so that the largest cost of a chunk is smallest."""
    if chunks == 1:
        return [range(table.blocks)]
    chosen = given_cuts(cuts) if cuts else balanced(block_costs(table, balance), chunks)
    assert chosen is not None, "cuts that were not checked"
    return ranges(chosen, table.blocks)


def block_costs(table: LayerTable, balance: str) -> list[int]:
    """What each block costs.

    The FLOPs of both passes for ``time`` (and for ``measured``: what a run will measure is not known here); for
    ``memory`` bytes of parameters with gradient and momentum, and of one sample's activations; ``parameters``; or 1.
    """
    costs = [1 if balance == "blocks" else 0] * table.blocks
    for layer in table.layers:
        # The loss is computed where the last block is.
        block = min(layer.block, table.blocks - 1)
        if balance in ("time", "measured"):
            costs[block] += layer.forward_flops + layer.backward_flops
        elif balance == "memory":
            costs[block] += 3 * BYTES * layer.parameters + layer.activation_bytes
        elif balance == "parameters":
            costs[block] += layer.parameters
    return costs
