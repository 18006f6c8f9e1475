"""In which order a backward pass makes gradients, and who owns which of them. Pure integers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.memo import once_per

_BIAS_FIRST = frozenset({"Linear"})
"""Autograd hands out the gradients of an operator's inputs in their order: ``addmm`` has the bias first, but under
autocast the matrix product of a linear layer has the weight first."""
_HALF = frozenset({"bf16", "fp16"})


def ready_order(table: LayerTable, precision: str = "fp32") -> list[int]:
    """Places in ``table.parameter_tensors`` in the order in which their gradients are complete.

    The layers' backward passes run in the reverse order of their forward passes (autograd takes the node that was made
    last); a tied tensor is complete with the layer that used it first. Not so in a compiled model, whose graph hands
    out all gradients at once.
    """
    by_row: dict[int, list[int]] = {}
    rows = first_rows(table)
    for place, row in enumerate(rows):
        by_row.setdefault(row, []).append(place)
    order: list[int] = []
    for row in sorted(by_row, reverse=True):
        kind = table.layers[row].kind
        backwards = kind.endswith(".other") or (kind in _BIAS_FIRST and precision not in _HALF)
        order += by_row[row][:: -1 if backwards else 1]
    return order


def first_rows(table: LayerTable) -> list[int]:
    """Of every tensor of ``table.parameter_tensors``: the row of ``table.layers`` that uses it first."""
    return list(_first_rows(table))


@once_per(32)
def _first_rows(table: LayerTable) -> tuple[int, ...]:
    rows: dict[str, int] = {}
    for number, layer in enumerate(table.layers):
        rows.setdefault(layer.name, number)
    return tuple(_row_of(tensor.name, rows) for tensor in table.parameter_tensors)


def _row_of(name: str, rows: dict[str, int]) -> int:
    """The row of the innermost module around the tensor that has one: some parameters are used from outside."""
    owner = name.rpartition(".")[0]
    while owner not in rows:
        assert owner, f"{name} belongs to no layer of the table"
        owner = owner.rpartition(".")[0]
    return rows[owner]


def owners(elements: Sequence[int], ranks: int, largest_first: bool) -> list[list[int]]:
    """Places in ``elements`` that each rank owns: one after another goes to the rank that has least so far.

    ``largest_first`` as torch's ZeroRedundancyOptimizer does it; in the given order as fairscale's OSS does.

    >>> owners([1, 5, 2, 2], 2, largest_first=True)
    [[1], [2, 3, 0]]
    """
    order = list(range(len(elements)))
    if largest_first:
        order.sort(key=lambda place: elements[place], reverse=True)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    held = [(0, rank) for rank in range(ranks)]
    for place in order:
        least, rank = held[0]
        owned[rank].append(place)
        heapq.heapreplace(held, (least + elements[place], rank))
    return owned


def sharded_units(table: LayerTable) -> list[list[int]]:
    """Places in ``table.parameter_tensors`` that are gathered together: a unit a block, then what blocks share.

    The last unit is the root's: parameters outside of all blocks that can be parted, because another block uses a
    weight of theirs (a linear layer without parameters of its own has the embedding's). Units without parameters are
    left out, an empty root excepted.
    """
    rows = first_rows(table)
    blocks = [table.layers[row].block for row in rows]
    borrowed = {
        (layer.block, (layer.attributes["out_features"], layer.attributes["in_features"]))
        for layer in table.layers
        if layer.kind == "Linear" and layer.parameters == 0
    }
    together = {block for block, _ in borrowed}
    shapes = {shape for _, shape in borrowed}
    together |= {
        block for block, tensor in zip(blocks, table.parameter_tensors, strict=True) if tuple(tensor.shape) in shapes
    }
    units: dict[int, list[int]] = {}
    root: list[int] = []
    for place, block in enumerate(blocks):
        (root if block in together else units.setdefault(block, [])).append(place)
    return [*(units[block] for block in sorted(units)), root]
