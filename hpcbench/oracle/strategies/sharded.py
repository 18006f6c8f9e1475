"""Costs of data parallelism with sharded parameters (ZeRO-3, Rajbhandari et al. 2020): torch's FSDP2 and
fairscale's FSDP. Each unit (a block's parameters) is gathered for its passes and reduced behind the last one::

    computing stream      wait u0 | forward u0 | wait u1 | forward u1 | ... | backward u1 | backward u0 | update
    communication stream  [gather u0][gather u1]                        [reduce u1]   [reduce u0]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.peak_memory import MemoryBreakdown, PersistentMemory, peak_memory
from hpcbench.oracle.placement import GroupPlacement, place_subgroups
from hpcbench.oracle.row_cost import micro_batch_events, no_events, unsharded_rows
from hpcbench.oracle.step_time import WAIT_FOR_ALL, StepBreakdown, step_from_events, update_events
from hpcbench.oracle.strategies.base import Cost
from hpcbench.oracle.stream_simulator import CommCall, RepeatEvent, StreamEvent, WaitEvent
from hpcbench.oracle.tensor_sizes import FP32_BYTES, HALF_BYTES, element_bytes, element_count, parameter_bytes
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.gradient_buckets import first_use_rows, fsdp_units, sum_bytes_at
from hpcbench.parallel.layer_table import LayerTable, TensorShape
from hpcbench.parallel.traffic import Traffic, group_call_factory, merge_calls


class ShardingUnitRows(NamedTuple):
    """The tensors that are gathered together, by their places, and the rows of the table that use them."""

    blocks: list[list[int]]
    """A unit a block, ascending."""
    root: list[int]
    """Gathered from the first forward to the last backward pass."""
    first_row: list[int]
    """First row of each unit of ``blocks``, in the forward pass."""

    @classmethod
    def of(cls, table: LayerTable) -> ShardingUnitRows:
        *units, root = fsdp_units(table)
        rows = first_use_rows(table)
        blocks = [table.layers[rows[unit[0]]].block for unit in units]
        starts = [next(row for row, layer in enumerate(table.layers) if layer.block == block) for block in blocks]
        return cls(units, root, starts)

    def running(self, row: int) -> int:
        """Return which of ``blocks`` runs backwards in ``row``, or ran last; -1 before the first block that has one."""
        return sum(start <= row for start in self.first_row) - 1

    def gradient_rows(self, tensors: int) -> list[int]:
        """Return the row at which each tensor's gradient shard is there: that before its unit, which has ended."""
        rows = [0] * tensors
        for unit, start in zip(self.blocks, self.first_row, strict=True):
            for place in unit:
                rows[place] = max(start - 1, 0)
        return rows


class UnshardedMemory(NamedTuple):
    """Bytes of each whole tensor: as it is used, as its gradient comes out, and as that is reduced."""

    parameters: list[int]
    gradients: list[int]
    reduced: list[int]
    prefetched: int
    """Units that are gathered before it is their turn."""
    overlaps_reduction: bool
    """Whether a unit is reduced while the next one runs; otherwise that one waits."""
    accumulates: bool
    """Whether earlier micro-batches have left whole gradients."""

    def by_row(self, table: LayerTable) -> list[int]:
        """Return the bytes of whole tensors while each row runs backwards."""
        units, first_uses = ShardingUnitRows.of(table), first_use_rows(table)
        sizes = []
        for row in range(len(table.layers)):
            number = units.running(row)
            running = units.blocks[number] if number >= 0 else []
            whole = [*units.root, *running, *self._prefetched(units, number)]
            size = sum_bytes_at(self.parameters, whole) + sum_bytes_at(self.gradients, units.root)
            if self.accumulates:
                size += sum(sum_bytes_at(self.gradients, unit) for unit in units.blocks[: number + 1])
            else:
                size += sum_bytes_at(self.gradients, [place for place in running if first_uses[place] >= row])
            if self.overlaps_reduction and number + 1 < len(units.blocks):
                size += sum_bytes_at(self.reduced, units.blocks[number + 1])
            sizes.append(size)
        for number, (unit, start) in enumerate(zip(units.blocks, units.first_row, strict=True)):
            # When the unit has ended, and the row before it has not begun.
            row = max(start - 1, 0)
            held = sum(sum_bytes_at(each, unit) for each in (self.parameters, self.gradients, self.reduced))
            held += sum_bytes_at(self.parameters, [*units.root, *self._prefetched(units, number)])
            sizes[row] = max(sizes[row], held)
        return sizes

    def _prefetched(self, units: ShardingUnitRows, number: int) -> list[int]:
        ahead = units.blocks[max(number - self.prefetched, 0) : max(number, 0)]
        return [place for unit in ahead for place in unit]


