"""When a rank holds most: a walk through one backward pass, layer by layer, and the update after it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.cost import Memory
from hpcbench.oracle.tensors import FP32_BYTES, FP64_BYTES, buffer_bytes
from hpcbench.parallel.gradients import first_rows
from hpcbench.parallel.layers import Layer, LayerTable

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


def in_turn(spec: RunSpec, table: LayerTable) -> list[int]:
    """Gradients that are cleared before a step come one after another; accumulated ones are there."""
    return first_rows(table) if spec.micro_batches == 1 else from_the_start(table)


def from_the_start(table: LayerTable) -> list[int]:
    """Gradients in memory that is never given back."""
    return [len(table.layers)] * len(table.parameter_tensors)


def state_bytes(spec: RunSpec, owned: list[int]) -> int:
    """The optimizer's state of what a rank updates (momentum, or Adam's two moments)."""
    return sum(owned) * _STATES.get(spec.optimizer, int(spec.momentum > 0))


def held_at_peak(
    spec: RunSpec,
    table: LayerTable,
    kept: Kept,
    underway: Sequence[int] = (),
    saved: Sequence[int] = (),
    left_over: int = 0,
) -> Memory:
    """The moment of a steady step at which ``kept`` and all that comes and goes are most.

    ``underway``: while each row runs backwards, copies that are to be sent or were just received; ``left_over`` is what
    of them is there when the backward pass has ended. ``saved``: as ``saved_bytes`` says, where layers are shared.
    """
    saved, optimizer = saved or saved_bytes(spec, table), state_bytes(spec, kept.owned)
    made = [0] * (len(table.layers) + 1)
    for size, row in zip(kept.gradients, kept.made_at, strict=True):
        made[row] += size
    moments, gradients = [], made.pop()
    for number in range(len(made) - 1, -1, -1):
        gradients += made[number]
        copies = underway[number] if underway else 0
        moments.append((saved[number], gradients, optimizer, kept.communication + copies))
    temporaries = max(kept.owned, default=0) * _TEMPORARIES.get(spec.optimizer, 0)
    moments.append((0, sum(kept.gradients), optimizer, kept.communication + left_over))
    moments.append((0, sum(kept.gradients), optimizer + temporaries, kept.communication))
    activations, gradients, optimizer, communication = max(moments, key=sum)
    return Memory(
        parameters_bytes=kept.parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        buffers_bytes=sum(buffer_bytes(spec, table)),
        communication_bytes=communication,
    )


def saved_bytes(spec: RunSpec, table: LayerTable) -> list[int]:
    """Of every row: what autograd still keeps while it runs backwards, and what the row itself works with.

    That is the gradients of its output and input, and a convolution's weight in the library's own layout. Recomputed
    blocks keep their inputs; the one that runs has been computed again.
    """
    samples = spec.batch_size // spec.micro_batches
    wide = FP64_BYTES // FP32_BYTES if spec.precision == "fp64" else 1
    own = [(layer.activation_bytes * samples + layer.activation_fixed_bytes) * wide for layer in table.layers]
    found, alive, block_inputs, block = [], 0, 0, -1
    for layer, size in zip(table.layers, own, strict=True):
        if spec.activation_checkpointing and layer.block != block:
            block_inputs += _input_bytes(layer) * samples * wide
            alive, block = block_inputs, layer.block
        alive += size
        flows = (layer.output_bytes + _input_bytes(layer)) * samples
        laid_out = layer.parameters * FP32_BYTES if layer.kind.startswith("Conv") else 0
        found.append(alive + (flows + laid_out) * wide)
    return found


def _input_bytes(layer: Layer) -> int:
    return prod(layer.input_shape) * FP32_BYTES
