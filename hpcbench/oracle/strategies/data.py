"""The data-parallel family: what each replica passes to collectives in a steady step, and what it holds.

``docs/formulas.md`` derives the formulas; ``tests/distributed/test_traffic.py`` compares them with real ranks.
"""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.gradient_buckets import (
    coalesced_buffer_bytes,
    compressed_bytes,
    ddp_buckets,
    owned_places,
    owner_bytes,
    sddp_reduced_bytes,
)
from hpcbench.oracle.tensors import HALF_BYTES, buffer_bytes, elements, parameter_bytes, tensor_bytes
from hpcbench.parallel.buckets import total
from hpcbench.parallel.catalog import chosen_options
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.traffic import Traffic, calls_in, merged


class Single:
    """One device has nobody to talk to."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Nothing."""
        return []


class Ddp:
    """Every replica holds everything; gradients are all_reduced in buckets (Li et al. 2020)."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Buckets in the order in which gradients were ready in the first step, and rank 0's buffers."""
        return merged(cls.calls(spec, table))

    @classmethod
    def calls(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """As ``traffic``, call by call."""
        call = calls_in(spec.dp_degree)
        calls = [call("broadcast", size) for size in coalesced_buffer_bytes(spec, table)]
        for places in ddp_buckets(spec, table):
            calls += [call("all_reduce", size) for size in compressed_bytes(spec, table, places)]
        return calls


class Zero1(Ddp):
    """As ``Ddp``; owners broadcast the parameters that they updated (ZeRO-1, Rajbhandari et al. 2020)."""

    @classmethod
    def calls(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """One broadcast a tensor, or one an owner."""
        call, sizes = calls_in(spec.dp_degree), parameter_bytes(spec, table)
        if chosen_options(spec)["parameters_as_bucket_view"]:
            sizes = [total(sizes, places) for places in owned_places(spec, table)]
        return [*super().calls(spec, table), *(call("broadcast", size) for size in sizes)]


class FairscaleOss(Ddp):
    """As ``Zero1``, one broadcast an owner."""

    @classmethod
    def calls(cls, spec: RunSpec, table: LayerTable) -> list[Traffic]:
        """``broadcast_fp16`` halves them."""
        call = calls_in(spec.dp_degree)
        sent = owner_bytes(spec, table, half=chosen_options(spec)["broadcast_fp16"])
        return [*super().calls(spec, table), *(call("broadcast", size) for size in sent)]


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
