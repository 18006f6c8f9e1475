"""The peak memory of a rank, by a walk through one backward pass, row by row, and the update after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.row_cost import RowCost, unsharded_rows
from hpcbench.predict.tensor_sizes import (
    buffer_bytes,
    held_sample_bytes,
    optimizer_tensors,
    saved_sample_bytes,
    update_temporary_bytes,
)
from hpcbench.strategies.gradient_buckets import first_use_rows
from hpcbench.strategies.layer_table import LayerTable


class MemoryBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Live tensor bytes of one rank at its peak, by what they are."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Kept by autograd for the backward pass, of all micro-batches that are alive together."""
    buffers_bytes: int = 0
    """Bytes of BatchNorm's statistics."""
    communication_bytes: int = 0
    """Buckets, gathered parameters, halos: copies that exist to be sent or were received."""
    stashed_bytes: int = 0
    """Further versions of the parameters (PipeDream)."""
    samples_bytes: int = 0
    """Samples on the device; those that the first layer keeps are counted here alone."""
    untouched_bytes: int = 0
    """Reserved and never written to: a CPU has no pages for it, an accelerator keeps it all the same."""
    processor_bytes: int = 0
    """Further bytes of a CPU's peak: weights in oneDNN's layout, temporary tensors of updates that are not fused."""

    def on(self, device: str) -> MemoryBreakdown:
        """Return the memory of a device of that kind, ``cpu`` or ``cuda``."""
        absent = "untouched_bytes" if device == "cpu" else "processor_bytes"
        return msgspec.structs.replace(self, **{absent: 0})

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)


class PersistentMemory(NamedTuple):
    """Bytes that a rank keeps between steps."""

    parameters: int
    gradients: list[int]
    """Bytes of every tensor's gradient on this rank after the backward pass, in the order of the table."""
    gradient_rows: list[int]
    """Row of the table whose backward pass allocates the gradient, for every tensor; see ``gradient_rows`` and
    ``preallocated_gradient_rows``."""
    owned: list[int]
    """Bytes of every tensor that this rank updates, in the order of the table."""
    communication: int = 0
    """Buckets that are never given back."""
    update_spec: RunSpec | None = None
    """The run as the update of ``owned`` sees it; the run itself by default."""


def gradient_rows(spec: RunSpec, table: LayerTable) -> list[int]:
    """Return the row that allocates each gradient: accumulated ones are there from the start."""
    return list(first_use_rows(table)) if spec.micro_batches == 1 else preallocated_gradient_rows(table)


def preallocated_gradient_rows(table: LayerTable) -> list[int]:
    """Return ``PersistentMemory.gradient_rows`` of gradients in memory that is never given back."""
    return [len(table.layers)] * len(table.parameter_tensors)


def filled_bucket_bytes(table: LayerTable, sizes: Sequence[int], buckets: Iterable[Sequence[int]]) -> list[int]:
    """Return, for each row while it runs backwards, the bytes of the largest bucket that it fills.

    While a bucket is filled it exists beside its gradients, which are views of it from then on.

    Args:
        sizes: bytes of every tensor of the table.
        buckets: places of tensors, in the order in which one reducer fills and sends them.
    """
    ready_rows, filled, row = first_use_rows(table), [0] * len(table.layers), len(table.layers) - 1
    for bucket in buckets:
        row = min([row, *(ready_rows[place] for place in bucket if sizes[place])])
        filled[row] = max(filled[row], sum(sizes[place] for place in bucket))
    return filled


def peak_memory(
    spec: RunSpec,
    table: LayerTable,
    persistent: PersistentMemory,
    in_flight: Sequence[int] = (),
    rows: Sequence[RowCost] | None = None,
    buffers: int | None = None,
) -> MemoryBreakdown:
    """Return the memory at the moment of a steady step at which it is largest.

    Args:
        in_flight: bytes of copies in flight, for each row during its backward pass.
        rows: the rank's rows; all of every layer by default.
        buffers: bytes of the rank's buffers; all of them by default.
    """
    activations = _activation_bytes(spec, table, unsharded_rows(spec, table) if rows is None else rows)
    update_spec, owned = persistent.update_spec or spec, persistent.owned
    states = sum(owned) * optimizer_tensors(update_spec).states
    allocated = [0] * (len(table.layers) + 1)
    # New gradients that are added to those that are there from the start.
    accumulated = [0] * len(table.layers)
    tensors_and_rows = zip(persistent.gradients, persistent.gradient_rows, first_use_rows(table), strict=True)
    for size, row, first_use in tensors_and_rows:
        allocated[row] += size
        if row == len(table.layers):
            accumulated[first_use] += size
    moments, gradients = [], allocated.pop()
    for number in range(len(allocated) - 1, -1, -1):
        gradients += allocated[number]
        saved, received, library = activations[number]
        communication = persistent.communication + received + (in_flight[number] if in_flight else 0)
        moments.append((saved, gradients + accumulated[number], states, communication, library))
    kept, temporaries = update_temporary_bytes(update_spec, owned)
    moments.append((0, sum(persistent.gradients), states + kept, persistent.communication, temporaries))
    saved, gradients, optimizer, communication, _ = largest = max(moments, key=lambda moment: sum(moment[:-1]))
    return MemoryBreakdown(
        parameters_bytes=persistent.parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=saved,
        buffers_bytes=sum(buffer_bytes(spec, table)) if buffers is None else buffers,
        communication_bytes=communication,
        samples_bytes=held_sample_bytes(spec, table),
        processor_bytes=max(map(sum, moments)) - sum(largest[:-1]),
    )


def _activation_bytes(spec: RunSpec, table: LayerTable, rows: Sequence[RowCost]) -> list[tuple[int, int, int]]:
    """Return, for each row while it runs backwards, saved bytes with its working set, received ones, the library's.

    Recomputed blocks keep their inputs; the one that runs has been computed again.
    """
    views = spec.batch_size // spec.micro_batches * saved_sample_bytes(spec, table)
    moments, saved, received, block_inputs, block = [], -views, 0, -views, -1
    for layer, row in zip(table.layers, rows, strict=True):
        if spec.activation_checkpointing and layer.block != block:
            # The loss is behind the last block: it keeps no input to be computed again.
            block_inputs += row.block_input_bytes if layer.block < table.blocks else 0
            saved, received, block = block_inputs, 0, layer.block
        saved += row.saved_bytes
        received += row.received_bytes
        moments.append((saved + row.working_bytes - row.library_bytes, received, row.library_bytes))
    return moments
