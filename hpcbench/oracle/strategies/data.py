"""The data-parallel family: what each replica passes to collectives in a steady step, and what it holds.

``docs/formulas.md`` derives the formulas; ``tests/distributed/test_traffic.py`` compares them with real ranks.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.gradient_buckets import (
    coalesced_buffer_bytes,
    compressed_bytes,
    ddp_buckets,
    owned_bytes,
    owned_places,
    owner_bytes,
    sddp_buckets,
    sddp_reduced_bytes,
)
from hpcbench.oracle.live import Kept, from_the_start, held_at_peak, in_turn
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.fusion import fused
from hpcbench.oracle.steps.replicas import Bucket, step_of_replica
from hpcbench.oracle.tensors import HALF_BYTES, buffer_bytes, elements, parameter_bytes, tensor_bytes
from hpcbench.parallel.buckets import MIB, total
from hpcbench.parallel.catalog import chosen_options
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.traffic import Traffic, calls_in, merged

_ASKED = 64
"""So many replicas are asked which of them updates most: owners beyond them hold less."""


class Single:
    """One device has nobody to talk to."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Nothing."""
        return []

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """Everything."""
        sizes = parameter_bytes(spec, table)
        return held_at_peak(spec, table, Kept(sum(sizes), sizes, in_turn(spec, table), sizes))

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """Computation alone."""
        return step_of_replica(clock, spec, table)


