"""Costs of ``filter``, ``channel`` and their hybrids: traffic, memory and step of one rank.

``docs/formulas.md`` derives the formulas; ``tests/distributed/test_channel_costs.py`` compares them with real
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel, RowShare, row_kernels
from hpcbench.oracle.model_parallel import (
    NO_COMM,
    CommOp,
    LayerComm,
    RowEvents,
    comm_events,
    copy_event,
    model_parallel_step,
    replica_reductions,
    unsharded_row_events,
)
from hpcbench.oracle.peak_memory import (
    FP32_BYTES,
    FP64_BYTES,
    HALF_BYTES,
    MemoryBreakdown,
    PersistentMemory,
    RowMemory,
    bucket_bytes_in_flight,
    buffer_bytes,
    gradient_rows,
    input_bytes,
    peak_memory,
    weight_layout_copies,
)
from hpcbench.oracle.placement import place_group
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.oracle.stream_simulator import ComputeEvent
from hpcbench.parallel import layer_table
from hpcbench.parallel.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, bucket_payload_bytes
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.mesh import RankMesh
from hpcbench.parallel.strategies import channel
from hpcbench.parallel.strategies.channel import (
    ChannelLayerSplit,
    ChannelRow,
    channel_extents,
    channel_layer_rows,
    channel_scheme,
)
from hpcbench.parallel.traffic import Traffic, merge_calls

_BYTES_SENT_PER_NUMBER = {"fp64": 8, "bf16": 2, "fp16": 2}
_KINDS_WITHOUT_ACTIVATIONS = ("Flatten", "Identity")


def channel_comm(spec: RunSpec, table: LayerTable) -> list[LayerComm]:
    """Of every row of ``table`` on each of several ranks."""
    found: list[LayerComm] = []
    block, keeps = -1, False
    for one in reversed(channel_layer_rows(table)):
        if one.row.block != block:
            block, keeps = one.row.block, False
        found.append(_row_comm(spec, one, keeps))
        keeps = keeps or one.row.kind not in _KINDS_WITHOUT_ACTIVATIONS
    return found[::-1]


class _LayerSide(NamedTuple):
    """A layer's input or output: ``unit`` entries a channel and sample."""

    channels: int
    unit: int


def _row_comm(spec: RunSpec, one: ChannelRow, keeps: bool) -> LayerComm:
    split = one.split(channel_scheme(spec), spec.tp_degree)
    if one.layer is None or split is None:
        return NO_COMM
    into = _LayerSide(one.layer.in_channels, one.layer.features * prod(one.row.input_shape[1:]))
    out = _LayerSide(one.layer.out_channels, prod(one.row.output_shape[1:]))
    # The sample has no gradient.
    of_input = [] if one.layer.is_first else _side_comm(spec, split.enter.backward, into)
    return LayerComm(
        enter=_side_comm(spec, split.enter.forward, into),
        leave=_side_comm(spec, split.leave.forward, out),
        leave_backward=_side_comm(spec, split.leave.backward, out),
        enter_backward=of_input,
        is_left_again=keeps,
    )


def _side_comm(spec: RunSpec, operation: str, side: _LayerSide) -> list[CommOp]:
    if not operation:
        return []
    degree, samples = spec.tp_degree, spec.batch_size // spec.micro_batches
    one_channel = samples * side.unit * _BYTES_SENT_PER_NUMBER.get(spec.precision, 4)
    part, whole = max(channel_extents(side.channels, degree)) * one_channel, side.channels * one_channel
    payload = {"all_gather": part, "reduce_scatter": degree * part, "all_reduce": whole}.get(operation)
    if payload is None:
        return [CommOp(operation, part, None)]
    return [CommOp(operation, whole, Traffic(operation=operation, group_size=degree, payload_bytes=payload))]


_ACTIVATION_SCALE = {"fp64": FP64_BYTES / FP32_BYTES, "bf16": HALF_BYTES / FP32_BYTES}


def channel_row_memory(spec: RunSpec, table: layer_table.LayerTable, rank: int) -> list[RowMemory]:
    """Of every row of ``table``, on ``rank``. bf16 is counted as half of fp32, weights in any layout as fp32."""
    own, scale = ChannelRank(spec, rank), _ACTIVATION_SCALE.get(spec.precision, 1.0)
    wide = max(scale, 1.0)
    found, channels = [], 0
    for one in channel.channel_layer_rows(table):
        kept, moments = own.costs(one, channels)
        laid_out = own.weight_share(one) * one.row.parameters * FP32_BYTES * weight_layout_copies(one.row) * wide
        during = max(moments.backward * scale + laid_out, moments.before * scale, (moments.after - kept) * scale)
        block_input = own.samples * input_bytes(one.row) * own.share(channels)
        found.append(RowMemory(round(kept * scale), round(during), round(block_input * scale)))
        channels = one.channels
    return found


