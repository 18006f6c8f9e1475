"""Spatial parallelism: halos, statistics, the switch and gradients, for one rank. ``docs/formulas.md`` derives them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.cost import Memory
from hpcbench.parallel.buckets import MIB, bucket_bytes
from hpcbench.parallel.catalog import strategy
from hpcbench.parallel.halo import halo, own_box, volume
from hpcbench.parallel.layers import Layer, LayerTable, TensorShape
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.spatial import (
    CONVOLUTIONS,
    GLOBAL_POOLS,
    MAX_POOLS,
    NORMS,
    POOLS,
    WINDOWED,
    Split,
    positions,
    window_layer,
)
from hpcbench.parallel.spatial_limits import split_of
from hpcbench.parallel.traffic import Traffic, merged

_TABLE_BYTES = 4
"""Tables hold fp32."""
_INDEX_BYTES = 8
"""A max pool keeps where each of its outputs came from."""
_COPIES = {"sgd": 1, "adam": 2, "adamw": 2}
"""Of the parameters, in the optimizer's state."""


class Spatial:
    """One replica's ranks share every sample; with replicas ParaDL's data+spatial."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Halos of this rank, by neighbour; collectives are the same on all ranks."""
        if spec.sp_degree == 1:
            return merged(_gradients(spec, table, None))
        split = split_of(spec, table)
        place = Mesh.of(spec).coordinates(rank).sp
        calls = [*_halos(spec, split, place), *_statistics(spec, split), *_switch(spec, split)]
        parts = [
            Traffic(
                operation=one.operation,
                group_size=one.group_size,
                payload_bytes=one.payload_bytes,
                count=one.count * spec.micro_batches,
            )
            for one in calls
        ]
        return merged([*parts, *_gradients(spec, table, split)])

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """All weights, and a part of what the cut layers keep. Without half precision and recomputation."""
        size = _stored_bytes(spec)
        parameters = sum(_tensor_bytes(tensor, size) for tensor in table.parameter_tensors)
        split = split_of(spec, table) if spec.sp_degree > 1 else None
        activations, beside = kept_bytes(spec, table, split, Mesh.of(spec).coordinates(rank).sp)
        reduced = sum(call.payload_bytes * call.count for call in _gradients(spec, table, split))
        state = _COPIES[spec.optimizer] if spec.optimizer != "sgd" or spec.momentum else 0
        return Memory(
            parameters_bytes=parameters,
            gradients_bytes=parameters,
            optimizer_bytes=state * parameters,
            activations_bytes=activations,
            buffers_bytes=sum(_buffer_bytes(tensor, size) for tensor in table.buffers),
            communication_bytes=beside + reduced,
        )


def kept_bytes(spec: RunSpec, table: LayerTable, split: Split | None, place: int) -> tuple[int, int]:
    """What the rank at ``place`` keeps for the backward pass of one micro-batch: activations, and what it received.

    A layer keeps its share of what the table says; a convolution also its halo, a max pool its indices and no input.
    """
    samples, size = _samples(spec), _stored_bytes(spec)
    activations = received = 0
    for number, row in enumerate(table.layers):
        whole = samples * row.activation_bytes + row.activation_fixed_bytes
        if split is None or number > split.end:
            activations += whole
        elif number < split.end:
            activations += _cut_bytes(row, split, place, samples)
            received += _received_bytes(row, split, place) * samples * size
        elif not (_is_reduced(spec, split) and row.kind in GLOBAL_POOLS):
            gathered = samples * prod(row.input_shape) * _TABLE_BYTES
            activations += max(whole - gathered, 0)
            received += gathered * size // _TABLE_BYTES
    return activations * size // _TABLE_BYTES, received


def _cut_bytes(row: Layer, split: Split, place: int, samples: int) -> int:
    """In the table's type."""
    shape = row.output_shape if row.kind not in CONVOLUTIONS | NORMS else row.input_shape
    own = volume(own_box(positions(shape), split.grid, place))
    if row.kind in POOLS:
        return samples * shape[0] * own * _INDEX_BYTES if row.kind in MAX_POOLS else 0
    return samples * row.activation_bytes * own // prod(positions(shape)) + row.activation_fixed_bytes


def _received_bytes(row: Layer, split: Split, place: int) -> int:
    """Numbers of a convolution's halo, per sample."""
    if row.kind not in CONVOLUTIONS:
        return 0
    received = halo(window_layer(row), split.grid, place).receives
    return row.input_shape[0] * sum(volume(message.box) for message in received)


