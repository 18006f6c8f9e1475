"""Communication around the layers of a model-parallel rank, and the step that such a rank makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel, RowKernels, unsharded_row_kernels
from hpcbench.oracle.placement import GroupPlacement, place_group
from hpcbench.oracle.step_time import StepBreakdown, step_from_events, update_events
from hpcbench.oracle.stream_simulator import ComputeEvent, RepeatEvent, StreamEvent, WaitEvent
from hpcbench.parallel.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, fill_buckets, first_use_rows
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.roofline import FORWARD, Kernel
from hpcbench.parallel.traffic import Traffic


class CommOp(NamedTuple):
    """One operation on a tensor of one micro-batch."""

    operation: str
    copied_bytes: int
    """Of the tensor that is laid together, taken apart, narrowed or kept beside the sum; 0 where it stays in place."""
    traffic: Traffic | None
    """``None`` where nothing is sent."""


class LayerComm(NamedTuple):
    """The operations around one row of the table, once a micro-batch, each in this order."""

    enter: list[CommOp]
    leave: list[CommOp]
    leave_backward: list[CommOp]
    enter_backward: list[CommOp]
    is_left_again: bool
    """Whether a block that is computed again comes as far as behind this row."""

    def calls(self, recomputes: bool) -> Iterator[Traffic]:
        """What is passed in all."""
        moves = [*self.enter, *self.leave, *self.leave_backward, *self.enter_backward]
        if recomputes:
            moves += self.again
        yield from (one.traffic for one in moves if one.traffic is not None)

    @property
    def again(self) -> list[CommOp]:
        """Of a row that is computed again."""
        return [*self.enter, *(self.leave if self.is_left_again else ())]


NO_COMM = LayerComm([], [], [], [], is_left_again=False)


COPY_KIND = "copy"
"""Kind of the kernels that lay tensors side by side, pad them or take them apart."""


class RowEvents(NamedTuple):
    """What a rank does for one row of the table in one micro-batch."""

    forward: Sequence[StreamEvent]
    backward: Sequence[StreamEvent]
    again: Sequence[StreamEvent]
    """When the row is computed again for the backward pass (``activation_checkpointing``)."""
    behind: Sequence[StreamEvent] = ()
    """After ``backward``, once what is made of its gradients is on its way."""


class ReductionPlan(NamedTuple):
    """One ``GradientReducer``: it adds up gradients over ``group``, in the order of its buckets."""

    group: GroupPlacement
    lane: str
    buckets: Sequence[Sequence[int]]
    """Places in the table's ``parameter_tensors``."""


def model_parallel_step(
    clock: CostModel, spec: RunSpec, table: LayerTable, rows: Sequence[RowEvents], sizes: Sequence[int],
    reducers: Sequence[ReductionPlan] = (),
) -> StepBreakdown:  # fmt: skip
    """A step of the rank that does ``rows`` and has parameters of ``sizes`` bytes, all of which it updates."""
    return step_from_events(clock, _step_events(clock, spec, table, rows, sizes, reducers))


def _step_events(
    clock: CostModel, spec: RunSpec, table: LayerTable, rows: Sequence[RowEvents], sizes: Sequence[int],
    reducers: Sequence[ReductionPlan],
) -> Iterator[StreamEvent]:  # fmt: skip
    if spec.micro_batches > 1:
        yield RepeatEvent(spec.micro_batches - 1, list(_micro_batch_events(spec, table, rows, {})))
    yield from _micro_batch_events(spec, table, rows, _bucket_events(clock, spec, table, sizes, reducers))
    copies = {size: copy_event(clock, spec, size) for size in set(sizes)} if reducers else {}
    for reducer in reducers:
        for number, places in enumerate(reducer.buckets):
            yield WaitEvent(_bucket_key(reducer, number))
            yield ComputeEvent(sum(copies[sizes[place]].seconds for place in places))
    yield from update_events(clock, spec, sizes)


def _micro_batch_events(
    spec: RunSpec, table: LayerTable, rows: Sequence[RowEvents], sends: dict[int, list[StreamEvent]]
) -> Iterator[StreamEvent]:
    """Forward and backward; ``sends`` are what follows the backward pass of a row."""
    for row in rows:
        yield from row.forward
    blocks: dict[int, list[int]] = {}
    if spec.activation_checkpointing:
        for number, layer in enumerate(table.layers):
            blocks.setdefault(layer.block, []).append(number)
        blocks.pop(table.blocks, None)
    for number in range(len(rows) - 1, -1, -1):
        for other in blocks.pop(table.layers[number].block, ()):
            yield from rows[other].again
        yield from rows[number].backward
        yield from sends.get(number, ())
        yield from rows[number].behind


def _bucket_events(
    clock: CostModel, spec: RunSpec, table: LayerTable, sizes: Sequence[int], reducers: Sequence[ReductionPlan]
) -> dict[int, list[StreamEvent]]:
    """By row: the buckets whose last gradient it makes, laid together and handed over in the buckets' order."""
    made_at = first_use_rows(table)
    due: dict[int, list[StreamEvent]] = {}
    for reducer in reducers:
        row = len(table.layers)
        for number, places in enumerate(reducer.buckets):
            row = min(row, *(made_at[place] for place in places))
            payload = sum(sizes[place] for place in places)
            call = clock.call("all_reduce", payload, reducer.group, _bucket_key(reducer, number), reducer.lane)
            due.setdefault(row, []).extend((copy_event(clock, spec, payload), call))
    return due


def _bucket_key(reducer: ReductionPlan, number: int) -> str:
    return f"{reducer.lane} {number}"


def copy_event(clock: CostModel, spec: RunSpec, size_bytes: float) -> ComputeEvent:
    """So many bytes read and written again."""
    kernel = Kernel(
        kind=COPY_KIND,
        direction=FORWARD,
        precision=spec.precision,
        flops=0.0,
        moved_bytes=2.0 * size_bytes,
        weight_bytes=0.0,
        input_bytes=size_bytes,
        output_bytes=size_bytes,
    )
    return ComputeEvent(clock.kernel_s(kernel))


def comm_events(
    clock: CostModel, spec: RunSpec, moves: Iterable[CommOp], group: GroupPlacement, lane: str = "tp"
) -> list[StreamEvent]:
    """Copies and calls of ``group``, each waited for."""
    found: list[StreamEvent] = []
    for one in moves:
        if one.copied_bytes:
            found.append(copy_event(clock, spec, one.copied_bytes))
        if one.traffic is not None:
            found.append(clock.call(one.traffic.operation, one.traffic.payload_bytes, group, None, lane))
    return found


def local_row_events(clock: CostModel, one: RowKernels) -> RowEvents:
    """A row that the rank computes by itself."""
    forward = [ComputeEvent(clock.kernel_s(one.forward))]
    return RowEvents(forward, [ComputeEvent(clock.kernel_s(one.backward))], forward)


def unsharded_row_events(clock: CostModel, spec: RunSpec, table: LayerTable) -> list[RowEvents]:
    """Of a rank that shares nothing."""
    return [local_row_events(clock, one) for one in unsharded_row_kernels(spec, table)]


def replica_reductions(spec: RunSpec, sizes: Sequence[int]) -> list[ReductionPlan]:
    """All gradients across replicas, as ``worker.strategies.model_parallel`` adds them up."""
    if spec.dp_degree == 1:
        return []
    return [ReductionPlan(place_group(spec, "dp"), "dp", fill_buckets(sizes, int(DEFAULT_BUCKET_CAP_MB * MIB)))]
