"""What ``filter``, ``channel`` and their hybrids pass to collectives in a step, and what a rank of them holds.

``docs/formulas.md`` derives the formulas; ``tests/distributed/test_channel_costs.py`` compares them with real ranks.
"""

from __future__ import annotations

from math import prod

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.channel_calls import around_rows
from hpcbench.oracle.channel_rows import channel_rows
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.live import Kept, held_at_peak, in_turn, sent_at_once
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.channels import step_of_channels
from hpcbench.oracle.tensors import buffer_bytes
from hpcbench.parallel.buckets import BUCKET_CAP_MB, MIB, bucket_bytes
from hpcbench.parallel.channel_limits import scheme_of
from hpcbench.parallel.channel_table import rows
from hpcbench.parallel.channels import extents
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.traffic import Traffic, merged


class ChannelSplit:
    """Both strategies: ``parallel.channels`` knows what differs."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Around every layer once a micro-batch, and a hybrid's buckets once."""
        calls: list[Traffic] = []
        if spec.tp_degree > 1:
            around = around_rows(spec, table)
            calls += [call for one in around for call in one.calls(spec.activation_checkpointing)]
            calls *= spec.micro_batches
        if spec.dp_degree > 1:
            sizes = bucket_bytes(_parameter_bytes(spec, table, rank), int(BUCKET_CAP_MB * MIB))
            calls += [Traffic(operation="all_reduce", group_size=spec.dp_degree, payload_bytes=size) for size in sizes]
        return merged(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """Shares of what is split, at the moment at which they are most."""
        sizes = _parameter_bytes(spec, table, rank)
        kept = Kept(sum(sizes), sizes, in_turn(spec, table), sizes)
        underway = sent_at_once(table, sizes) if spec.dp_degree > 1 else ()
        return held_at_peak(spec, table, kept, underway, channel_rows(spec, table, rank), _buffers(spec, table, rank))

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """The rank with the first shares, the largest, sets the pace."""
        return step_of_channels(clock, spec, table, _parameter_bytes(spec, table, 0))


class Filter(ChannelSplit):
    """Output channels shared by the ranks along ``tp``."""


class Channel(ChannelSplit):
    """Input channels shared by the ranks along ``tp``."""


def _element_bytes(spec: RunSpec) -> int:
    """Of parameters and of what is computed of them."""
    return 8 if spec.precision == "fp64" else 4


def _shard_fractions(spec: RunSpec, table: LayerTable, rank: int) -> dict[str, float]:
    """By module: the rank's share of vectors over channels, of what lies between split layers."""
    if spec.tp_degree == 1 or scheme_of(spec).form == "gathered":
        return {}
    place = Mesh.of(spec).coordinates(rank).tp
    return {
        one.row.name: extents(one.channels, spec.tp_degree)[place] / one.channels
        for one in rows(table)
        if one.channels and one.layer is None
    }


def _buffers(spec: RunSpec, table: LayerTable, rank: int) -> int:
    shares = _shard_fractions(spec, table, rank)
    return round(
        sum(
            size * (shares.get(one.name.rpartition(".")[0], 1.0) if one.shape else 1.0)
            for one, size in zip(table.buffers, buffer_bytes(spec, table), strict=True)
        )
    )


def _parameter_bytes(spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
    """Of every parameter, in the model's order, what ``rank`` holds."""
    place, degree, scheme = Mesh.of(spec).coordinates(rank).tp, spec.tp_degree, scheme_of(spec)
    between = _shard_fractions(spec, table, rank)
    layers = {one.row.name: one for one in rows(table) if one.layer is not None}
    found = []
    for tensor in table.parameter_tensors:
        owner, _, own_name = tensor.name.rpartition(".")
        shape = list(tensor.shape)
        one = layers.get(owner)
        split = one.split(scheme, degree) if one is not None and degree > 1 else None
        if one is not None and one.layer is not None and split is not None:
            outs = extents(one.layer.out_channels, degree)[place]
            ins = extents(one.layer.in_channels, degree, one.layer.features)[place]
            if own_name == "weight" and split.weight_dim is not None:
                shape[split.weight_dim] = ins if split.weight_dim else outs
            elif own_name == "bias" and split.is_bias_split:
                shape[0] = outs
        elif owner in between:
            shape[0] = round(shape[0] * between[owner])
        found.append(prod(shape) * _element_bytes(spec))
    return found
