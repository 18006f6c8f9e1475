"""Spatial parallelism: halos, statistics, the switch and gradients, for one rank. ``docs/formulas.md`` derives them."""

from __future__ import annotations

from collections.abc import Iterator

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.spatial_live import peak
from hpcbench.oracle.tensors import FP32_BYTES, FP64_BYTES, HALF_BYTES, parameter_bytes
from hpcbench.parallel.buckets import MIB, buckets
from hpcbench.parallel.catalog import chosen_options
from hpcbench.parallel.halo import halo, own_box, volume
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.spatial import CONVOLUTIONS, GLOBAL_POOLS, NORMS, POOLS, WINDOWED, Split, window_layer
from hpcbench.parallel.spatial_limits import split_of
from hpcbench.parallel.traffic import Traffic, merged


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
        """All weights, and a part of what the cut layers keep. Half precision is counted as fp32."""
        split = split_of(spec, table) if spec.sp_degree > 1 else None
        reduced = [places for places, _ in _buckets(spec, table, split)]
        return peak(spec, table, split, Mesh.of(spec).coordinates(rank).sp, reduced)


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
    if chosen_options(spec)["batch_norm"] == "local":
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


def _gradients(spec: RunSpec, table: LayerTable, split: Split | None) -> Iterator[Traffic]:
    """Bucket by bucket."""
    sizes = parameter_bytes(spec, table)
    for places, ranks in _buckets(spec, table, split):
        yield _call("all_reduce", ranks, sum(sizes[place] for place in places))


def _buckets(spec: RunSpec, table: LayerTable, split: Split | None) -> Iterator[tuple[list[int], int]]:
    """Places of the tensors in each, and among how many ranks: cut layers' all that share them, others' replicas."""
    sizes, cap = parameter_bytes(spec, table), max(int(float(chosen_options(spec)["bucket_cap_mb"]) * MIB), 1)
    cut = [split is not None and split.is_cut(one.name) for one in table.parameter_tensors]
    for is_cut, ranks in ((True, spec.sp_degree * spec.dp_degree), (False, spec.dp_degree)):
        places = [place for place, one in enumerate(cut) if one == is_cut]
        if ranks > 1:
            for bucket in buckets([sizes[place] for place in places], cap):
                yield [places[one] for one in bucket], ranks


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
    return split.by_mean and chosen_options(spec)["global_pool"] == "reduce"


def _call(operation: str, ranks: int, payload_bytes: int, count: int = 1) -> Traffic:
    return Traffic(operation=operation, group_size=ranks, payload_bytes=payload_bytes, count=count)


def _samples(spec: RunSpec) -> int:
    return spec.batch_size // spec.micro_batches


def _stored_bytes(spec: RunSpec) -> int:
    """Of a parameter, and of a sum."""
    return FP64_BYTES if spec.precision == "fp64" else FP32_BYTES


def _sent_bytes(spec: RunSpec) -> int:
    """Of a number in a feature map."""
    return HALF_BYTES if spec.precision in ("bf16", "fp16") else _stored_bytes(spec)
