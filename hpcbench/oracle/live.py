"""When a rank holds most: a walk through one backward pass, layer by layer, and the update after it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.tensors import FP32_BYTES, FP64_BYTES, buffer_bytes
from hpcbench.parallel.buckets import BUCKET_CAP_MB, MIB, buckets, total
from hpcbench.parallel.gradients import first_rows
from hpcbench.parallel.layers import Layer, LayerTable
from hpcbench.parallel.memo import of_run

_STATES = {"adam": 2, "adamw": 2}
_TEMPORARIES = {"adam": 2, "adamw": 2}
"""Tensors as large as the parameter that is updated, beside its state."""


class Kept(NamedTuple):
    """What a rank keeps between steps, in bytes."""

    parameters: int
    """Its own, all the time."""
    gradients: list[int]
    """Of every tensor of the table, what is left of its gradient on this rank after the backward pass."""
    made_at: list[int]
    """Of every tensor of the table, the row whose backward pass makes that; see ``in_turn`` and ``from_the_start``."""
    owned: list[int]
    """Of every tensor of the table, the part that this rank updates."""
    communication: int = 0
    """Buckets, all the time."""


class Row(NamedTuple):
    """What one row of the table costs a rank in the backward pass of a micro-batch, in bytes."""

    kept: int
    """For it, since the forward pass."""
    works_with: int
    """Beside that, while it runs."""
    block_input: int
    """What is kept for its block to be computed again, where the row is the block's first."""


def in_turn(spec: RunSpec, table: LayerTable) -> list[int]:
    """Gradients that are cleared before a step come one after another; accumulated ones are there."""
    return list(first_rows(table)) if spec.micro_batches == 1 else from_the_start(table)


def from_the_start(table: LayerTable) -> list[int]:
    """Gradients in memory that is never given back."""
    return [len(table.layers)] * len(table.parameter_tensors)


def state_bytes(spec: RunSpec, owned: list[int]) -> int:
    """The optimizer's state of what a rank updates (momentum, or Adam's two moments)."""
    return sum(owned) * _STATES.get(spec.optimizer, int(spec.momentum > 0))


def sent_at_once(table: LayerTable, sizes: Sequence[int]) -> list[int]:
    """While each row runs backwards: the buckets on their way that hold gradients of ``sizes``, 0 where none is sent.

    As ``worker.reducer`` fills them: one after another from the model's last tensor on, held until all are there.
    """
    places = [place for place, size in enumerate(sizes) if size]
    chosen, made_at, sent = [sizes[place] for place in places], first_rows(table), [0] * len(table.layers)
    sent_at = len(table.layers) - 1
    for bucket in buckets(chosen, int(BUCKET_CAP_MB * MIB)):
        sent_at = min(sent_at, *(made_at[places[one]] for one in bucket))
        sent[sent_at] += total(chosen, bucket)
    return list(accumulate(reversed(sent)))[::-1]


def held_at_peak(
    spec: RunSpec,
    table: LayerTable,
    kept: Kept,
    underway: Sequence[int] = (),
    rows: Sequence[Row] | None = None,
    buffers: int | None = None,
) -> Memory:
    """The moment of a steady step at which ``kept`` and all that comes and goes are most.

    ``underway``: while each row runs backwards, copies that are to be sent or were just received. ``rows`` and
    ``buffers``: of ranks that have less of them than the whole.
    """
    saved = saved_bytes(spec, table, whole_rows(spec, table) if rows is None else rows)
    optimizer = state_bytes(spec, kept.owned)
    made = [0] * (len(table.layers) + 1)
    for size, row in zip(kept.gradients, kept.made_at, strict=True):
        made[row] += size
    moments, gradients, added = [], made.pop(), _added(table, kept)
    for number in range(len(made) - 1, -1, -1):
        gradients += made[number]
        copies = underway[number] if underway else 0
        moments.append((saved[number], gradients + added[number], optimizer, kept.communication + copies))
    temporaries = max(kept.owned, default=0) * _TEMPORARIES.get(spec.optimizer, 0)
    moments.append((0, sum(kept.gradients), optimizer + temporaries, kept.communication))
    activations, gradients, optimizer, communication = max(moments, key=sum)
    return Memory(
        parameters_bytes=kept.parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        buffers_bytes=sum(buffer_bytes(spec, table)) if buffers is None else buffers,
        communication_bytes=communication,
    )


def _added(table: LayerTable, kept: Kept) -> list[int]:
    """While each row runs backwards: its new gradients, where they are then added to what is there from the start."""
    found = [0] * len(table.layers)
    for size, made_at, row in zip(kept.gradients, kept.made_at, first_rows(table), strict=True):
        if made_at == len(table.layers):
            found[row] += size
    return found


def saved_bytes(spec: RunSpec, table: LayerTable, rows: Sequence[Row]) -> list[int]:
    """Of every row: what autograd still keeps while it runs backwards, and what the row itself works with.

    Recomputed blocks keep their inputs; the one that runs has been computed again.
    """
    found, alive, block_inputs, block = [], 0, 0, -1
    for layer, row in zip(table.layers, rows, strict=True):
        if spec.activation_checkpointing and layer.block != block:
            block_inputs += row.block_input
            alive, block = block_inputs, layer.block
        alive += row.kept
        found.append(alive + row.works_with)
    return found


@of_run("batch_size", "micro_batches", "precision")
def whole_rows(spec: RunSpec, table: LayerTable) -> list[Row]:
    """Of a rank that has all of every layer.

    A row works with the gradients of its output and input, and a convolution with its weight in the library's layout.
    """
    samples = spec.batch_size // spec.micro_batches
    wide = FP64_BYTES // FP32_BYTES if spec.precision == "fp64" else 1
    found = []
    for layer in table.layers:
        flows = (layer.output_bytes + input_bytes(layer)) * samples
        laid_out = layer.parameters * FP32_BYTES * layouts(layer)
        own = (layer.activation_bytes * samples + layer.activation_fixed_bytes) * wide
        found.append(Row(own, (flows + laid_out) * wide, input_bytes(layer) * samples * wide))
    return found


def layouts(layer: Layer) -> int:
    """How often the library holds a layer's weight in a layout of its own: in 3-D, gradients of it too (measured)."""
    return {"Conv3d": 4}.get(layer.kind, int(layer.kind.startswith("Conv")))


def input_bytes(layer: Layer) -> int:
    """Of the row's input, per sample, in fp32."""
    return prod(layer.input_shape) * FP32_BYTES
