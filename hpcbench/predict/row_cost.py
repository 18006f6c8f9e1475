"""The description of one row of the layer table on one rank, from which traffic, memory and step time all follow.

A family of strategies describes each row once, as operations that do not depend on the machine::

    forward           [all_gather] [kernel] [all_reduce] [copy]
    recompute         [all_gather] [kernel]                        activation checkpointing; as forward by default
    backward          [all_gather] [kernel]
    after_backward                          [reduce_scatter]       behind the gradient buckets that the row fills

``row_traffic`` counts the collectives, ``peak_memory`` adds up the bytes, ``row_events`` prices the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel, unsharded_row_kernels
from hpcbench.predict.kernel_prices import COPY_KIND, FORWARD, Kernel
from hpcbench.predict.placement import GroupPlacement
from hpcbench.predict.stream_simulator import ComputeEvent, StreamEvent, WaitEvent
from hpcbench.predict.tensor_sizes import (
    FP32_BYTES,
    cast_weight_bytes,
    input_bytes,
    input_gradient_bytes,
    row_number_bytes,
    saved_row_bytes,
    weight_layout_copies,
)
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.layer_table import LayerTable, cached_by_run_fields
from hpcbench.strategies.traffic import Traffic


class ComputeOp(NamedTuple):
    """A kernel on the computing stream, or a part of it."""

    kernel: Kernel
    fraction: float = 1.0


class CollectiveOp(NamedTuple):
    """A call of a process group."""

    operation: str
    payload_bytes: int
    """Counted as ``strategies.traffic.Traffic`` counts it."""
    group: GroupPlacement
    stream: str
    key: str | None = None
    """Name for a later ``WaitEvent``; the computing stream waits at once without one."""
    shares_latency: bool = False
    """Another call on the same link has paid the latency already."""

    @property
    def traffic(self) -> Traffic:
        return Traffic(operation=self.operation, group_size=self.group.ranks, payload_bytes=self.payload_bytes)


RowOp = ComputeOp | CollectiveOp | WaitEvent


class RowCost(NamedTuple):
    """The cost of a row of the table on a rank, for one micro-batch. All sizes are bytes on the rank."""

    forward: Sequence[RowOp]
    backward: Sequence[RowOp]
    after_backward: Sequence[RowOp] = ()
    recompute: Sequence[RowOp] | None = None
    """The forward pass when its block is computed again; ``None``: the same as ``forward``."""
    saved_bytes: int = 0
    """Kept by autograd from the forward to the backward pass."""
    received_bytes: int = 0
    """Kept as long as that, but received from other ranks: counted as communication."""
    working_bytes: int = 0
    """Alive beside that while the row runs backwards."""
    library_bytes: int = 0
    """Weights in the layout of a CPU's library, a part of ``working_bytes``."""
    block_input_bytes: int = 0
    """Kept for its block to be computed again, where the row is the block's first."""

    @property
    def recomputed(self) -> Sequence[RowOp]:
        return self.forward if self.recompute is None else self.recompute


def copy_op(spec: RunSpec, size_bytes: float) -> ComputeOp:
    """Return the kernel that reads so many bytes and writes them again."""
    return ComputeOp(
        Kernel(COPY_KIND, FORWARD, spec.compute_precision, 0.0, 2.0 * size_bytes, 0.0, size_bytes, size_bytes)
    )


@cached_by_run_fields("batch_size", "micro_batches", "precision", "strategy")
def unsharded_rows(spec: RunSpec, table: LayerTable) -> list[RowCost]:
    """Return every row on a rank that holds all of every layer.

    A row works with the gradients of its output and input, and a convolution with its weight in the library's layout. A
    split backward pass casts a weight again instead of keeping autocast's copy.
    """
    samples, splits = spec.batch_size // spec.micro_batches, get_strategy(spec.strategy).pipeline.splits_backward
    rows = []
    for layer, kernels in zip(table.layers, unsharded_row_kernels(spec, table), strict=True):
        number_bytes = row_number_bytes(spec, layer)
        gradients = (layer.output_bytes + input_gradient_bytes(layer)) * samples
        library = layer.parameters * weight_layout_copies(spec, layer) * number_bytes
        cast = cast_weight_bytes(spec, layer) if splits else 0
        rows.append(
            RowCost(
                [ComputeOp(kernels.forward)],
                [ComputeOp(kernels.backward)],
                saved_bytes=saved_row_bytes(spec, layer, samples) - cast,
                working_bytes=gradients * number_bytes // FP32_BYTES + cast + library,
                library_bytes=library,
                block_input_bytes=input_bytes(layer) * samples * number_bytes // FP32_BYTES,
            )
        )
    return rows


def row_traffic(spec: RunSpec, rows: Iterable[RowCost]) -> list[Traffic]:
    """Return the calls of one micro-batch."""
    calls = []
    for row in rows:
        recomputed = row.recomputed if spec.activation_checkpointing else ()
        for operation in (*row.forward, *row.backward, *row.after_backward, *recomputed):
            if isinstance(operation, CollectiveOp):
                calls.append(operation.traffic)
    return calls


def row_events(cost_model: CostModel, operations: Iterable[RowOp]) -> Iterator[StreamEvent]:
    """Price ``operations`` on one machine."""
    for operation in operations:
        if isinstance(operation, ComputeOp):
            yield ComputeEvent(cost_model.kernel_s(operation.kernel) * operation.fraction)
        elif isinstance(operation, CollectiveOp):
            call = cost_model.collective(*operation[:3], operation.key, operation.stream)
            if operation.shares_latency:
                call = call._replace(seconds=call.seconds - call.latency_s, latency_s=0.0)
            yield call
        else:
            yield operation


EventsAtRow = Callable[[int], Iterable[StreamEvent]]
"""Further events at the row of that number."""


def no_events(_: int) -> Iterable[StreamEvent]:
    return ()


def micro_batch_events(
    cost_model: CostModel,
    spec: RunSpec,
    table: LayerTable,
    rows: Sequence[RowCost],
    *,
    before_forward: EventsAtRow = no_events,
    before_backward: EventsAtRow = no_events,
    after_backward: EventsAtRow = no_events,
) -> Iterator[StreamEvent]:
    """Yield the events of one forward and one backward pass, row by row.

    With activation checkpointing a block is computed again before its last row runs backwards.
    """
    for number, row in enumerate(rows):
        yield from before_forward(number)
        yield from row_events(cost_model, row.forward)
    recomputed_blocks: dict[int, list[int]] = {}
    if spec.activation_checkpointing:
        for number, layer in enumerate(table.layers):
            recomputed_blocks.setdefault(layer.block, []).append(number)
        # The loss is behind the last block.
        recomputed_blocks.pop(table.blocks, None)
    for number in range(len(rows) - 1, -1, -1):
        for other in recomputed_blocks.pop(table.layers[number].block, ()):
            yield from row_events(cost_model, rows[other].recomputed)
        yield from before_backward(number)
        yield from row_events(cost_model, rows[number].backward)
        yield from after_backward(number)
        yield from row_events(cost_model, rows[number].after_backward)
