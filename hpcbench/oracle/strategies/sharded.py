"""Costs of data parallelism with sharded parameters (ZeRO-3, Rajbhandari et al. 2020): torch's FSDP2 and
fairscale's FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel, unsharded_row_kernels
from hpcbench.oracle.peak_memory import (
    FP32_BYTES,
    HALF_BYTES,
    MemoryBreakdown,
    PersistentMemory,
    element_bytes,
    element_count,
    parameter_bytes,
    peak_memory,
)
from hpcbench.oracle.placement import GroupPlacement, place_subgroups
from hpcbench.oracle.step_time import (
    WAIT_FOR_ALL,
    StepBreakdown,
    backward_events,
    forward_events,
    no_events,
    step_from_events,
    update_events,
)
from hpcbench.oracle.stream_simulator import CommCall, RepeatEvent, StreamEvent, WaitEvent
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.gradient_buckets import first_use_rows, fsdp_units, sum_bytes_at
from hpcbench.parallel.layer_table import LayerTable, TensorShape
from hpcbench.parallel.traffic import Traffic, group_call_factory, merge_calls


class ShardingUnitRows(NamedTuple):
    """What is gathered together, as places of tensors, and which rows of the table use it."""

    apart: list[list[int]]
    """A unit a block, ascending."""
    root: list[int]
    """There from the first forward to the last backward pass."""
    first_row: list[int]
    """Of each unit of ``apart``, in the forward pass."""

    @classmethod
    def of(cls, table: LayerTable) -> ShardingUnitRows:
        """The units of a model."""
        *apart, root = fsdp_units(table)
        rows = first_use_rows(table)
        blocks = [table.layers[rows[unit[0]]].block for unit in apart]
        starts = [next(row for row, one in enumerate(table.layers) if one.block == block) for block in blocks]
        return cls(apart, root, starts)

    def running(self, row: int) -> int:
        """Which of ``apart`` runs backwards in ``row``, or ran last; -1 before the first block that has one."""
        return sum(start <= row for start in self.first_row) - 1

    def made_at(self, tensors: int) -> list[int]:
        """Of every tensor, the row in which its shard's gradient is there: that before its unit, which has ended."""
        found = [0] * tensors
        for unit, start in zip(self.apart, self.first_row, strict=True):
            for place in unit:
                found[place] = max(start - 1, 0)
        return found


class UnshardedMemory(NamedTuple):
    """Bytes of each whole tensor: as it is used, as its gradient comes out, and as that is reduced."""

    parameters: list[int]
    gradients: list[int]
    reduced: list[int]
    prefetched: int
    """Units that are whole before it is their turn."""
    reduces_behind: bool
    """Whether a unit is reduced while the next one runs; otherwise that one waits."""
    accumulates: bool
    """Whether earlier micro-batches have left whole gradients."""

    def by_row(self, table: LayerTable) -> list[int]:
        """What is there while each row runs backwards."""
        units, rows = ShardingUnitRows.of(table), first_use_rows(table)
        found = []
        for row in range(len(table.layers)):
            place = units.running(row)
            running = units.apart[place] if place >= 0 else []
            waiting = [one for unit in units.apart[max(place - self.prefetched, 0) : max(place, 0)] for one in unit]
            done = [one for one in running if rows[one] >= row]
            there = sum_bytes_at(self.parameters, [*units.root, *running, *waiting]) + sum_bytes_at(
                self.gradients, units.root
            )
            if self.accumulates:
                there += sum(sum_bytes_at(self.gradients, unit) for unit in units.apart[: place + 1])
            else:
                there += sum_bytes_at(self.gradients, done)
            if self.reduces_behind:
                there += sum_bytes_at(self.reduced, units.apart[place + 1]) if place + 1 < len(units.apart) else 0
            found.append(there)
        for place, (unit, start) in enumerate(zip(units.apart, units.first_row, strict=True)):
            # When the unit has ended, and the row before it has not begun.
            row = max(start - 1, 0)
            waiting = [one for other in units.apart[max(place - self.prefetched, 0) : place] for one in other]
            whole = sum(sum_bytes_at(each, unit) for each in (self.parameters, self.gradients, self.reduced))
            found[row] = max(found[row], sum_bytes_at(self.parameters, [*units.root, *waiting]) + whole)
        return found


