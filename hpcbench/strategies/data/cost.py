"""Costs of the data-parallel family: traffic, memory and step of one replica.

``docs/formulas.md`` derives the formulas; ``tests/distributed/test_traffic.py`` compares them with real ranks.
A step of a replica, whose gradient buckets are sent while the backward pass goes on::

    computing stream      before | forward | backward ............ | wait | update | after_update
    communication stream                      [bucket] [bucket] [bucket]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import ClassVar

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import WAIT_FOR_ALL, CostModel, StepBreakdown, step_from_events, update_events
from hpcbench.predict.peak_memory import (
    MemoryBreakdown,
    PersistentMemory,
    gradient_rows,
    peak_memory,
    preallocated_gradient_rows,
)
from hpcbench.predict.placement import place_group
from hpcbench.predict.row_cost import EventsAtRow, micro_batch_events, unsharded_rows
from hpcbench.predict.strategy_cost import Cost
from hpcbench.predict.stream_simulator import CommCall, RepeatEvent, StreamEvent
from hpcbench.predict.tensor_sizes import parameter_bytes
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.data import buckets as data_buckets
from hpcbench.strategies.gradient_buckets import first_use_rows
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.traffic import Traffic, merge_calls

ReplicaCall = tuple[str, int]
"""Operation and payload of a call of all replicas."""
GradientBucket = tuple[Iterable[int], list[ReplicaCall]]
"""Places of the tensors whose gradients it holds, and the calls that are made once all of them are there."""
_GLOO_THREADS = 2
"""Calls of one process group that gloo runs at once (torch's ``ProcessGroupGloo::Options``); NCCL has one."""
_REPLICAS_EXAMINED = 64
"""Replicas among which the one with the largest update is looked for: owners beyond them hold less."""


class DataParallelCost(Cost):
    """Base class: every replica holds everything. A strategy defines the traffic before, during and after the step."""

    has_distinct_roots: ClassVar[bool] = False
    """Whether consecutive calls have different roots. If so, all are started before the first one is waited for."""

    def before(self, spec: RunSpec, table: LayerTable) -> list[ReplicaCall]:
        """Return the calls before the forward pass, one after another; none by default."""
        return []

    def buckets(self, spec: RunSpec, table: LayerTable) -> list[GradientBucket]:
        """Return the gradient buckets in the order in which they are sent; none by default."""
        return []

    def after_update(self, spec: RunSpec, table: LayerTable) -> list[ReplicaCall]:
        """Return the calls behind the update; none by default."""
        return []

    def updated(self, spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
        """Return the bytes of every parameter that ``rank`` updates; all of them by default."""
        return parameter_bytes(spec, table)

    def traffic(self, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        sent = [call for _, calls in self.buckets(spec, table) for call in calls]
        return merge_calls(
            Traffic(operation=operation, group_size=spec.dp_degree, payload_bytes=payload)
            for operation, payload in [*self.before(spec, table), *sent, *self.after_update(spec, table)]
        )

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        sizes = parameter_bytes(spec, table)
        return peak_memory(spec, table, PersistentMemory(sum(sizes), sizes, gradient_rows(spec, table), sizes))

    def step(self, spec: RunSpec, table: LayerTable, cost_model: CostModel) -> StepBreakdown:
        return step_from_events(cost_model, self._events(table, cost_model, self.buckets(spec, table)))

    def _events(
        self, table: LayerTable, cost_model: CostModel, buckets: Sequence[GradientBucket]
    ) -> Iterator[StreamEvent]:
        """Yield a step of the replica with the largest update."""
        spec = cost_model.spec
        group, rows = place_group(spec, "dp"), unsharded_rows(spec, table)
        for call in self.before(spec, table):
            yield cost_model.collective(*call, group)
        if spec.micro_batches > 1:
            yield RepeatEvent(spec.micro_batches - 1, list(micro_batch_events(cost_model, spec, table, rows)))
        sends = bucket_calls_when_ready(cost_model, table, buckets, self.has_distinct_roots)
        yield from micro_batch_events(cost_model, spec, table, rows, after_backward=sends)
        yield WAIT_FOR_ALL
        replicas = range(min(spec.dp_degree, _REPLICAS_EXAMINED))
        yield from update_events(cost_model, spec, max((self.updated(spec, table, rank) for rank in replicas), key=sum))
        key = "owner" if self.has_distinct_roots else None
        calls = (cost_model.collective(*call, group, key) for call in self.after_update(spec, table))
        yield from _calls_on_parallel_streams(cost_model, calls) if self.has_distinct_roots else calls
        yield WAIT_FOR_ALL


def bucket_calls_when_ready(
    cost_model: CostModel, table: LayerTable, buckets: Sequence[GradientBucket], has_distinct_roots: bool = False
) -> EventsAtRow:
    """Return a function from a row to the calls of the buckets that are complete once it has its gradients."""
    group, ready_rows, row = place_group(cost_model.spec, "dp"), first_use_rows(table), len(table.layers)
    due: dict[int, list[CommCall]] = {}
    for places, calls in buckets:
        # Buckets are sent in their order: one that is complete waits for those before it.
        row = min([row, *(ready_rows[place] for place in places)])
        due.setdefault(row, []).extend(cost_model.collective(*call, group, "bucket") for call in calls)
    if has_distinct_roots:
        # Rows come in the order in which they run backwards.
        sent = _calls_on_parallel_streams(cost_model, chain.from_iterable(list(due.values())))
        due = {row: list(islice(sent, len(calls))) for row, calls in due.items()}
    return lambda number: due.get(number, ())


def _calls_on_parallel_streams(cost_model: CostModel, calls: Iterable[CommCall]) -> Iterator[CommCall]:
    """Calls with a root are bound by their root's link: with different roots they are not in each other's way."""
    streams = 1 if cost_model.machine.device == "cuda" else _GLOO_THREADS
    for number, call in enumerate(calls):
        yield call._replace(lane=f"{call.lane}{number % streams}", wire=f"{call.wire}{number % streams}")


class SingleCost(DataParallelCost):
    """The cost of one device, without communication."""


class DdpCost(DataParallelCost):
    """Every replica holds everything; gradients are all_reduced in buckets (Li et al. 2020)."""

    alike_replicas = True

    def before(self, spec: RunSpec, table: LayerTable) -> list[ReplicaCall]:
        """Return the broadcasts of rank 0's buffers."""
        return [("broadcast", size) for size in data_buckets.coalesced_buffer_bytes(spec, table)]

    def buckets(self, spec: RunSpec, table: LayerTable) -> list[GradientBucket]:
        return [
            (places, [("all_reduce", size) for size in data_buckets.compressed_bytes(spec, table, places)])
            for places in data_buckets.ddp_buckets(spec, table)
        ]

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return everything, and buckets beside the gradients unless these are views of them."""
        sizes, are_views = parameter_bytes(spec, table), options_with_defaults(spec)["gradient_as_bucket_view"]
        rows = preallocated_gradient_rows(table) if are_views else gradient_rows(spec, table)
        bucket_bytes = 0 if are_views else sum(sizes)
        updated = self.updated(spec, table, rank)
        return peak_memory(spec, table, PersistentMemory(sum(sizes), sizes, rows, updated, bucket_bytes))


COSTS = {
    "single": SingleCost,
    "ddp": DdpCost,
}
"""The cost of each strategy."""