class Ddp:
    """Every replica holds everything; gradients are all_reduced in buckets (Li et al. 2020)."""

    one_an_owner: ClassVar[bool] = False
    """Whether every owner passes on what it updated in one call; all of them are begun before any is waited for."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Buckets in the order in which gradients were ready in the first step, and rank 0's buffers."""
        return merged(cls.calls(spec, table))

    @classmethod
    def calls(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """As ``traffic``, call by call."""
        return [*cls.before(spec, table), *(call for _, sent in cls.buckets(spec, table) for call in sent)]

    @classmethod
    def before(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """Of rank 0's buffers."""
        return [calls_in(spec.dp_degree)("broadcast", size) for size in coalesced_buffer_bytes(spec, table)]

    @classmethod
    def buckets(cls, spec: RunSpec, table: LayerTable) -> list[Bucket]:
        """Of the gradients."""
        call = calls_in(spec.dp_degree)
        return [
            (places, [call("all_reduce", size) for size in compressed_bytes(spec, table, places)])
            for places in ddp_buckets(spec, table)
        ]

    @classmethod
    def after_update(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """What owners pass on: here nothing."""
        return []

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """Buckets are sent under the backward pass; the replica that updates most sets the pace."""
        most = max(range(min(spec.dp_degree, _ASKED)), key=lambda rank: sum(cls.updated(spec, table, rank)))
        return step_of_replica(
            clock, spec, table,
            before=cls.before(spec, table),
            buckets=cls.buckets(spec, table),
            after_update=cls.after_update(spec, table),
            updated=cls.updated(spec, table, most),
            one_an_owner=cls.one_an_owner,
        )  # fmt: skip

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """Everything, and buckets beside the gradients unless these are views of them."""
        sizes, options = parameter_bytes(spec, table), chosen_options(spec)
        views = bool(options["gradient_as_bucket_view"])
        made_at = from_the_start(table) if views else in_turn(spec, table)
        beside = 0 if views else sum(sizes)
        return held_at_peak(spec, table, Kept(sum(sizes), sizes, made_at, cls.updated(spec, table, rank), beside))

    @classmethod
    def updated(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
        """Bytes of every parameter that ``rank`` updates: here of all of them."""
        return parameter_bytes(spec, table)


class Zero1(Ddp):
    """As ``Ddp``; owners broadcast the parameters that they updated (ZeRO-1, Rajbhandari et al. 2020)."""

    @classmethod
    def calls(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """One broadcast a tensor, or one an owner."""
        return [*super().calls(spec, table), *cls.after_update(spec, table)]

    @classmethod
    def after_update(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """From each owner to all."""
        call, sizes = calls_in(spec.dp_degree), parameter_bytes(spec, table)
        if chosen_options(spec)["parameters_as_bucket_view"]:
            owned = [total(sizes, places) for places in owned_places(spec, table)]
            sizes = owned + [0] * (spec.dp_degree - len(owned))
        return [call("broadcast", size) for size in sizes]

    @classmethod
    def updated(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
        """Those that it owns."""
        return owned_bytes(spec, table, rank)


class FairscaleOss(Ddp):
    """As ``Zero1``, one broadcast an owner."""

    one_an_owner = True

    @classmethod
    def calls(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """``broadcast_fp16`` halves them."""
        return [*super().calls(spec, table), *cls.after_update(spec, table)]

    @classmethod
    def after_update(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """From each owner to all."""
        sent = owner_bytes(spec, table, half=chosen_options(spec)["broadcast_fp16"])
        return [calls_in(spec.dp_degree)("broadcast", size) for size in sent]

    @classmethod
    def updated(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
        """Those that it owns."""
        return owned_bytes(spec, table, rank)


class FairscaleSddp:
    """Gradients are reduced to their owners, who broadcast updated parameters (ZeRO-2)."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """A bucket an owner, what did not fit into it tensor by tensor, every buffer by itself."""
        call = calls_in(spec.dp_degree)
        reduced = sddp_reduced_bytes(spec, table)
        return merged(
            [
                *(call("broadcast", size) for size in buffer_bytes(spec, table)),
                *(call("reduce", size) for size in reduced),
                *(call("broadcast", size) for size in owner_bytes(spec, table)),
            ]
        )

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """Gradients in buckets stay on every rank; others on their owner alone, after all that waits is reduced."""
        sizes, owned = parameter_bytes(spec, table), owned_bytes(spec, table, rank)
        filled, alone = sddp_buckets(spec, table)
        left, made_at, waiting = list(sizes), in_turn(spec, table), [0] * (len(table.layers) + 1)
        for bucket in filled:
            for place in bucket:
                made_at[place] = len(table.layers)
        for place in alone:
            left[place] = owned[place]
            waiting[made_at[place]] += sizes[place] - owned[place]
        underway = [sum(waiting[row:]) for row in range(len(table.layers))]
        return held_at_peak(spec, table, Kept(sum(sizes), left, made_at, owned), underway)

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """Reductions under the backward pass, each as soon as its gradients are there."""
        call, (filled, alone) = calls_in(spec.dp_degree), sddp_buckets(spec, table)
        sizes = parameter_bytes(spec, table)
        half = bool(chosen_options(spec)["reduce_fp16"])
        groups = [[place] for place in range(len(sizes))] if half else [*filled, *([place] for place in alone)]
        reduced = sddp_reduced_bytes(spec, table)
        made_at = in_turn(spec, table)
        buckets = [(places, [call("reduce", size)]) for places, size in zip(groups, reduced, strict=True)]
        buckets.sort(key=lambda one: -min((made_at[place] for place in one[0]), default=0))
        most = max(range(min(spec.dp_degree, _ASKED)), key=lambda rank: sum(owned_bytes(spec, table, rank)))
        return step_of_replica(
            clock, spec, table,
            before=[call("broadcast", size) for size in buffer_bytes(spec, table)],
            buckets=buckets,
            after_update=[call("broadcast", size) for size in owner_bytes(spec, table)],
            updated=owned_bytes(spec, table, most),
            one_an_owner=True,
        )  # fmt: skip


class Horovod:
    """Gradients are fused by timing: one all_reduce of them all stands for those that are made (their sum is exact)."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """The payload of all gradients together."""
        half = chosen_options(spec)["compression"] == "fp16"
        payload = sum(
            elements(tensor) * HALF_BYTES if half else tensor_bytes(spec, tensor) for tensor in table.parameter_tensors
        )
        return [calls_in(spec.dp_degree)("all_reduce", payload)] if spec.dp_degree > 1 else []

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """Everything, and the buffer in which gradients are fused, of which they fill no more than they are large."""
        sizes = parameter_bytes(spec, table)
        fusion = int(float(chosen_options(spec)["fusion_threshold_mb"]) * MIB)
        filled = min(fusion, sum(sizes))
        held = held_at_peak(spec, table, Kept(sum(sizes), sizes, in_turn(spec, table), sizes, filled))
        return msgspec.structs.replace(held, untouched_bytes=fusion - filled)

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """Gradients are fused as the background thread finds them, and passed under the backward pass."""
        options, call = chosen_options(spec), calls_in(spec.dp_degree)
        half = options["compression"] == "fp16"
        tensors = table.parameter_tensors
        sizes = [elements(one) * HALF_BYTES if half else tensor_bytes(spec, one) for one in tensors]
        cycle_s, threshold = float(options["cycle_time_ms"]) / 1e3, int(float(options["fusion_threshold_mb"]) * MIB)
        together = fused(clock, spec, table, sizes, cycle_s, threshold) if spec.dp_degree > 1 else []
        buckets = [(places, [call("all_reduce", total(sizes, places))]) for places in together]
        return step_of_replica(clock, spec, table, buckets=buckets)
