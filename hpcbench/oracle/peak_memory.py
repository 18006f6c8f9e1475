"""Sizes of parameters and buffers, and the peak memory of a rank.

The peak is found by a walk through one backward pass, layer by layer, and the update after it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, fill_buckets, first_use_rows, sum_bytes_at
from hpcbench.parallel.layer_table import LayerRow, LayerTable, TensorShape, cached_by_run_fields

FP32_BYTES = 4
FP64_BYTES = 8
HALF_BYTES = 2


def element_bytes(spec: RunSpec, tensor: TensorShape) -> int:
    """Of one number of ``tensor`` in the run: fp64 widens floating-point ones, autocast leaves weights as they are."""
    wide = spec.precision == "fp64" and tensor.bytes_per_element == FP32_BYTES
    return FP64_BYTES if wide else tensor.bytes_per_element


def element_count(tensor: TensorShape) -> int:
    """How many numbers it has."""
    return prod(tensor.shape)


def tensor_bytes(spec: RunSpec, tensor: TensorShape) -> int:
    """Size of one parameter or buffer."""
    return element_count(tensor) * element_bytes(spec, tensor)


@cached_by_run_fields("precision")
def parameter_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Sizes of the table's ``parameter_tensors``."""
    return [tensor_bytes(spec, tensor) for tensor in table.parameter_tensors]


@cached_by_run_fields("precision")
def buffer_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Sizes of the table's ``buffers``."""
    return [tensor_bytes(spec, tensor) for tensor in table.buffers]


class MemoryBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Live tensor bytes of one rank when it holds most, by what they are."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """What autograd keeps for the backward pass, the micro-batches that are alive together."""
    buffers_bytes: int = 0
    """BatchNorm's statistics."""
    communication_bytes: int = 0
    """Buckets, gathered parameters, halos: copies that exist to be sent or were received."""
    stashed_bytes: int = 0
    """Further versions of the parameters (PipeDream)."""
    untouched_bytes: int = 0
    """Asked for and never written to. A CPU has no pages for it, an accelerator keeps it all the same."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


_OPTIMIZER_STATES = {"adam": 2, "adamw": 2}
_OPTIMIZER_TEMPORARIES = {"adam": 2, "adamw": 2}
"""Tensors as large as the parameter that is updated, beside its state."""


class PersistentMemory(NamedTuple):
    """What a rank keeps between steps, in bytes."""

    parameters: int
    """Its own, all the time."""
    gradients: list[int]
    """Of every tensor of the table, what is left of its gradient on this rank after the backward pass."""
    made_at: list[int]
    """Of every tensor of the table, the row whose backward pass makes that; see ``gradient_rows`` and
    ``preallocated_gradient_rows``.
    """
    owned: list[int]
    """Of every tensor of the table, the part that this rank updates."""
    communication: int = 0
    """Buckets, all the time."""


class RowMemory(NamedTuple):
    """What one row of the table costs a rank in the backward pass of a micro-batch, in bytes."""

    kept: int
    """For it, since the forward pass."""
    works_with: int
    """Beside that, while it runs."""
    block_input: int
    """What is kept for its block to be computed again, where the row is the block's first."""


def gradient_rows(spec: RunSpec, table: LayerTable) -> list[int]:
    """Gradients that are cleared before a step come one after another; accumulated ones are there."""
    return list(first_use_rows(table)) if spec.micro_batches == 1 else preallocated_gradient_rows(table)


def preallocated_gradient_rows(table: LayerTable) -> list[int]:
    """Gradients in memory that is never given back."""
    return [len(table.layers)] * len(table.parameter_tensors)


def optimizer_state_bytes(spec: RunSpec, owned: list[int]) -> int:
    """The optimizer's state of what a rank updates (momentum, or Adam's two moments)."""
    return sum(owned) * _OPTIMIZER_STATES.get(spec.optimizer, int(spec.momentum > 0))