class ChannelRowTemporaries(NamedTuple):
    """Bytes in fp32 that come and go with a row."""

    backward: float
    """Gradients of output and input."""
    before: float
    """While the gradient of the output is made of what comes from the next layer."""
    after: float
    """While that of the input is made into what goes to the layer before; the row keeps nothing any more."""


class ChannelRank:
    """The shares of one rank."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self.spec, self.degree = spec, spec.tp_degree
        self.place = RankMesh.of(spec).coordinates(rank).tp
        self.samples = spec.batch_size // spec.micro_batches
        self.is_sharded = self.degree > 1 and channel_scheme(spec).form == "sharded"

    def share(self, channels: int) -> float:
        """Of a tensor of so many channels between layers; all of it where there is none to share."""
        return self.of(channels) if channels and self.is_sharded else 1.0

    def of(self, channels: int) -> float:
        """The rank's part of what is split into shares of ``channels``."""
        small, larger = divmod(channels, self.degree)
        return (small + (self.place < larger)) / channels

    def split(self, one: channel.ChannelRow) -> ChannelLayerSplit | None:
        """How the row's layer is split, if it is one and there is somebody to share it with."""
        return one.split(channel_scheme(self.spec), self.degree) if self.degree > 1 else None

    def weight_share(self, one: channel.ChannelRow) -> float:
        """Of the row's parameters."""
        split = self.split(one)
        if one.layer is None or split is None or split.weight_dim is None:
            return self.share(one.channels) if one.layer is None else 1.0
        return self.of(one.layer.in_channels if split.weight_dim else one.layer.out_channels)

    def costs(self, one: channel.ChannelRow, channels: int) -> tuple[float, ChannelRowTemporaries]:
        """What is kept for the row, and what comes and goes; ``channels`` are those of what is given to it."""
        whole_in, whole_out = self.samples * input_bytes(one.row), self.samples * one.row.output_bytes
        table_bytes = self.samples * one.row.activation_bytes + one.row.activation_fixed_bytes
        given, made = whole_in * self.share(channels), whole_out * self.share(one.channels)
        split = self.split(one)
        if one.layer is None or split is None:
            kept_share = self.share(channels if one.layer is not None else one.channels)
            return table_bytes * kept_share, ChannelRowTemporaries(given + made, 0.0, 0.0)
        # What was gathered is a copy of its own, whoever keeps the parts.
        is_gathered = split.enter.forward == "all_gather"
        kept = float(FP32_BYTES * self.samples * prod(one.row.input_shape)) if is_gathered else table_bytes
        if not is_gathered:
            kept *= 1.0 if one.layer.is_first else self.share(one.layer.in_channels)
        inside_in = whole_in * (self.of(one.layer.in_channels) if split.by in ("channels", "groups") else 1.0)
        inside_out = whole_out * (self.of(one.layer.out_channels) if split.by in ("filters", "groups") else 1.0)
        if one.layer.is_first:
            inside_in = 0.0
        # Parts one behind the other as they are passed, and then side by side.
        before = {"all_gather": made + 2 * whole_out, "narrow": whole_out}.get(split.leave.backward, 0.0)
        after = {"all_gather": inside_in + 2 * whole_in, "reduce_scatter": 2 * whole_in + given}.get(
            split.enter.backward, 2 * whole_in if split.enter.backward == "all_reduce" else 0.0
        )
        inside_out = max(inside_out, whole_out if split.leave.backward == "narrow" else 0.0)
        return kept, ChannelRowTemporaries(inside_in + inside_out, before, 0.0 if one.layer.is_first else after)


def channel_step(clock: CostModel, spec: RunSpec, table: LayerTable, sizes: Sequence[int]) -> StepBreakdown:
    """Of the rank with the first shares, which are the largest. ``sizes``: bytes of its parameters."""
    rows = _channel_row_events(clock, spec, table) if spec.tp_degree > 1 else unsharded_row_events(clock, spec, table)
    return model_parallel_step(clock, spec, table, rows, sizes, replica_reductions(spec, sizes))


def _channel_row_events(clock: CostModel, spec: RunSpec, table: LayerTable) -> list[RowEvents]:
    parts, group = ChannelRank(spec, 0), place_group(spec, "tp")
    with_bias = {one.name.rpartition(".")[0] for one in table.parameter_tensors if one.name.endswith(".bias")}
    found, channels = [], 0
    for one, around in zip(channel.channel_layer_rows(table), channel_comm(spec, table), strict=True):
        computed = row_kernels(spec, one.row, parts.samples, _channel_row_share(parts, one, channels))
        channels, split = one.channels, parts.split(one)
        enter, leave = comm_events(clock, spec, around.enter, group), comm_events(clock, spec, around.leave, group)
        if split is not None and split.by == "channels" and one.row.name in with_bias:
            # Added to what has been summed over the ranks.
            leave.append(copy_event(clock, spec, computed.forward.output_bytes * parts.share(channels)))
        forward, backward = (ComputeEvent(clock.kernel_s(kernel)) for kernel in computed)
        before, after = (
            comm_events(clock, spec, moves, group) for moves in (around.leave_backward, around.enter_backward)
        )
        again = [*enter, forward, *(leave if around.is_left_again else ())]
        found.append(RowEvents([*enter, forward, *leave], [*before, backward], again, after))
    return found


