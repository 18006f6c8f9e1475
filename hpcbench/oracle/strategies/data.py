"""Costs of the data-parallel family: traffic, memory and step of one replica.

``docs/formulas.md`` derives the formulas; ``tests/distributed/test_traffic.py`` compares them with real ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import ClassVar

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel, unsharded_row_kernels
from hpcbench.oracle.peak_memory import (
    HALF_BYTES,
    MemoryBreakdown,
    PersistentMemory,
    buffer_bytes,
    element_count,
    gradient_rows,
    parameter_bytes,
    peak_memory,
    preallocated_gradient_rows,
    tensor_bytes,
)
from hpcbench.oracle.placement import GroupPlacement, place_group
from hpcbench.oracle.step_time import (
    WAIT_FOR_ALL,
    EventsAtRow,
    StepBreakdown,
    backward_events,
    forward_events,
    step_from_events,
    update_events,
    without_waiting,
)
from hpcbench.oracle.strategies.data_buckets import (
    coalesced_buffer_bytes,
    compressed_bytes,
    ddp_buckets,
    fused_buckets,
    owned_bytes_by_replica,
    owned_parameters,
    rank_owned_bytes,
    sddp_buckets,
    sddp_reduced_bytes,
)
from hpcbench.oracle.stream_simulator import CommCall, RepeatEvent, StreamEvent
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.gradient_buckets import MIB, first_use_rows, sum_bytes_at
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.traffic import Traffic, group_call_factory, merge_calls

GradientBucket = tuple[Iterable[int], list[Traffic]]
"""Places of the tensors whose gradients it holds, and the calls that are made once all of them are there."""
_GLOO_THREADS = 2
"""Of a process group's calls gloo has so many under way at once (torch's ``ProcessGroupGloo::Options``), NCCL one."""


def replica_step(
    clock: CostModel,
    spec: RunSpec,
    table: LayerTable,
    *,
    before: Sequence[Traffic] = (),
    buckets: Sequence[GradientBucket] = (),
    after_update: Sequence[Traffic] = (),
    updated: Sequence[float] | None = None,
    one_an_owner: bool = False,
) -> StepBreakdown:
    """A step of one replica: ``before`` is passed before it, ``after_update`` behind it, one call after another.

    ``updated``: bytes of each tensor that the rank updates, of all where absent. ``one_an_owner``: of buckets and of
    ``after_update`` each call has another root than the one before, and none is waited for alone.
    """
    group = place_group(spec, "dp")
    passes = unsharded_row_kernels(spec, table)

    def events() -> Iterator[StreamEvent]:
        yield from _blocking_calls(clock, before, group)
        if spec.micro_batches > 1:
            once = [*forward_events(clock, passes), *backward_events(clock, spec, table, passes)]
            yield RepeatEvent(spec.micro_batches - 1, once)
        yield from forward_events(clock, passes)
        sends = bucket_calls_when_ready(clock, table, buckets, group, one_an_owner)
        yield from backward_events(clock, spec, table, passes, after=sends)
        yield WAIT_FOR_ALL
        yield from update_events(clock, spec, parameter_bytes(spec, table) if updated is None else updated)
        if one_an_owner:
            yield from _calls_on_parallel_streams(
                clock, (without_waiting(one, "owner") for one in _blocking_calls(clock, after_update, group))
            )
            yield WAIT_FOR_ALL
        else:
            yield from _blocking_calls(clock, after_update, group)

    return step_from_events(clock, events())


def bucket_calls_when_ready(
    clock: CostModel,
    table: LayerTable,
    buckets: Sequence[GradientBucket],
    group: GroupPlacement,
    one_an_owner: bool = False,
) -> EventsAtRow:
    """After a row has run backwards: the buckets whose last gradient it made, in the buckets' order."""
    made_at = first_use_rows(table)
    due: dict[int, list[CommCall]] = {}
    row = len(table.layers)
    for places, calls in buckets:
        # Buckets are sent in their order: one that is complete waits for those before it.
        row = min([row, *(made_at[place] for place in places)])
        for call in calls:
            due.setdefault(row, []).extend(without_waiting(one, "bucket") for one in clock.calls(call, group))
    if one_an_owner:
        # Rows come in the order in which they run backwards.
        sent = _calls_on_parallel_streams(clock, chain.from_iterable(list(due.values())))
        due = {row: list(islice(sent, len(calls))) for row, calls in due.items()}
    return lambda number: due.get(number, ())


def _blocking_calls(clock: CostModel, calls: Sequence[Traffic], group: GroupPlacement) -> Iterator[CommCall]:
    for call in calls:
        yield from clock.calls(call, group)


