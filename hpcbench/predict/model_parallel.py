"""Costs of ranks that share layers or samples: traffic, memory and step time of one description of a rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel, StepBreakdown, step_from_events, update_events
from hpcbench.predict.peak_memory import (
    MemoryBreakdown,
    PersistentMemory,
    filled_bucket_bytes,
    gradient_rows,
    peak_memory,
)
from hpcbench.predict.placement import GroupPlacement, place_group
from hpcbench.predict.row_cost import RowCost, copy_op, micro_batch_events, row_events, row_traffic
from hpcbench.predict.strategy_cost import Cost
from hpcbench.predict.stream_simulator import RepeatEvent, StreamEvent, WaitEvent
from hpcbench.strategies.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, fill_buckets, first_use_rows, sum_bytes_at
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.traffic import Traffic, merge_calls


class ReductionPlan(NamedTuple):
    """The all_reduces of a ``GradientReducer`` over ``group``, in the order of its buckets."""

    group: GroupPlacement
    stream: str
    buckets: Sequence[Sequence[int]]
    """Places in the table's ``parameter_tensors``."""

    def key(self, number: int) -> str:
        """Return the name by which a bucket's call is waited for."""
        return f"{self.stream} {number}"


class RankCost(NamedTuple):
    """The costs of a rank of a model-parallel run."""

    rows: Sequence[RowCost]
    """Costs of the table's rows, in their order."""
    parameter_bytes: Sequence[int]
    """Bytes of every tensor of the table that the rank holds and updates."""
    reductions: Sequence[ReductionPlan]
    buffer_bytes: int


class ModelParallelCost(Cost):
    """Base class of the families whose ranks share layers or samples: they describe one rank, the rest follows."""

    @abstractmethod
    def describe(self, spec: RunSpec, table: LayerTable, rank: int) -> RankCost:
        """Return the rows, parameters and gradient reductions of ``rank``, also where nothing is shared."""

    def slowest_rank(self, spec: RunSpec) -> int:
        """Return the rank that the others wait for: by default the first one, whose shares are the largest."""
        return 0

    def traffic(self, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        description = self.describe(spec, table, rank)
        calls = merge_calls(row_traffic(spec, description.rows)) * spec.micro_batches
        for reduction in description.reductions:
            for places in reduction.buckets:
                payload = sum_bytes_at(description.parameter_bytes, places)
                calls.append(Traffic(operation="all_reduce", group_size=reduction.group.ranks, payload_bytes=payload))
        return merge_calls(calls)

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        description = self.describe(spec, table, rank)
        sizes = list(description.parameter_bytes)
        persistent = PersistentMemory(sum(sizes), sizes, gradient_rows(spec, table), sizes)
        in_flight = [0] * len(table.layers)
        for reduction in description.reductions:
            filled = filled_bucket_bytes(table, sizes, reduction.buckets)
            in_flight = [max(before, added) for before, added in zip(in_flight, filled, strict=True)]
        return peak_memory(spec, table, persistent, in_flight, description.rows, description.buffer_bytes)

    def step(self, spec: RunSpec, table: LayerTable, cost_model: CostModel) -> StepBreakdown:
        description = self.describe(spec, table, self.slowest_rank(spec))
        return step_from_events(cost_model, _step_events(cost_model, table, description))


def _step_events(cost_model: CostModel, table: LayerTable, description: RankCost) -> Iterator[StreamEvent]:
    spec = cost_model.spec
    rows, sizes, reductions = description.rows, description.parameter_bytes, description.reductions
    if spec.micro_batches > 1:
        yield RepeatEvent(spec.micro_batches - 1, list(micro_batch_events(cost_model, spec, table, rows)))
    sends = _bucket_events(cost_model, table, description)
    yield from micro_batch_events(cost_model, spec, table, rows, after_backward=lambda number: sends.get(number, ()))
    for reduction in reductions:
        for number in range(len(reduction.buckets)):
            yield WaitEvent(reduction.key(number))
    yield from update_events(cost_model, spec, sizes)


def _bucket_events(cost_model: CostModel, table: LayerTable, description: RankCost) -> dict[int, list[StreamEvent]]:
    """Return by row the buckets that its gradients complete: concatenated, and sent in the buckets' order."""
    ready_rows = first_use_rows(table)
    due: dict[int, list[StreamEvent]] = {}
    for reduction in description.reductions:
        row = len(table.layers)
        for number, places in enumerate(reduction.buckets):
            row = min(row, *(ready_rows[place] for place in places))
            payload = sum_bytes_at(description.parameter_bytes, places)
            key, stream = reduction.key(number), reduction.stream
            call = cost_model.collective("all_reduce", payload, reduction.group, key, stream)
            due.setdefault(row, []).extend([*row_events(cost_model, [copy_op(cost_model.spec, payload)]), call])
    return due


def plan_reductions(
    spec: RunSpec,
    sizes: Sequence[int],
    parts: Iterable[tuple[Iterable[bool], tuple[str, ...]]],
    cap_bytes: int = int(DEFAULT_BUCKET_CAP_MB * MIB),
) -> list[ReductionPlan]:
    """Return the reductions of gradients of ``sizes``, as ``worker.model_parallel_layers`` makes them.

    Args:
        parts: which tensors are reduced over the ranks along which axes of the mesh, in the order of the reducers.
    """
    plans = []
    for chosen, axes in parts:
        group, places = place_group(spec, *axes), list(compress(range(len(sizes)), chosen))
        if group.ranks > 1 and places:
            filled = fill_buckets([sizes[place] for place in places], cap_bytes)
            buckets = [[places[number] for number in bucket] for bucket in filled]
            plans.append(ReductionPlan(group, " ".join(axes), buckets))
    return plans
