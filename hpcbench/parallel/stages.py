"""What the blocks of a model cost, and cuts between them as a sweep writes them."""

from __future__ import annotations

from itertools import pairwise

from hpcbench.parallel.layers import LayerTable

BYTES = 4


def given_cuts(text: str) -> tuple[int, ...] | None:
    """``"3,7"`` as ``(3, 7)``; ``None`` where it is no ascending list of blocks after the first."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        return None
    cuts = tuple(int(part) for part in parts)
    return cuts if all(low < high for low, high in pairwise((0, *cuts))) else None


def block_costs(table: LayerTable, balance: str) -> list[int]:
    """What each block costs.

    The FLOPs of both passes for ``time`` (and for ``measured``: what a run will measure is not known here);
    ``parameters``; or 1 for ``blocks``.
    """
    costs = [1 if balance == "blocks" else 0] * table.blocks
    for layer in table.layers:
        # The loss is computed where the last block is.
        block = min(layer.block, table.blocks - 1)
        if balance in ("time", "measured"):
            costs[block] += layer.forward_flops + layer.backward_flops
        elif balance == "parameters":
            costs[block] += layer.parameters
    return costs