def _calls_on_parallel_streams(clock: CostModel, calls: Iterable[CommCall]) -> Iterator[CommCall]:
    """Calls with a root are bound by their root's link: with different roots they are not in each other's way."""
    lanes = 1 if clock.machine.device == "cuda" else _GLOO_THREADS
    for number, call in enumerate(calls):
        yield call._replace(lane=f"{call.lane}{number % lanes}", wire=f"{call.wire}{number % lanes}")


_REPLICAS_EXAMINED = 64
"""So many replicas are asked which of them updates most: owners beyond them hold less."""


class SingleCost:
    """One device has nobody to talk to."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Nothing."""
        return []

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Everything."""
        sizes = parameter_bytes(spec, table)
        return peak_memory(spec, table, PersistentMemory(sum(sizes), sizes, gradient_rows(spec, table), sizes))

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """Computation alone."""
        return replica_step(clock, spec, table)


class DdpCost:
    """Every replica holds everything; gradients are all_reduced in buckets (Li et al. 2020)."""

    one_an_owner: ClassVar[bool] = False
    """Whether every owner passes on what it updated in one call; all of them are begun before any is waited for."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Buckets in the order in which gradients were ready in the first step, and rank 0's buffers."""
        return merge_calls(cls.calls(spec, table))

    @classmethod
    def calls(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """As ``traffic``, call by call."""
        return [*cls.before(spec, table), *(call for _, sent in cls.buckets(spec, table) for call in sent)]

    @classmethod
    def before(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """Of rank 0's buffers."""
        return [group_call_factory(spec.dp_degree)("broadcast", size) for size in coalesced_buffer_bytes(spec, table)]

    @classmethod
    def buckets(cls, spec: RunSpec, table: LayerTable) -> list[GradientBucket]:
        """Of the gradients."""
        call = group_call_factory(spec.dp_degree)
        return [
            (places, [call("all_reduce", size) for size in compressed_bytes(spec, table, places)])
            for places in ddp_buckets(spec, table)
        ]

    @classmethod
    def after_update(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """What owners pass on: here nothing."""
        return []

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """Buckets are sent under the backward pass; the replica that updates most sets the pace."""
        most = max(range(min(spec.dp_degree, _REPLICAS_EXAMINED)), key=lambda rank: sum(cls.updated(spec, table, rank)))
        return replica_step(
            clock, spec, table,
            before=cls.before(spec, table),
            buckets=cls.buckets(spec, table),
            after_update=cls.after_update(spec, table),
            updated=cls.updated(spec, table, most),
            one_an_owner=cls.one_an_owner,
        )  # fmt: skip

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Everything, and buckets beside the gradients unless these are views of them."""
        sizes, options = parameter_bytes(spec, table), options_with_defaults(spec)
        views = bool(options["gradient_as_bucket_view"])
        made_at = preallocated_gradient_rows(table) if views else gradient_rows(spec, table)
        beside = 0 if views else sum(sizes)
        return peak_memory(
            spec, table, PersistentMemory(sum(sizes), sizes, made_at, cls.updated(spec, table, rank), beside)
        )

    @classmethod
    def updated(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
        """Bytes of every parameter that ``rank`` updates: here of all of them."""
        return parameter_bytes(spec, table)


class Zero1Cost(DdpCost):
    """As ``Ddp``; owners broadcast the parameters that they updated (ZeRO-1, Rajbhandari et al. 2020)."""

    @classmethod
    def calls(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """One broadcast a tensor, or one an owner."""
        return [*super().calls(spec, table), *cls.after_update(spec, table)]

    @classmethod
    def after_update(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """From each owner to all."""
        call, sizes = group_call_factory(spec.dp_degree), parameter_bytes(spec, table)
        if options_with_defaults(spec)["parameters_as_bucket_view"]:
            owned = [sum_bytes_at(sizes, places) for places in owned_parameters(spec, table)]
            sizes = owned + [0] * (spec.dp_degree - len(owned))
        return [call("broadcast", size) for size in sizes]

    @classmethod
    def updated(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
        """Those that it owns."""
        return rank_owned_bytes(spec, table, rank)


class FairscaleOssCost(DdpCost):
    """As ``Zero1``, one broadcast an owner."""

    one_an_owner = True

    @classmethod
    def calls(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """``broadcast_fp16`` halves them."""
        return [*super().calls(spec, table), *cls.after_update(spec, table)]

    @classmethod
    def after_update(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """From each owner to all."""
        sent = owned_bytes_by_replica(spec, table, half=options_with_defaults(spec)["broadcast_fp16"])
        return [group_call_factory(spec.dp_degree)("broadcast", size) for size in sent]

    @classmethod
    def updated(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
        """Those that it owns."""
        return rank_owned_bytes(spec, table, rank)


class FairscaleSddpCost:
    """Gradients are reduced to their owners, who broadcast updated parameters (ZeRO-2)."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """A bucket an owner, what did not fit into it tensor by tensor, every buffer by itself."""
        call = group_call_factory(spec.dp_degree)
        reduced = sddp_reduced_bytes(spec, table)
        return merge_calls(
            [
                *(call("broadcast", size) for size in buffer_bytes(spec, table)),
                *(call("reduce", size) for size in reduced),
                *(call("broadcast", size) for size in owned_bytes_by_replica(spec, table)),
            ]
        )

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Gradients in buckets stay on every rank; others on their owner alone, after all that waits is reduced."""
        sizes, owned = parameter_bytes(spec, table), rank_owned_bytes(spec, table, rank)
        filled, alone = sddp_buckets(spec, table)
        left, made_at, waiting = list(sizes), gradient_rows(spec, table), [0] * (len(table.layers) + 1)
        for bucket in filled:
            for place in bucket:
                made_at[place] = len(table.layers)
        for place in alone:
            left[place] = owned[place]
            waiting[made_at[place]] += sizes[place] - owned[place]
        underway = [sum(waiting[row:]) for row in range(len(table.layers))]
        return peak_memory(spec, table, PersistentMemory(sum(sizes), left, made_at, owned), underway)

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """Reductions under the backward pass, each as soon as its gradients are there."""
        call, (filled, alone) = group_call_factory(spec.dp_degree), sddp_buckets(spec, table)
        sizes = parameter_bytes(spec, table)
        half = bool(options_with_defaults(spec)["reduce_fp16"])
        groups = [[place] for place in range(len(sizes))] if half else [*filled, *([place] for place in alone)]
        reduced = sddp_reduced_bytes(spec, table)
        made_at = gradient_rows(spec, table)
        buckets = [(places, [call("reduce", size)]) for places, size in zip(groups, reduced, strict=True)]
        buckets.sort(key=lambda one: -min((made_at[place] for place in one[0]), default=0))
        most = max(
            range(min(spec.dp_degree, _REPLICAS_EXAMINED)), key=lambda rank: sum(rank_owned_bytes(spec, table, rank))
        )
        return replica_step(
            clock, spec, table,
            before=[call("broadcast", size) for size in buffer_bytes(spec, table)],
            buckets=buckets,
            after_update=[call("broadcast", size) for size in owned_bytes_by_replica(spec, table)],
            updated=rank_owned_bytes(spec, table, most),
            one_an_owner=True,
        )  # fmt: skip


class HorovodCost:
    """Gradients are fused by timing: one all_reduce of them all stands for those that are made (their sum is exact)."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """The payload of all gradients together."""
        half = options_with_defaults(spec)["compression"] == "fp16"
        payload = sum(
            element_count(tensor) * HALF_BYTES if half else tensor_bytes(spec, tensor)
            for tensor in table.parameter_tensors
        )
        return [group_call_factory(spec.dp_degree)("all_reduce", payload)] if spec.dp_degree > 1 else []

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Everything, and the buffer in which gradients are fused, of which they fill no more than they are large."""
        sizes = parameter_bytes(spec, table)
        fusion = int(float(options_with_defaults(spec)["fusion_threshold_mb"]) * MIB)
        filled = min(fusion, sum(sizes))
        held = peak_memory(spec, table, PersistentMemory(sum(sizes), sizes, gradient_rows(spec, table), sizes, filled))
        return msgspec.structs.replace(held, untouched_bytes=fusion - filled)

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """Gradients are fused as the background thread finds them, and passed under the backward pass."""
        options, call = options_with_defaults(spec), group_call_factory(spec.dp_degree)
        half = options["compression"] == "fp16"
        tensors = table.parameter_tensors
        sizes = [element_count(one) * HALF_BYTES if half else tensor_bytes(spec, one) for one in tensors]
        cycle_s, threshold = float(options["cycle_time_ms"]) / 1e3, int(float(options["fusion_threshold_mb"]) * MIB)
        together = fused_buckets(clock, spec, table, sizes, cycle_s, threshold) if spec.dp_degree > 1 else []
        buckets = [(places, [call("all_reduce", sum_bytes_at(sizes, places))]) for places in together]
        return replica_step(clock, spec, table, buckets=buckets)
