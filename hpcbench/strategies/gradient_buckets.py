"""Gradient buckets, the order in which a backward pass completes gradients, and the assignment of parameters to owner
ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from hpcbench.strategies.layer_table import LayerTable, cached_by_identity, first_rows_by_name, owning_row

MIB = 2**20
DEFAULT_BUCKET_CAP_MB = 25.0
FIRST_BUCKET_CAP_BYTES = MIB
"""The first bucket is small, so that communication begins early (Li et al. 2020, section 3.2.3)."""
MASTER_UPDATE_CAP_BYTES = 64 * MIB
"""fp32 gradients that an update of master weights makes at a time; a larger tensor is updated alone."""


def fill_buckets(
    tensor_bytes: Sequence[int], cap_bytes: int, first_cap_bytes: int = FIRST_BUCKET_CAP_BYTES
) -> list[list[int]]:
    """Places in ``tensor_bytes`` that make up each bucket, in the order in which buckets are sent.

    The backward pass ends with the first tensor, so buckets are filled from the last one on. A bucket is closed as
    soon as it holds its cap or more.

    >>> fill_buckets([8, 8, 8, 8], cap_bytes=16, first_cap_bytes=4)
    [[3], [2, 1], [0]]
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    held = 0
    for index in range(len(tensor_bytes) - 1, -1, -1):
        current.append(index)
        held += tensor_bytes[index]
        if held >= (cap_bytes if buckets else min(first_cap_bytes, cap_bytes)):
            buckets.append(current)
            current, held = [], 0
    return [*buckets, current] if current else buckets


def bucket_payload_bytes(tensor_bytes: Sequence[int], cap_bytes: int) -> list[int]:
    """Payload of each bucket, see ``buckets``."""
    return [sum_bytes_at(tensor_bytes, places) for places in fill_buckets(tensor_bytes, cap_bytes)]


def sum_bytes_at(tensor_bytes: Sequence[int], places: Iterable[int]) -> int:
    """Bytes of the tensors at ``places``."""
    return sum(tensor_bytes[place] for place in places)


_BIAS_FIRST_KINDS = frozenset({"Linear"})
"""Autograd hands out the gradients of an operator's inputs in their order: ``addmm`` has the bias first, but under
autocast the matrix product of a linear layer has the weight first."""
_HALF_PRECISIONS = frozenset({"bf16", "fp16"})


def gradient_ready_order(table: LayerTable, precision: str = "fp32") -> list[int]:
    """Places in ``table.parameter_tensors`` in the order in which their gradients are complete.

    The layers' backward passes run in the reverse order of their forward passes (autograd takes the node that was made
    last); a tied tensor is complete with the layer that used it first. Not so in a compiled model, whose graph hands
    out all gradients at once.
    """
    by_row: dict[int, list[int]] = {}
    rows = first_use_rows(table)
    for place, row in enumerate(rows):
        by_row.setdefault(row, []).append(place)
    order: list[int] = []
    for row in sorted(by_row, reverse=True):
        kind = table.layers[row].kind
        backwards = kind.endswith(".other") or (kind in _BIAS_FIRST_KINDS and precision not in _HALF_PRECISIONS)
        order += by_row[row][:: -1 if backwards else 1]
    return order


@cached_by_identity(32)
def first_use_rows(table: LayerTable) -> tuple[int, ...]:
    """Return, for each of ``table.parameter_tensors``, the index of the row of ``table.layers`` that uses it first.

    It is the row of the innermost module around the tensor that has one: some parameters are used from outside.
    """
    rows_by_name = first_rows_by_name(table.layers)
    rows = [owning_row(tensor.name, rows_by_name) for tensor in table.parameter_tensors]
    assert None not in rows, "a tensor that belongs to no layer of the table"
    return tuple(row for row in rows if row is not None)


def assign_owners(elements: Sequence[int], ranks: int, largest_first: bool) -> list[list[int]]:
    """Places in ``elements`` that each rank owns: one after another goes to the rank that has least so far.

    ``largest_first`` as torch's ZeroRedundancyOptimizer does it; in the given order as fairscale's OSS does.

    >>> assign_owners([1, 5, 2, 2], 2, largest_first=True)
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


def fsdp_units(table: LayerTable) -> list[list[int]]:
    """Places in ``table.parameter_tensors`` that are gathered together: a unit a block, then what blocks share.

    The last unit is the root's: parameters outside of all blocks that can be parted, because another block uses a
    weight of theirs (a linear layer without parameters of its own has the embedding's). Units without parameters are
    left out, an empty root excepted.
    """
    rows = first_use_rows(table)
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
