"""Steps of the data-parallel family: whole replicas whose gradients meet bucket by bucket (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import whole_passes
from hpcbench.oracle.placement import Group, group_of
from hpcbench.oracle.step import ALL, StepTime, later, of_events
from hpcbench.oracle.steps.passes import Around, backward, forward, update
from hpcbench.oracle.streams import Event, Repeat
from hpcbench.oracle.tensors import parameter_bytes
from hpcbench.parallel.gradients import first_rows
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.traffic import Traffic

Bucket = tuple[Iterable[int], list[Traffic]]
"""Places of the tensors whose gradients it holds, and the calls that are made once all of them are there."""


def step_of_replica(
    clock: Clock,
    spec: RunSpec,
    table: LayerTable,
    *,
    before: Sequence[Traffic] = (),
    buckets: Sequence[Bucket] = (),
    after_update: Sequence[Traffic] = (),
    updated: Sequence[float] | None = None,
) -> StepTime:
    """A step of one replica: ``before`` is passed before it, ``after_update`` behind it, one call after another.

    ``updated``: bytes of each tensor that the rank updates, of all where absent.
    """
    group = group_of(spec, "dp")
    passes = whole_passes(spec, table)

    def events() -> Iterator[Event]:
        yield from _waited(clock, before, group)
        if spec.micro_batches > 1:
            once = [*forward(clock, passes), *backward(clock, spec, table, passes)]
            yield Repeat(spec.micro_batches - 1, once)
        yield from forward(clock, passes)
        sends = sent_when_ready(clock, table, buckets, group)
        yield from backward(clock, spec, table, passes, after=sends)
        yield ALL
        yield from update(clock, spec, parameter_bytes(spec, table) if updated is None else updated)
        yield from _waited(clock, after_update, group)

    return of_events(clock, events())


def sent_when_ready(clock: Clock, table: LayerTable, buckets: Sequence[Bucket], group: Group) -> Around:
    """After a row has run backwards: the buckets whose last gradient it made, in the buckets' order."""
    made_at = first_rows(table)
    due: dict[int, list[Event]] = {}
    row = len(table.layers)
    for places, calls in buckets:
        # Buckets are sent in their order: one that is complete waits for those before it.
        row = min([row, *(made_at[place] for place in places)])
        for call in calls:
            due.setdefault(row, []).extend(later(one, "bucket") for one in clock.calls(call, group))
    return lambda number: due.get(number, ())


def _waited(clock: Clock, calls: Sequence[Traffic], group: Group) -> Iterator[Event]:
    for call in calls:
        yield from clock.calls(call, group)