def _halos(spec: RunSpec, split: Split, place: int) -> Iterator[Traffic]:
    """Forward what others need; backward the gradients of what was received, where the input has one."""
    size = _samples(spec) * _sent_bytes(spec)
    for number, row in enumerate(split.rows[: split.end]):
        if row.kind not in WINDOWED:
            continue
        needs = halo(window_layer(row), split.grid, place)
        for message in needs.sends:
            yield _call("send", 2, size * row.input_shape[0] * volume(message.box), _passes(spec, split, number))
        if _has_input_gradient(split, number):
            for message in needs.receives:
                yield _call("send", 2, size * row.input_shape[0] * volume(message.box))


def _statistics(spec: RunSpec, split: Split) -> Iterator[Traffic]:
    """Mean and variance per channel forward; two sums per channel backward."""
    if _option(spec, "batch_norm") == "local":
        return
    for number, row in enumerate(split.rows[: split.end]):
        if row.kind in NORMS:
            payload = 2 * row.input_shape[0] * _stored_bytes(spec)
            yield _call("all_gather", spec.sp_degree, payload, _passes(spec, split, number))
            if _has_input_gradient(split, number):
                yield _call("all_reduce", spec.sp_degree, payload)


def _switch(spec: RunSpec, split: Split) -> Iterator[Traffic]:
    """One sum per channel, or the largest part of what arrives."""
    channels = split.rows[split.end - 1].output_shape[0]
    if _is_reduced(spec, split):
        payload = _samples(spec) * channels * _stored_bytes(spec)
        yield _call("all_reduce", spec.sp_degree, payload, _passes(spec, split, split.end, keeps=False))
        return
    widest = volume(own_box(split.extents, split.grid, 0))
    payload = _samples(spec) * channels * widest * _sent_bytes(spec)
    yield _call("all_gather", spec.sp_degree, payload, _passes(spec, split, split.end))


def _gradients(spec: RunSpec, table: LayerTable, split: Split | None) -> list[Traffic]:
    """Cut layers over all ranks that share them, whole ones across replicas, in buckets."""
    size, cap = _stored_bytes(spec), max(int(float(_option(spec, "bucket_cap_mb")) * MIB), 1)
    cut = [one for one in table.parameter_tensors if split is not None and split.is_cut(one.name)]
    whole = [one for one in table.parameter_tensors if split is None or not split.is_cut(one.name)]
    calls = []
    for tensors, ranks in ((cut, spec.sp_degree * spec.dp_degree), (whole, spec.dp_degree)):
        if ranks > 1:
            sizes = bucket_bytes([_tensor_bytes(one, size) for one in tensors], cap)
            calls += [_call("all_reduce", ranks, payload) for payload in sizes]
    return calls


def _passes(spec: RunSpec, split: Split, number: int, keeps: bool = True) -> int:
    """Forward passes of a layer: two where its block is computed again, which it is as far as anything is kept."""
    if not spec.activation_checkpointing:
        return 1
    later = [row for row in split.rows[number + (not keeps) :] if row.block == split.rows[number].block]
    kinds = POOLS | GLOBAL_POOLS
    return 2 if any(row.activation_bytes or row.parameters or row.kind in kinds for row in later) else 1


def _has_input_gradient(split: Split, number: int) -> bool:
    """Not where the samples themselves go in."""
    row = split.rows[number]
    if row.kind in CONVOLUTIONS:
        return row.backward_flops > row.forward_flops
    return any(before.parameters for before in split.rows[:number])


def _is_reduced(spec: RunSpec, split: Split) -> bool:
    return split.by_mean and _option(spec, "global_pool") == "reduce"


def _option(spec: RunSpec, name: str) -> Any:
    return spec.options.get(name, strategy("spatial").options[name].default)


def _call(operation: str, ranks: int, payload_bytes: int, count: int = 1) -> Traffic:
    return Traffic(operation=operation, group_size=ranks, payload_bytes=payload_bytes, count=count)


def _samples(spec: RunSpec) -> int:
    return spec.batch_size // spec.micro_batches


def _stored_bytes(spec: RunSpec) -> int:
    """Of a parameter, and of a sum."""
    return 8 if spec.precision == "fp64" else _TABLE_BYTES


def _sent_bytes(spec: RunSpec) -> int:
    """Of a number in a feature map."""
    return 2 if spec.precision in ("bf16", "fp16") else _stored_bytes(spec)


def _tensor_bytes(tensor: TensorShape, size: int) -> int:
    return prod(tensor.shape) * tensor.bytes_per_element * size // _TABLE_BYTES


def _buffer_bytes(tensor: TensorShape, size: int) -> int:
    """Counters stay what they are."""
    return _tensor_bytes(tensor, size if tensor.bytes_per_element == _TABLE_BYTES else _TABLE_BYTES)
