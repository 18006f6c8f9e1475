"""Steps of sharded data parallelism: parameters gathered unit by unit, one unit ahead (Zhao et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import whole_passes
from hpcbench.oracle.placement import Group
from hpcbench.oracle.step import ALL, StepTime, of_events
from hpcbench.oracle.steps.passes import backward, forward, nothing, update
from hpcbench.oracle.streams import Call, Event, Repeat, Wait
from hpcbench.parallel.gradients import first_rows
from hpcbench.parallel.layers import LayerTable


class Unit(NamedTuple):
    """Parameters that travel together, and what is passed for them. Payloads as ``parallel.traffic.Traffic`` has them.

    Without a payload nothing is passed.
    """

    places: Sequence[int]
    """In the table's ``parameter_tensors``."""
    gathered: Sequence[float]
    """Own parts, a call each."""
    reduced: Sequence[float]
    """Whole gradients, a call each."""
    replicated: Sequence[float] = ()
    """Shards that are all_reduced across copies of the shards (hybrid sharding)."""
    stays: bool = False
    """Gathered once a step: for the forward pass of its first micro-batch."""


class Plan(NamedTuple):
    """How the units travel."""

    within: Group
    across: Group
    regathers: bool
    """Whether units are gathered again for the backward pass."""
    every_micro_batch: bool
    """Whether they are gathered anew for every micro-batch."""
    ahead: bool
    """Whether the next unit is gathered while one computes."""
    updated: Sequence[float]


def step_of_shards(clock: Clock, spec: RunSpec, table: LayerTable, units: Sequence[Unit], plan: Plan) -> StepTime:
    """A step of one rank that holds a shard of every unit; ``units`` in the order of the forward pass."""
    walk = _Walk(clock, spec, table, units, plan)
    return of_events(clock, walk.events())


class _Walk:
    def __init__(self, clock: Clock, spec: RunSpec, table: LayerTable, units: Sequence[Unit], plan: Plan) -> None:
        self.clock, self.spec, self.table, self.units, self.plan = clock, spec, table, units, plan
        self.passes = whole_passes(spec, table)
        made_at = first_rows(table)
        self.first_row = [min((made_at[place] for place in unit.places), default=0) for unit in units]
        blocks = [table.layers[row].block for row in self.first_row]
        rows = [[row for row, layer in enumerate(table.layers) if layer.block == block] for block in blocks]
        self.last_row = [max(own, default=0) for own in rows]

    def events(self) -> Iterator[Event]:
        """All of the step."""
        last = self.spec.micro_batches - 1
        if last:
            yield from self._micro_batch(is_first=True, is_last=False)
        if last > 1:
            # Those between the first and the last are alike, and wait for all that they ask for.
            yield Repeat(last - 1, list(self._micro_batch(is_first=False, is_last=False)))
        yield from self._micro_batch(is_first=not last, is_last=True)
        yield ALL
        yield from update(self.clock, self.spec, self.plan.updated)

    def _micro_batch(self, is_first: bool, is_last: bool) -> Iterator[Event]:
        fresh = is_first or self.plan.every_micro_batch
        again = self.plan.regathers and fresh
        yield from forward(self.clock, self.passes, before=partial(self._forward, fresh=fresh, first=is_first))
        yield from backward(
            self.clock,
            self.spec,
            self.table,
            self.passes,
            before=partial(self._backward, again=again),
            after=self._reduce if is_last else nothing,
        )

    def _forward(self, row: int, fresh: bool, first: bool) -> Sequence[Event]:
        """Before a row: the unit that begins there is waited for, the next one asked for."""
        found: list[Event] = []
        for number, begin in enumerate(self.first_row):
            if begin != row:
                continue
            if not self.plan.ahead or number == 0:
                found += self._gather(number, "F", fresh, first)
            found.append(Wait(f"F{number}"))
            if self.plan.ahead and number + 1 < len(self.units):
                found += self._gather(number + 1, "F", fresh, first)
        return found

    def _backward(self, row: int, again: bool) -> Sequence[Event]:
        found: list[Event] = []
        if not again:
            return found
        for number, end in enumerate(self.last_row):
            if end != row:
                continue
            last = len(self.units) - 1
            if not self.plan.ahead or number == last:
                found += self._gather(number, "B", True, False)
            found.append(Wait(f"B{number}"))
            if self.plan.ahead and number:
                found += self._gather(number - 1, "B", True, False)
        return found

    def _gather(self, number: int, way: str, fresh: bool, first: bool) -> list[Call]:
        unit = self.units[number]
        if not fresh or (unit.stays and not (first and way == "F")):
            return []
        return [self.clock.call("all_gather", one, self.plan.within, f"{way}{number}") for one in unit.gathered]

    def _reduce(self, row: int) -> Sequence[Event]:
        found: list[Event] = []
        for unit, begin in zip(self.units, self.first_row, strict=True):
            if begin == row:
                found += [self.clock.call("reduce_scatter", one, self.plan.within, "reduce") for one in unit.reduced]
                found += [self.clock.call("all_reduce", one, self.plan.across, "reduce") for one in unit.replicated]
        return found
