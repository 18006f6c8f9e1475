"""Steps of the data-parallel family: whole replicas whose gradients meet bucket by bucket (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import whole_passes
from hpcbench.oracle.placement import Group, group_of
from hpcbench.oracle.step import ALL, StepTime, later, of_events
from hpcbench.oracle.steps.passes import Around, backward, forward, update
from hpcbench.oracle.streams import Call, Event, Repeat
from hpcbench.oracle.tensors import parameter_bytes
from hpcbench.parallel.gradients import first_rows
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.traffic import Traffic

Bucket = tuple[Iterable[int], list[Traffic]]
"""Places of the tensors whose gradients it holds, and the calls that are made once all of them are there."""
_GLOO_THREADS = 2
"""Of a process group's calls gloo has so many under way at once (torch's ``ProcessGroupGloo::Options``), NCCL one."""


def step_of_replica(
    clock: Clock,
    spec: RunSpec,
    table: LayerTable,
    *,
    before: Sequence[Traffic] = (),
    buckets: Sequence[Bucket] = (),
    after_update: Sequence[Traffic] = (),
    updated: Sequence[float] | None = None,
    one_an_owner: bool = False,
) -> StepTime:
    """A step of one replica: ``before`` is passed before it, ``after_update`` behind it, one call after another.

    ``updated``: bytes of each tensor that the rank updates, of all where absent. ``one_an_owner``: of buckets and of
    ``after_update`` each call has another root than the one before, and none is waited for alone.
    """
    group = group_of(spec, "dp")
    passes = whole_passes(spec, table)

    def events() -> Iterator[Event]:
        yield from _waited(clock, before, group)
        if spec.micro_batches > 1:
            once = [*forward(clock, passes), *backward(clock, spec, table, passes)]
            yield Repeat(spec.micro_batches - 1, once)
        yield from forward(clock, passes)
        sends = sent_when_ready(clock, table, buckets, group, one_an_owner)
        yield from backward(clock, spec, table, passes, after=sends)
        yield ALL
        yield from update(clock, spec, parameter_bytes(spec, table) if updated is None else updated)
        if one_an_owner:
            yield from _side_by_side(clock, (later(one, "owner") for one in _waited(clock, after_update, group)))
            yield ALL
        else:
            yield from _waited(clock, after_update, group)

    return of_events(clock, events())


def sent_when_ready(
    clock: Clock, table: LayerTable, buckets: Sequence[Bucket], group: Group, one_an_owner: bool = False
) -> Around:
    """After a row has run backwards: the buckets whose last gradient it made, in the buckets' order."""
    made_at = first_rows(table)
    due: dict[int, list[Call]] = {}
    row = len(table.layers)
    for places, calls in buckets:
        # Buckets are sent in their order: one that is complete waits for those before it.
        row = min([row, *(made_at[place] for place in places)])
        for call in calls:
            due.setdefault(row, []).extend(later(one, "bucket") for one in clock.calls(call, group))
    if one_an_owner:
        # Rows come in the order in which they run backwards.
        sent = _side_by_side(clock, chain.from_iterable(list(due.values())))
        due = {row: list(islice(sent, len(calls))) for row, calls in due.items()}
    return lambda number: due.get(number, ())


def _waited(clock: Clock, calls: Sequence[Traffic], group: Group) -> Iterator[Call]:
    for call in calls:
        yield from clock.calls(call, group)


def _side_by_side(clock: Clock, calls: Iterable[Call]) -> Iterator[Call]:
    """Calls with a root are bound by their root's link: with different roots they are not in each other's way."""
    lanes = 1 if clock.machine.device == "cuda" else _GLOO_THREADS
    for number, call in enumerate(calls):
        yield call._replace(lane=f"{call.lane}{number % lanes}", wire=f"{call.wire}{number % lanes}")
