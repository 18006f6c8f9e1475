"""Steps of ranks that share layers: calls around rows, and gradients bucket by bucket (``worker.reducer``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import FORWARD, Kernel, Pass, whole_passes
from hpcbench.oracle.moves import Move
from hpcbench.oracle.placement import Group, group_of
from hpcbench.oracle.step import StepTime, of_events
from hpcbench.oracle.steps.passes import update
from hpcbench.oracle.streams import Compute, Event, Repeat, Wait
from hpcbench.parallel.buckets import BUCKET_CAP_MB, MIB, buckets
from hpcbench.parallel.gradients import first_rows
from hpcbench.parallel.layers import LayerTable

COPY = "copy"
"""Kind of the kernels that lay tensors side by side, pad them or take them apart."""


class RowEvents(NamedTuple):
    """What a rank does for one row of the table in one micro-batch."""

    forward: Sequence[Event]
    backward: Sequence[Event]
    again: Sequence[Event]
    """When the row is computed again for the backward pass (``activation_checkpointing``)."""
    behind: Sequence[Event] = ()
    """After ``backward``, once what is made of its gradients is on its way."""


class Reducer(NamedTuple):
    """One ``GradientReducer``: it adds up gradients over ``group``, in the order of its buckets."""

    group: Group
    lane: str
    buckets: Sequence[Sequence[int]]
    """Places in the table's ``parameter_tensors``."""


def step_of_rows(
    clock: Clock, spec: RunSpec, table: LayerTable, rows: Sequence[RowEvents], sizes: Sequence[int],
    reducers: Sequence[Reducer] = (),
) -> StepTime:  # fmt: skip
    """A step of the rank that does ``rows`` and has parameters of ``sizes`` bytes, all of which it updates."""
    return of_events(clock, _events(clock, spec, table, rows, sizes, reducers))


def _events(
    clock: Clock, spec: RunSpec, table: LayerTable, rows: Sequence[RowEvents], sizes: Sequence[int],
    reducers: Sequence[Reducer],
) -> Iterator[Event]:  # fmt: skip
    if spec.micro_batches > 1:
        yield Repeat(spec.micro_batches - 1, list(_micro_batch(spec, table, rows, {})))
    yield from _micro_batch(spec, table, rows, _sends(clock, spec, table, sizes, reducers))
    copies = {size: copied(clock, spec, size) for size in set(sizes)} if reducers else {}
    for reducer in reducers:
        for number, places in enumerate(reducer.buckets):
            yield Wait(_key(reducer, number))
            yield Compute(sum(copies[sizes[place]].seconds for place in places))
    yield from update(clock, spec, sizes)


def _micro_batch(
    spec: RunSpec, table: LayerTable, rows: Sequence[RowEvents], sends: dict[int, list[Event]]
) -> Iterator[Event]:
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


def _sends(
    clock: Clock, spec: RunSpec, table: LayerTable, sizes: Sequence[int], reducers: Sequence[Reducer]
) -> dict[int, list[Event]]:
    """By row: the buckets whose last gradient it makes, laid together and handed over in the buckets' order."""
    made_at = first_rows(table)
    due: dict[int, list[Event]] = {}
    for reducer in reducers:
        row = len(table.layers)
        for number, places in enumerate(reducer.buckets):
            row = min(row, *(made_at[place] for place in places))
            payload = sum(sizes[place] for place in places)
            call = clock.call("all_reduce", payload, reducer.group, _key(reducer, number), reducer.lane)
            due.setdefault(row, []).extend((copied(clock, spec, payload), call))
    return due


def _key(reducer: Reducer, number: int) -> str:
    return f"{reducer.lane} {number}"


def copied(clock: Clock, spec: RunSpec, size_bytes: float) -> Compute:
    """So many bytes read and written again."""
    kernel = Kernel(
        kind=COPY,
        direction=FORWARD,
        precision=spec.precision,
        flops=0.0,
        moved_bytes=2.0 * size_bytes,
        weight_bytes=0.0,
        input_bytes=size_bytes,
        output_bytes=size_bytes,
    )
    return Compute(clock.kernel_s(kernel))


def moved(clock: Clock, spec: RunSpec, moves: Iterable[Move], group: Group, lane: str = "tp") -> list[Event]:
    """Copies and calls of ``group``, each waited for."""
    found: list[Event] = []
    for one in moves:
        if one.copied_bytes:
            found.append(copied(clock, spec, one.copied_bytes))
        if one.traffic is not None:
            found.append(clock.call(one.traffic.operation, one.traffic.payload_bytes, group, None, lane))
    return found


def alone(clock: Clock, one: Pass) -> RowEvents:
    """A row that the rank computes by itself."""
    forward = [Compute(clock.kernel_s(one.forward))]
    return RowEvents(forward, [Compute(clock.kernel_s(one.backward))], forward)


def whole_rows(clock: Clock, spec: RunSpec, table: LayerTable) -> list[RowEvents]:
    """Of a rank that shares nothing."""
    return [alone(clock, one) for one in whole_passes(spec, table)]


def replica_reducer(spec: RunSpec, sizes: Sequence[int]) -> list[Reducer]:
    """All gradients across replicas, as ``worker.strategies.model_parallel`` adds them up."""
    if spec.dp_degree == 1:
        return []
    return [Reducer(group_of(spec, "dp"), "dp", buckets(sizes, int(BUCKET_CAP_MB * MIB)))]
