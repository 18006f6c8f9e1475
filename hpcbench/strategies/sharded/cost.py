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
from typing import ClassVar, NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import WAIT_FOR_ALL, CostModel, StepBreakdown, step_from_events, update_events
from hpcbench.predict.peak_memory import (
    MemoryBreakdown,
    PersistentMemory,
    peak_memory,
)
from hpcbench.predict.placement import GroupPlacement, place_subgroups
from hpcbench.predict.row_cost import micro_batch_events, no_events, unsharded_rows
from hpcbench.predict.strategy_cost import Cost
from hpcbench.predict.stream_simulator import CommCall, RepeatEvent, StreamEvent, WaitEvent
from hpcbench.predict.tensor_sizes import (
    FP32_BYTES,
    HALF_BYTES,
    element_bytes,
    parameter_bytes,
)
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.data import buckets as data_buckets
from hpcbench.strategies.data.cost import DdpCost, ReplicaCall
from hpcbench.strategies.gradient_buckets import first_use_rows, fsdp_units, sum_bytes_at
from hpcbench.strategies.layer_table import LayerTable, TensorShape
from hpcbench.strategies.traffic import Traffic, group_call_factory, merge_calls


class ShardingUnit(NamedTuple):
    """Parameters that travel together. Payloads are counted as ``strategies.traffic.Traffic`` counts them.

    Nothing is sent without a payload.
    """

    places: Sequence[int]
    """Places in the table's ``parameter_tensors``."""
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

    @abstractmethod
    def plan(self, spec: RunSpec, table: LayerTable) -> ShardingPlan:
        """Return the units and how they travel, the same on every rank."""

    def traffic(self, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        plan = self.plan(spec, table)
        within, across = group_call_factory(plan.within.ranks), group_call_factory(plan.across.ranks)
        gathers = (spec.micro_batches if plan.every_micro_batch else 1) * (2 if plan.regathers else 1)
        calls = []
        for unit in plan.units:
            gathered = [within("all_gather", size) for size in unit.gathered]
            calls += gathered * (1 if unit.is_gathered_once else gathers)
            calls += [within("reduce_scatter", size) for size in unit.reduced]
            calls += [across("all_reduce", size) for size in unit.replicated]
        return merge_calls(calls)

    def step(self, spec: RunSpec, table: LayerTable, cost_model: CostModel) -> StepBreakdown:
        return step_from_events(cost_model, _ShardedStep(cost_model, spec, table, self.plan(spec, table)).events())


def sharded_memory(
    spec: RunSpec,
    table: LayerTable,
    shards: list[int],
    used: list[int],
    reduced: list[int],
    is_ahead: bool,
    is_flat: bool = False,
) -> MemoryBreakdown:
    """Return the memory of shards, and of whole tensors while their unit runs.

    Args:
        shards: bytes of the rank's part of each tensor.
        used: bytes of each whole parameter as it is computed with, and of its gradient.
        reduced: bytes of each whole gradient as it is reduced.
        is_ahead: whether the next unit is gathered, and the one before reduced, while one runs.
        is_flat: whether the gradients of a unit are copied into one before they are added to those of earlier
            micro-batches.
    """
    *units, root = fsdp_units(table)
    first_uses, blocks = first_use_rows(table), [layer.block for layer in table.layers]
    starts = [blocks.index(blocks[first_uses[unit[0]]]) for unit in units]
    prefetched = int(is_ahead) if options_with_defaults(spec)["reshard_after_forward"] else len(units)
    root_bytes, unit_bytes = sum_bytes_at(used, root), [sum_bytes_at(used, unit) for unit in units]
    # By unit the parameters that are there while it runs backwards: the root's, its own and those gathered before.
    gathered = [root_bytes + sum(unit_bytes[max(number - prefetched, 0) : number + 1]) for number in range(len(units))]
    sizes = []
    for row in range(len(table.layers)):
        # A unit runs backwards from its block's last row to its first.
        number = sum(start <= row for start in starts) - 1
        size = root_bytes + (gathered[number] if number >= 0 else root_bytes)
        if spec.micro_batches > 1:
            # Earlier micro-batches have left whole gradients.
            size += sum(unit_bytes[: number + 1])
        elif number >= 0:
            size += sum(used[place] for place in units[number] if first_uses[place] >= row)
        if is_ahead and number + 1 < len(units):
            size += sum_bytes_at(reduced, units[number + 1])
        sizes.append(size)
    gradient_rows = [0] * len(shards)
    for number, (unit, start) in enumerate(zip(units, starts, strict=True)):
        # When the unit has ended, and the row before it has not begun: its gradients' shards are there.
        row = max(start - 1, 0)
        at_end = gathered[number] + unit_bytes[number] + sum_bytes_at(reduced, unit)
        if spec.micro_batches > 1:
            at_end += sum(unit_bytes[:number]) + unit_bytes[number] * is_flat
        sizes[row] = max(sizes[row], at_end)
        for place in unit:
            gradient_rows[place] = row
    persistent = PersistentMemory(sum(shards), shards, gradient_rows, shards, update_spec=_shard_spec(spec))
    return peak_memory(spec, table, persistent, sizes)


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
        yield from update_events(self.cost_model, _shard_spec(self.spec), self.plan.updated)

    def _micro_batch(self, is_first: bool, is_last: bool) -> Iterator[StreamEvent]:
        gathers = is_first or self.plan.every_micro_batch
        regather = partial(self._before_pass, rows=self.last_row, direction="B")
        yield from micro_batch_events(
            self.cost_model,
            self.spec,
            self.table,
            unsharded_rows(self.spec, self.table),
            before_forward=lambda row: self._before_pass(row, self.first_row, "F", gathers, is_first),
            before_backward=regather if self.plan.regathers and gathers else no_events,
            after_backward=self._reduce if is_last else no_events,
        )

    def _before_pass(
        self, row: int, rows: Sequence[int], direction: str, gathers: bool = True, is_first: bool = False
    ) -> Iterator[StreamEvent]:
        """Wait for the unit whose pass begins at the row, and ask for the next one."""
        first, step = (0, 1) if direction == "F" else (len(rows) - 1, -1)
        for number, begin in enumerate(rows):
            if begin != row:
                continue
            if gathers and (not self.plan.prefetches or number == first):
                yield from self._gather(number, direction, is_first)
            yield WaitEvent(f"{direction}{number}")
            if gathers and self.plan.prefetches and number + step in range(len(rows)):
                yield from self._gather(number + step, direction, is_first)

    def _gather(self, number: int, direction: str, is_first: bool) -> Iterable[CommCall]:
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

    The last shards of a tensor may be shorter or empty; all messages are as long as the first shard.
    """

    def plan(self, spec: RunSpec, table: LayerTable) -> ShardingPlan:
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
        updated = [shard_elements(tensor, degree) * element_bytes(_shard_spec(spec), tensor) for tensor in tensors]
        return ShardingPlan(units, within, across, regathers, True, True, updated)

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return shards, and of the running unit whole parameters, gradients and what is reduced of them.

        The next unit's parameters are there already; without ``reshard_after_forward`` those of all units to come.
        """
        degree, shards = shard_degree(spec), list(self.plan(spec, table).updated)
        counts = [shard_elements(tensor, degree) * degree for tensor in table.parameter_tensors]
        used, reduced = ([count * size for count in counts] for size in _mixed_number_bytes(spec, table))
        return sharded_memory(spec, table, shards, used, reduced, is_ahead=True)


def shard_degree(spec: RunSpec) -> int:
    """Return the number of ranks that hold one copy of the parameters together."""
    return int(options_with_defaults(spec)["shard_degree"]) or spec.dp_degree


def _shard_spec(spec: RunSpec) -> RunSpec:
    """Return the run as the update of its shards sees it: those of ``bf16_params`` are the fp32 master weights."""
    return msgspec.structs.replace(spec, precision="fp32") if spec.precision == "bf16_params" else spec


def _mixed_number_bytes(spec: RunSpec, table: LayerTable) -> tuple[int, int]:
    """Return the bytes of one number of a gathered parameter, and of a reduced gradient."""
    if options_with_defaults(spec)["mixed_precision"]:
        return HALF_BYTES, FP32_BYTES
    number_bytes = element_bytes(spec, table.parameter_tensors[0])
    return number_bytes, number_bytes


def shard_elements(tensor: TensorShape, degree: int) -> int:
    """Return the numbers of one rank's part of ``tensor``, padding included."""
    return -(-tensor.shape[0] // degree) * prod(tensor.shape[1:])


class Zero1Cost(DdpCost):
    """Owners broadcast the parameters that they updated (ZeRO-1, Rajbhandari et al. 2020)."""

    owners_largest_first: ClassVar[bool] = True
    """Whether parameters are assigned to replicas in descending order of size instead of model order."""
    # Parameters are broadcast as they are.
    operators_per_call = 0

    def after_update(self, spec: RunSpec, table: LayerTable) -> list[ReplicaCall]:
        """Return one broadcast a tensor, or one an owner: owner by owner."""
        sizes, owners = (
            parameter_bytes(spec, table),
            data_buckets.owned_parameters(spec, table, largest_first=self.owners_largest_first),
        )
        sent = [sizes[place] for places in owners for place in places]
        if options_with_defaults(spec)["parameters_as_bucket_view"]:
            sent = [sum_bytes_at(sizes, places) for places in owners] + [0] * (spec.dp_degree - len(owners))
        return [("broadcast", size) for size in sent]

    def updated(self, spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
        return data_buckets.rank_owned_bytes(spec, table, rank, largest_first=self.owners_largest_first)


COSTS = {
    "zero1": Zero1Cost,
    "fsdp": FsdpCost,
}
"""The cost of each strategy."""