class ShardingUnit(NamedTuple):
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


class ShardingPlan(NamedTuple):
    """How the units travel."""

    within: GroupPlacement
    across: GroupPlacement
    regathers: bool
    """Whether units are gathered again for the backward pass."""
    every_micro_batch: bool
    """Whether they are gathered anew for every micro-batch."""
    ahead: bool
    """Whether the next unit is gathered while one computes."""
    updated: Sequence[float]


def sharded_step(
    clock: CostModel, spec: RunSpec, table: LayerTable, units: Sequence[ShardingUnit], plan: ShardingPlan
) -> StepBreakdown:
    """A step of one rank that holds a shard of every unit; ``units`` in the order of the forward pass."""
    walk = _ShardedStep(clock, spec, table, units, plan)
    return step_from_events(clock, walk.events())


class _ShardedStep:
    def __init__(
        self, clock: CostModel, spec: RunSpec, table: LayerTable, units: Sequence[ShardingUnit], plan: ShardingPlan
    ) -> None:
        self.clock, self.spec, self.table, self.units, self.plan = clock, spec, table, units, plan
        self.passes = unsharded_row_kernels(spec, table)
        made_at = first_use_rows(table)
        self.first_row = [min((made_at[place] for place in unit.places), default=0) for unit in units]
        blocks = [table.layers[row].block for row in self.first_row]
        rows = [[row for row, layer in enumerate(table.layers) if layer.block == block] for block in blocks]
        self.last_row = [max(own, default=0) for own in rows]

    def events(self) -> Iterator[StreamEvent]:
        """All of the step."""
        last = self.spec.micro_batches - 1
        if last:
            yield from self._micro_batch(is_first=True, is_last=False)
        if last > 1:
            # Those between the first and the last are alike, and wait for all that they ask for.
            yield RepeatEvent(last - 1, list(self._micro_batch(is_first=False, is_last=False)))
        yield from self._micro_batch(is_first=not last, is_last=True)
        yield WAIT_FOR_ALL
        yield from update_events(self.clock, self.spec, self.plan.updated)

    def _micro_batch(self, is_first: bool, is_last: bool) -> Iterator[StreamEvent]:
        fresh = is_first or self.plan.every_micro_batch
        again = self.plan.regathers and fresh
        yield from forward_events(self.clock, self.passes, before=partial(self._forward, fresh=fresh, first=is_first))
        yield from backward_events(
            self.clock,
            self.spec,
            self.table,
            self.passes,
            before=partial(self._backward, again=again),
            after=self._reduce if is_last else no_events,
        )

    def _forward(self, row: int, fresh: bool, first: bool) -> Sequence[StreamEvent]:
        """Before a row: the unit that begins there is waited for, the next one asked for."""
        found: list[StreamEvent] = []
        for number, begin in enumerate(self.first_row):
            if begin != row:
                continue
            if not self.plan.ahead or number == 0:
                found += self._gather(number, "F", fresh, first)
            found.append(WaitEvent(f"F{number}"))
            if self.plan.ahead and number + 1 < len(self.units):
                found += self._gather(number + 1, "F", fresh, first)
        return found

    def _backward(self, row: int, again: bool) -> Sequence[StreamEvent]:
        found: list[StreamEvent] = []
        if not again:
            return found
        for number, end in enumerate(self.last_row):
            if end != row:
                continue
            last = len(self.units) - 1
            if not self.plan.ahead or number == last:
                found += self._gather(number, "B", True, False)
            found.append(WaitEvent(f"B{number}"))
            if self.plan.ahead and number:
                found += self._gather(number - 1, "B", True, False)
        return found

    def _gather(self, number: int, way: str, fresh: bool, first: bool) -> list[CommCall]:
        unit = self.units[number]
        if not fresh or (unit.stays and not (first and way == "F")):
            return []
        return [self.clock.call("all_gather", one, self.plan.within, f"{way}{number}") for one in unit.gathered]

    def _reduce(self, row: int) -> Sequence[StreamEvent]:
        found: list[StreamEvent] = []
        for unit, begin in zip(self.units, self.first_row, strict=True):
            if begin == row:
                found += [self.clock.call("reduce_scatter", one, self.plan.within, "reduce") for one in unit.reduced]
                found += [self.clock.call("all_reduce", one, self.plan.across, "reduce") for one in unit.replicated]
        return found