class ShardingUnit(NamedTuple):
    """Parameters that travel together. Payloads are counted as ``parallel.traffic.Traffic`` counts them.

    Nothing is sent without a payload.
    """

    places: Sequence[int]
    """In the table's ``parameter_tensors``."""
    gathered: Sequence[int]
    """The rank's parts, a call each."""
    reduced: Sequence[int]
    """Whole gradients, a call each."""
    replicated: Sequence[int] = ()
    """Shards that are all_reduced across copies of the shards (hybrid sharding)."""
    is_gathered_once: bool = False
    """Gathered once a step: for the forward pass of its first micro-batch."""


class ShardingPlan(NamedTuple):
    """The units of a run, in the order of the forward pass, and how they travel."""

    units: Sequence[ShardingUnit]
    within: GroupPlacement
    """Ranks that hold one copy of the parameters."""
    across: GroupPlacement
    """Ranks that hold the same shard."""
    regathers: bool
    """Whether units are gathered again for the backward pass."""
    every_micro_batch: bool
    """Whether they are gathered anew for every micro-batch."""
    prefetches: bool
    """Whether the next unit is gathered while one computes."""
    updated: Sequence[int]
    """Bytes of each tensor that the rank updates."""


class ShardedCost(Cost):
    """Base class: a strategy describes its units once, traffic and step follow."""

    @classmethod
    @abstractmethod
    def plan(cls, spec: RunSpec, table: LayerTable) -> ShardingPlan:
        """Return the units and how they travel, the same on every rank."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        plan = cls.plan(spec, table)
        within, across = group_call_factory(plan.within.ranks), group_call_factory(plan.across.ranks)
        gathers = (spec.micro_batches if plan.every_micro_batch else 1) * (2 if plan.regathers else 1)
        calls = []
        for unit in plan.units:
            gathered = [within("all_gather", size) for size in unit.gathered]
            calls += gathered * (1 if unit.is_gathered_once else gathers)
            calls += [within("reduce_scatter", size) for size in unit.reduced]
            calls += [across("all_reduce", size) for size in unit.replicated]
        return merge_calls(calls)

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, cost_model: CostModel) -> StepBreakdown:
        return step_from_events(cost_model, _ShardedStep(cost_model, spec, table, cls.plan(spec, table)).events())


def _sharded_memory(spec: RunSpec, table: LayerTable, shards: list[int], unsharded: UnshardedMemory) -> MemoryBreakdown:
    rows = ShardingUnitRows.of(table).gradient_rows(len(shards))
    return peak_memory(spec, table, PersistentMemory(sum(shards), shards, rows, shards), unsharded.by_row(table))


class _ShardedStep:
    """The events of a step of one rank."""

    def __init__(self, cost_model: CostModel, spec: RunSpec, table: LayerTable, plan: ShardingPlan) -> None:
        self.cost_model, self.spec, self.table, self.plan = cost_model, spec, table, plan
        ready_rows = first_use_rows(table)
        self.first_row = [min((ready_rows[place] for place in unit.places), default=0) for unit in plan.units]
        last_rows = {layer.block: row for row, layer in enumerate(table.layers)}
        self.last_row = [last_rows[table.layers[row].block] for row in self.first_row]

    def events(self) -> Iterator[StreamEvent]:
        last = self.spec.micro_batches - 1
        if last:
            yield from self._micro_batch(is_first=True, is_last=False)
        if last > 1:
            # Those between the first and the last are alike, and wait for all that they ask for.
            yield RepeatEvent(last - 1, list(self._micro_batch(is_first=False, is_last=False)))
        yield from self._micro_batch(is_first=not last, is_last=True)
        yield WAIT_FOR_ALL
        yield from update_events(self.cost_model, self.spec, self.plan.updated)

    def _micro_batch(self, is_first: bool, is_last: bool) -> Iterator[StreamEvent]:
        gathers = is_first or self.plan.every_micro_batch
        yield from micro_batch_events(
            self.cost_model,
            self.spec,
            self.table,
            unsharded_rows(self.spec, self.table),
            before_forward=partial(self._before_forward, gathers=gathers, is_first=is_first),
            before_backward=self._before_backward if self.plan.regathers and gathers else no_events,
            after_backward=self._reduce if is_last else no_events,
        )

    def _before_forward(self, row: int, gathers: bool, is_first: bool) -> Iterator[StreamEvent]:
        """Wait for the unit that begins at the row, and ask for the next one."""
        for number, begin in enumerate(self.first_row):
            if begin != row:
                continue
            if gathers and (not self.plan.prefetches or number == 0):
                yield from self._gather(number, "F", is_first)
            yield WaitEvent(f"F{number}")
            if gathers and self.plan.prefetches and number + 1 < len(self.first_row):
                yield from self._gather(number + 1, "F", is_first)

    def _before_backward(self, row: int) -> Iterator[StreamEvent]:
        for number, end in enumerate(self.last_row):
            if end != row:
                continue
            if not self.plan.prefetches or number == len(self.last_row) - 1:
                yield from self._gather(number, "B")
            yield WaitEvent(f"B{number}")
            if self.plan.prefetches and number:
                yield from self._gather(number - 1, "B")

    def _gather(self, number: int, direction: str, is_first: bool = False) -> Iterable[CommCall]:
        unit = self.plan.units[number]
        if unit.is_gathered_once and not is_first:
            return
        for size in unit.gathered:
            yield self.cost_model.collective("all_gather", size, self.plan.within, f"{direction}{number}")

    def _reduce(self, row: int) -> Iterator[StreamEvent]:
        for unit, begin in zip(self.plan.units, self.first_row, strict=True):
            if begin == row:
                for size in unit.reduced:
                    yield self.cost_model.collective("reduce_scatter", size, self.plan.within, "reduce")
                for size in unit.replicated:
                    yield self.cost_model.collective("all_reduce", size, self.plan.across, "reduce")


class FsdpCost(ShardedCost):
    """torch's ``fully_shard`` (Zhao et al. 2023): tensors are cut along their first dim, a unit's shards travel as one.

    The last shards of a tensor may be shorter or empty; what is sent is as long as the first.
    """

    @classmethod
    def plan(cls, spec: RunSpec, table: LayerTable) -> ShardingPlan:
        """Gather the next unit while one computes; reduce gradients under the step's last backward pass."""
        degree, tensors = shard_degree(spec), table.parameter_tensors
        within, across = place_subgroups(spec, "dp", degree)
        used_bytes, reduced_bytes = _mixed_number_bytes(spec, table)
        units = []
        for places in (places for places in fsdp_units(table) if places):
            shard = sum(shard_elements(tensors[place], degree) for place in places)
            units.append(
                ShardingUnit(
                    places,
                    [shard * used_bytes] if degree > 1 else [],
                    [shard * degree * reduced_bytes] if degree > 1 else [],
                    [shard * reduced_bytes] if degree < spec.dp_degree else [],
                )
            )
        regathers = bool(options_with_defaults(spec)["reshard_after_forward"])
        updated = [shard_elements(tensor, degree) * element_bytes(spec, tensor) for tensor in tensors]
        return ShardingPlan(units, within, across, regathers, True, True, updated)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return shards, and of the running unit whole parameters, gradients and what is reduced of them.

        The next unit's parameters are there already; without ``reshard_after_forward`` those of all units to come.
        """
        degree, tensors = shard_degree(spec), table.parameter_tensors
        shards = [shard_elements(tensor, degree) * element_bytes(spec, tensor) for tensor in tensors]
        used_bytes, reduced_bytes = _mixed_number_bytes(spec, table)
        counts = [shard_elements(tensor, degree) * degree for tensor in tensors]
        used, reduced = [count * used_bytes for count in counts], [count * reduced_bytes for count in counts]
        prefetched = 1 if options_with_defaults(spec)["reshard_after_forward"] else len(counts)
        return _sharded_memory(
            spec, table, shards, UnshardedMemory(used, used, reduced, prefetched, True, spec.micro_batches > 1)
        )


class FairscaleFsdpCost(ShardedCost):
    """fairscale's FullyShardedDataParallel: a unit is flat, cut into equal parts and padded at its end."""

    @classmethod
    def plan(cls, spec: RunSpec, table: LayerTable) -> ShardingPlan:
        """Gather each unit when its turn comes.

        Gathered parameters outlive a micro-batch whose gradients are not reduced; so does the root's unit within a
        step. Without ``reshard_after_forward`` every unit is gathered once a step.
        """
        regathers = bool(options_with_defaults(spec)["reshard_after_forward"])
        number_bytes = element_bytes(spec, table.parameter_tensors[0])
        parts, places = fairscale_shard_elements(spec, table), fsdp_units(table)
        units = [
            ShardingUnit(
                unit_places,
                [part * number_bytes for part in unit_parts],
                [part * number_bytes * spec.dp_degree for part in unit_parts],
                is_gathered_once=number == len(parts) - 1,
            )
            for number, (unit_places, unit_parts) in enumerate(zip(places, parts, strict=True))
            if unit_places
        ]
        within, across = place_subgroups(spec, "dp", spec.dp_degree)
        updated = [part * number_bytes for unit_parts in parts for part in unit_parts]
        return ShardingPlan(units, within, across, regathers, regathers, False, updated)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return shards and the whole tensors of the running unit, without the next one."""
        sizes = parameter_bytes(spec, table)
        shards = [
            -(-element_count(tensor) // spec.dp_degree) * element_bytes(spec, tensor)
            for tensor in table.parameter_tensors
        ]
        prefetched = 0 if options_with_defaults(spec)["reshard_after_forward"] else len(sizes)
        return _sharded_memory(
            spec, table, shards, UnshardedMemory(sizes, sizes, sizes, prefetched, False, spec.micro_batches > 1)
        )


def shard_degree(spec: RunSpec) -> int:
    """Return the number of ranks that hold one copy of the parameters together."""
    return int(options_with_defaults(spec)["shard_degree"]) or spec.dp_degree


def _mixed_number_bytes(spec: RunSpec, table: LayerTable) -> tuple[int, int]:
    """Return the bytes of one number of a gathered parameter, and of a reduced gradient."""
    if options_with_defaults(spec)["mixed_precision"]:
        return HALF_BYTES, FP32_BYTES
    number_bytes = element_bytes(spec, table.parameter_tensors[0])
    return number_bytes, number_bytes


def shard_elements(tensor: TensorShape, degree: int) -> int:
    """Return the numbers of one rank's part of ``tensor``, padding included."""
    return -(-tensor.shape[0] // degree) * prod(tensor.shape[1:])


def fairscale_shard_elements(spec: RunSpec, table: LayerTable) -> list[list[int]]:
    """Return the numbers of one rank's part of each flat tensor, by unit; the last unit is the root's, maybe empty."""
    is_flat = options_with_defaults(spec)["flatten_parameters"]
    parts = []
    for places in fsdp_units(table):
        counts = [element_count(table.parameter_tensors[place]) for place in places]
        flat = [sum(counts)] if is_flat and counts else counts
        parts.append([-(-count // spec.dp_degree) for count in flat])
    return parts