def bucket_bytes_in_flight(table: LayerTable, sizes: Sequence[int]) -> list[int]:
    """While each row runs backwards: the buckets on their way that hold gradients of ``sizes``, 0 where none is sent.

    As ``worker.reducer`` fills them: one after another from the model's last tensor on, held until all are there.
    """
    places = [place for place, size in enumerate(sizes) if size]
    chosen, made_at, sent = [sizes[place] for place in places], first_use_rows(table), [0] * len(table.layers)
    sent_at = len(table.layers) - 1
    for bucket in fill_buckets(chosen, int(DEFAULT_BUCKET_CAP_MB * MIB)):
        sent_at = min(sent_at, *(made_at[places[one]] for one in bucket))
        sent[sent_at] += sum_bytes_at(chosen, bucket)
    return list(accumulate(reversed(sent)))[::-1]


def peak_memory(
    spec: RunSpec,
    table: LayerTable,
    kept: PersistentMemory,
    underway: Sequence[int] = (),
    rows: Sequence[RowMemory] | None = None,
    buffers: int | None = None,
) -> MemoryBreakdown:
    """The moment of a steady step at which ``kept`` and all that comes and goes are most.

    ``underway``: while each row runs backwards, copies that are to be sent or were just received. ``rows`` and
    ``buffers``: of ranks that have less of them than the whole.
    """
    saved = saved_activation_bytes(spec, table, unsharded_row_memory(spec, table) if rows is None else rows)
    optimizer = optimizer_state_bytes(spec, kept.owned)
    made = [0] * (len(table.layers) + 1)
    for size, row in zip(kept.gradients, kept.made_at, strict=True):
        made[row] += size
    moments, gradients, added = [], made.pop(), _accumulated_gradients(table, kept)
    for number in range(len(made) - 1, -1, -1):
        gradients += made[number]
        copies = underway[number] if underway else 0
        moments.append((saved[number], gradients + added[number], optimizer, kept.communication + copies))
    temporaries = max(kept.owned, default=0) * _OPTIMIZER_TEMPORARIES.get(spec.optimizer, 0)
    moments.append((0, sum(kept.gradients), optimizer + temporaries, kept.communication))
    activations, gradients, optimizer, communication = max(moments, key=sum)
    return MemoryBreakdown(
        parameters_bytes=kept.parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        buffers_bytes=sum(buffer_bytes(spec, table)) if buffers is None else buffers,
        communication_bytes=communication,
    )


def _accumulated_gradients(table: LayerTable, kept: PersistentMemory) -> list[int]:
    """While each row runs backwards: its new gradients, where they are then added to what is there from the start."""
    found = [0] * len(table.layers)
    for size, made_at, row in zip(kept.gradients, kept.made_at, first_use_rows(table), strict=True):
        if made_at == len(table.layers):
            found[row] += size
    return found


def saved_activation_bytes(spec: RunSpec, table: LayerTable, rows: Sequence[RowMemory]) -> list[int]:
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


@cached_by_run_fields("batch_size", "micro_batches", "precision")
def unsharded_row_memory(spec: RunSpec, table: LayerTable) -> list[RowMemory]:
    """Of a rank that has all of every layer.

    A row works with the gradients of its output and input, and a convolution with its weight in the library's layout.
    """
    samples = spec.batch_size // spec.micro_batches
    wide = FP64_BYTES // FP32_BYTES if spec.precision == "fp64" else 1
    found = []
    for layer in table.layers:
        flows = (layer.output_bytes + input_bytes(layer)) * samples
        laid_out = layer.parameters * FP32_BYTES * weight_layout_copies(layer)
        own = (layer.activation_bytes * samples + layer.activation_fixed_bytes) * wide
        found.append(RowMemory(own, (flows + laid_out) * wide, input_bytes(layer) * samples * wide))
    return found


def weight_layout_copies(layer: LayerRow) -> int:
    """How often the library holds a layer's weight in a layout of its own: in 3-D, gradients of it too (measured)."""
    return {"Conv3d": 4}.get(layer.kind, int(layer.kind.startswith("Conv")))


def input_bytes(layer: LayerRow) -> int:
    """Of the row's input, per sample, in fp32."""
    return prod(layer.input_shape) * FP32_BYTES