class FsdpCost:
    """torch's ``fully_shard`` (Zhao et al. 2023): tensors are cut along their first dim, a unit's shards travel as one.

    The last shards of a tensor may be shorter or empty; what is sent is as long as the first.
    """

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Gathered before the forward and the backward pass of every micro-batch, reduced in the step's last."""
        options = options_with_defaults(spec)
        degree = shard_degree(spec)
        within, across = group_call_factory(degree), group_call_factory(spec.dp_degree // degree)
        gathers = spec.micro_batches * (2 if options["reshard_after_forward"] else 1)
        calls = []
        for unit in unit_tensors(table):
            shard = sum(shard_elements(tensor, degree) for tensor in unit)
            wide = element_bytes(spec, unit[0])
            used = HALF_BYTES if options["mixed_precision"] else wide
            summed = FP32_BYTES if options["mixed_precision"] else wide
            if degree > 1:
                calls += [within("all_gather", shard * used)] * gathers
                calls.append(within("reduce_scatter", shard * degree * summed))
            if degree < spec.dp_degree:
                calls.append(across("all_reduce", shard * summed))
        return merge_calls(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """A shard of everything; of the unit that runs its parameters, its gradients and what is reduced of them.

        The next unit's parameters are there already; without ``reshard_after_forward`` those of all units to come.
        """
        options, degree = options_with_defaults(spec), shard_degree(spec)
        shards = [shard_elements(one, degree) * element_bytes(spec, one) for one in table.parameter_tensors]
        half = bool(options["mixed_precision"])
        whole = [shard_elements(one, degree) * degree for one in table.parameter_tensors]
        used = [count * (HALF_BYTES if half else element_bytes(spec, table.parameter_tensors[0])) for count in whole]
        summed = [count * (FP32_BYTES if half else element_bytes(spec, table.parameter_tensors[0])) for count in whole]
        gathered = UnshardedMemory(
            used, used, summed, 1 if options["reshard_after_forward"] else len(whole), True, spec.micro_batches > 1
        )
        made_at = ShardingUnitRows.of(table).made_at(len(shards))
        return peak_memory(spec, table, PersistentMemory(sum(shards), shards, made_at, shards), gathered.by_row(table))

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """The next unit is gathered while one computes; gradients are reduced under the backward pass."""
        options, degree = options_with_defaults(spec), shard_degree(spec)
        within, across = place_subgroups(spec, "dp", degree)
        half = bool(options["mixed_precision"])
        units = []
        for places in (places for places in fsdp_units(table) if places):
            tensors = [table.parameter_tensors[place] for place in places]
            shard = sum(shard_elements(tensor, degree) for tensor in tensors)
            wide = element_bytes(spec, tensors[0])
            summed = shard * (FP32_BYTES if half else wide)
            units.append(
                ShardingUnit(
                    places,
                    [shard * (HALF_BYTES if half else wide)] if degree > 1 else [],
                    [summed * degree] if degree > 1 else [],
                    [summed] if degree < spec.dp_degree else [],
                )
            )
        updated = [shard_elements(one, degree) * element_bytes(spec, one) for one in table.parameter_tensors]
        regathers = bool(options["reshard_after_forward"])
        return sharded_step(clock, spec, table, units, ShardingPlan(within, across, regathers, True, True, updated))


class FairscaleFsdpCost:
    """fairscale's FullyShardedDataParallel: a unit is flat, cut into equal parts and padded at its end."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """As ``Fsdp``, but gathered parameters outlive a micro-batch whose gradients are not reduced.

        So does the root's unit within a step. Without ``reshard_after_forward`` every unit is gathered once a step.
        """
        options = options_with_defaults(spec)
        call = group_call_factory(spec.dp_degree)
        *blocks, root = fairscale_shard_elements(spec, table)
        wide = element_bytes(spec, table.parameter_tensors[0])
        gathers = 2 * spec.micro_batches if options["reshard_after_forward"] else 1
        apart = [part for block in blocks for part in block]
        return merge_calls(
            [
                *(call("all_gather", part * wide) for part in apart for _ in range(gathers)),
                *(call("all_gather", part * wide) for part in root),
                *(call("reduce_scatter", part * wide * spec.dp_degree) for part in [*apart, *root]),
            ]
        )

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """As ``Fsdp``, without the next unit."""
        options = options_with_defaults(spec)
        sizes = parameter_bytes(spec, table)
        shards = [
            -(-element_count(one) // spec.dp_degree) * element_bytes(spec, one) for one in table.parameter_tensors
        ]
        gathered = UnshardedMemory(
            sizes, sizes, sizes, 0 if options["reshard_after_forward"] else len(sizes), False, spec.micro_batches > 1
        )
        made_at = ShardingUnitRows.of(table).made_at(len(shards))
        return peak_memory(spec, table, PersistentMemory(sum(shards), shards, made_at, shards), gathered.by_row(table))

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """Each unit is gathered when its turn comes."""
        regathers = bool(options_with_defaults(spec)["reshard_after_forward"])
        wide = element_bytes(spec, table.parameter_tensors[0])
        parts, places = fairscale_shard_elements(spec, table), fsdp_units(table)
        units = [
            ShardingUnit(
                own,
                [part * wide for part in sizes],
                [part * wide * spec.dp_degree for part in sizes],
                stays=number == len(parts) - 1,
            )
            for number, (own, sizes) in enumerate(zip(places, parts, strict=True))
            if own
        ]
        whole, alone = place_subgroups(spec, "dp", spec.dp_degree)
        updated = [part * wide for sizes in parts for part in sizes]
        return sharded_step(clock, spec, table, units, ShardingPlan(whole, alone, regathers, regathers, False, updated))


def shard_degree(spec: RunSpec) -> int:
    """Ranks that hold one copy of the parameters together."""
    return int(options_with_defaults(spec)["shard_degree"]) or spec.dp_degree


def unit_tensors(table: LayerTable) -> list[list[TensorShape]]:
    """Tensors that are gathered together, the root's last where it has any."""
    return [[table.parameter_tensors[place] for place in places] for places in fsdp_units(table) if places]


def shard_elements(tensor: TensorShape, degree: int) -> int:
    """Of one rank's part of ``tensor``, padding included."""
    return -(-tensor.shape[0] // degree) * prod(tensor.shape[1:])


def fairscale_shard_elements(spec: RunSpec, table: LayerTable) -> list[list[int]]:
    """Elements of one rank's part of each flat tensor, unit by unit; the last unit is the root's, perhaps empty."""
    flat = options_with_defaults(spec)["flatten_parameters"]
    parts = []
    for places in fsdp_units(table):
        counts = [element_count(table.parameter_tensors[place]) for place in places]
        whole = [sum(counts)] if flat and counts else counts
        parts.append([-(-count // spec.dp_degree) for count in whole])
    return parts