def _channel_row_share(parts: ChannelRank, one: channel.ChannelRow, channels: int) -> RowShare:
    """Of a row whose input has ``channels`` channels that ranks may share."""
    split = parts.split(one)
    if one.layer is None:
        own = parts.share(one.channels)
        return RowShare(own, parts.share(channels), own, own)
    if split is None or not split.by:
        return RowShare()
    ins, outs = parts.of(one.layer.in_channels), parts.of(one.layer.out_channels)
    if split.by == "channels":
        return RowShare(ins, ins, 1.0, ins)
    return RowShare(outs, ins if split.by == "groups" else 1.0, outs, outs)


class ChannelSplitCost:
    """Both strategies: ``parallel.channels`` knows what differs."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Around every layer once a micro-batch, and a hybrid's buckets once."""
        calls: list[Traffic] = []
        if spec.tp_degree > 1:
            around = channel_comm(spec, table)
            calls += [call for one in around for call in one.calls(spec.activation_checkpointing)]
            calls *= spec.micro_batches
        if spec.dp_degree > 1:
            sizes = bucket_payload_bytes(_rank_parameter_bytes(spec, table, rank), int(DEFAULT_BUCKET_CAP_MB * MIB))
            calls += [Traffic(operation="all_reduce", group_size=spec.dp_degree, payload_bytes=size) for size in sizes]
        return merge_calls(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Shares of what is split, at the moment at which they are most."""
        sizes = _rank_parameter_bytes(spec, table, rank)
        kept = PersistentMemory(sum(sizes), sizes, gradient_rows(spec, table), sizes)
        underway = bucket_bytes_in_flight(table, sizes) if spec.dp_degree > 1 else ()
        return peak_memory(
            spec, table, kept, underway, channel_row_memory(spec, table, rank), _rank_buffer_bytes(spec, table, rank)
        )

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """The rank with the first shares, the largest, sets the pace."""
        return channel_step(clock, spec, table, _rank_parameter_bytes(spec, table, 0))


class FilterCost(ChannelSplitCost):
    """Output channels shared by the ranks along ``tp``."""


class ChannelCost(ChannelSplitCost):
    """Input channels shared by the ranks along ``tp``."""


def _parameter_element_bytes(spec: RunSpec) -> int:
    """Of parameters and of what is computed of them."""
    return 8 if spec.precision == "fp64" else 4


def _shard_fractions(spec: RunSpec, table: LayerTable, rank: int) -> dict[str, float]:
    """By module: the rank's share of vectors over channels, of what lies between split layers."""
    if spec.tp_degree == 1 or channel_scheme(spec).form == "gathered":
        return {}
    place = RankMesh.of(spec).coordinates(rank).tp
    return {
        one.row.name: channel_extents(one.channels, spec.tp_degree)[place] / one.channels
        for one in channel_layer_rows(table)
        if one.channels and one.layer is None
    }


def _rank_buffer_bytes(spec: RunSpec, table: LayerTable, rank: int) -> int:
    shares = _shard_fractions(spec, table, rank)
    return round(
        sum(
            size * (shares.get(one.name.rpartition(".")[0], 1.0) if one.shape else 1.0)
            for one, size in zip(table.buffers, buffer_bytes(spec, table), strict=True)
        )
    )


def _rank_parameter_bytes(spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
    """Of every parameter, in the model's order, what ``rank`` holds."""
    place, degree, scheme = RankMesh.of(spec).coordinates(rank).tp, spec.tp_degree, channel_scheme(spec)
    between = _shard_fractions(spec, table, rank)
    layers = {one.row.name: one for one in channel_layer_rows(table) if one.layer is not None}
    found = []
    for tensor in table.parameter_tensors:
        owner, _, own_name = tensor.name.rpartition(".")
        shape = list(tensor.shape)
        one = layers.get(owner)
        split = one.split(scheme, degree) if one is not None and degree > 1 else None
        if one is not None and one.layer is not None and split is not None:
            outs = channel_extents(one.layer.out_channels, degree)[place]
            ins = channel_extents(one.layer.in_channels, degree, one.layer.features)[place]
            if own_name == "weight" and split.weight_dim is not None:
                shape[split.weight_dim] = ins if split.weight_dim else outs
            elif own_name == "bias" and split.is_bias_split:
                shape[0] = outs
        elif owner in between:
            shape[0] = round(shape[0] * between[owner])
        found.append(prod(shape) * _parameter_element_bytes(spec))
    return found
