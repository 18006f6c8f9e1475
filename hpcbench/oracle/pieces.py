"""A model cut into chunks: what of its table of layers each of them has, whoever computes it."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.memo import once_per


class TiedWeight(NamedTuple):
    """A weight that several chunks use."""

    name: str
    size_bytes: int
    chunks: tuple[int, ...]


class Pieces(NamedTuple):
    """An entry a chunk in each list."""

    rows: list[list[int]]
    """Places in the table's ``layers``; the loss is the last chunk's."""
    tensors: list[list[int]]
    """Places in the table's ``parameter_tensors``, tied ones left out."""
    buffers: list[list[int]]
    """Places in the table's ``buffers``."""
    ties: list[TiedWeight]
    """Of the whole model."""
    outputs_bytes: list[int]
    """What is handed on, per sample: the output of the last row of the last block."""
    activations_bytes: list[tuple[int, int]]
    """What autograd keeps per sample, and for the batch."""


@once_per(64)
def pieces_of(table: LayerTable, blocks: tuple[range, ...]) -> Pieces:
    """``table`` with so many ``blocks`` in each chunk, in order. Bytes are of fp32."""
    chunk_of = [chunk for chunk, held in enumerate(blocks) for _ in held]
    rows: list[list[int]] = [[] for _ in blocks]
    for number, row in enumerate(table.layers):
        rows[chunk_of[min(row.block, table.blocks - 1)]].append(number)
    ties = _ties(table, chunk_of)
    tied = {tie.name for tie in ties}
    tensors: list[list[int]] = [[] for _ in blocks]
    for place, one in enumerate(table.parameter_tensors):
        if one.name not in tied:
            tensors[chunk_of[_block(one.name)]].append(place)
    buffers: list[list[int]] = [[] for _ in blocks]
    for place, one in enumerate(table.buffers):
        buffers[chunk_of[_block(one.name)]].append(place)
    layers = [[table.layers[row] for row in own] for own in rows]
    return Pieces(
        rows,
        tensors,
        buffers,
        ties,
        [own[-1].output_bytes for own in layers],
        [(sum(one.activation_bytes for one in own), sum(one.activation_fixed_bytes for one in own)) for own in layers],
    )


def _ties(table: LayerTable, chunk_of: list[int]) -> list[TiedWeight]:
    """Linear layers without weights of their own use an earlier block's of the same shape."""
    found: list[TiedWeight] = []
    for row in table.layers:
        shape = [row.attributes.get("out_features"), row.attributes.get("in_features")]
        if row.kind != "Linear" or row.parameters >= prod(one or 0 for one in shape):
            continue
        owner = next(one for one in table.parameter_tensors if one.shape == shape)
        chunks = (chunk_of[_block(owner.name)], chunk_of[_block(row.name)])
        if chunks[0] != chunks[1]:
            found.append(TiedWeight(owner.name, owner.bytes_per_element * prod(owner.shape), chunks))
    return found


def _block(name: str) -> int:
    return int(name.partition(".")[0])
