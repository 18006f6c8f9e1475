"""Communication and memory of a spatial-parallel rank, row by row: halos, statistics, the gather point."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import prod
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.model_parallel import NO_COMM, CommOp, LayerComm
from hpcbench.oracle.peak_memory import (
    FP32_BYTES,
    FP64_BYTES,
    HALF_BYTES,
    MemoryBreakdown,
    PersistentMemory,
    RowMemory,
    gradient_rows,
    parameter_bytes,
    peak_memory,
    saved_activation_bytes,
)
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.gradient_buckets import MIB, fill_buckets, first_use_rows
from hpcbench.parallel.layer_table import LayerRow, LayerTable
from hpcbench.parallel.strategies.halo import HaloMessage, box_volume, compute_halo, owned_box
from hpcbench.parallel.strategies.spatial import (
    CONVOLUTION_KINDS,
    GLOBAL_POOL_KINDS,
    MAX_POOL_KINDS,
    NORM_KINDS,
    POOL_KINDS,
    WINDOWED_KINDS,
    SpatialSplit,
    halo_layer,
    spatial_extents,
)
from hpcbench.parallel.traffic import Traffic


def spatial_row_comm(spec: RunSpec, split: SpatialSplit, number: int, place: int) -> LayerComm:
    """What the rank at ``place`` does before and after the row of that number. Halos come in the order of messages."""
    row = split.rows[number]
    if number == split.end:
        return _gather_comm(spec, split)
    if number > split.end:
        return NO_COMM
    if row.kind in WINDOWED_KINDS:
        needs = compute_halo(halo_layer(row), split.grid, place)
        back = needs.receives if has_input_gradient(split, number) else ()
        unit = micro_batch_samples(spec) * feature_map_element_bytes(spec) * row.input_shape[0]
        return NO_COMM._replace(enter=_halo_sends(needs.sends, unit), enter_backward=_halo_sends(back, unit))
    if row.kind in NORM_KINDS and options_with_defaults(spec)["batch_norm"] != "local":
        payload = 2 * row.input_shape[0] * parameter_element_bytes(spec)
        gathered = _one_call("all_gather", spec.sp_degree, payload)
        summed = _one_call("all_reduce", spec.sp_degree, payload)
        has_gradient = has_input_gradient(split, number)
        return NO_COMM._replace(
            enter=[_in_place_op(gathered)], enter_backward=[_in_place_op(summed)] if has_gradient else []
        )
    return NO_COMM


def _gather_comm(spec: RunSpec, split: SpatialSplit) -> LayerComm:
    """One sum per channel, or the largest part of what arrives."""
    channels = split.rows[split.end - 1].output_shape[0]
    if pools_by_all_reduce(spec, split):
        total = _in_place_op(
            _one_call(
                "all_reduce", spec.sp_degree, micro_batch_samples(spec) * channels * parameter_element_bytes(spec)
            )
        )
        return NO_COMM._replace(leave=[total], is_left_again=_keeps_activations_from(split, split.end + 1))
    widest = box_volume(owned_box(split.extents, split.grid, 0))
    payload = micro_batch_samples(spec) * channels * widest * feature_map_element_bytes(spec)
    gathered = CommOp("all_gather", payload * spec.sp_degree, _one_call("all_gather", spec.sp_degree, payload))
    narrowed = CommOp("narrow", payload, None)
    return LayerComm([], [gathered], [narrowed], [], is_left_again=_keeps_activations_from(split, split.end))


def _keeps_activations_from(split: SpatialSplit, number: int) -> bool:
    """Whether a block that is computed again comes as far as row ``number``: it ends with what is kept last."""
    block, kinds = split.rows[split.end].block, POOL_KINDS | GLOBAL_POOL_KINDS
    later = [row for row in split.rows[number:] if row.block == block]
    return any(row.activation_bytes or row.parameters or row.kind in kinds for row in later)


def spatial_gradient_buckets(
    spec: RunSpec, table: LayerTable, split: SpatialSplit | None
) -> Iterator[tuple[list[int], int]]:
    """Places of the tensors in each, and among how many ranks: cut layers' all that share them, others' replicas."""
    sizes, cap = parameter_bytes(spec, table), max(int(float(options_with_defaults(spec)["bucket_cap_mb"]) * MIB), 1)
    names = [one.name for one in table.parameter_tensors]
    cut = [False] * len(names) if split is None else split.are_cut(names)
    for is_cut, ranks in ((True, spec.sp_degree * spec.dp_degree), (False, spec.dp_degree)):
        places = [place for place, one in enumerate(cut) if one == is_cut]
        if ranks > 1:
            for bucket in fill_buckets([sizes[place] for place in places], cap):
                yield [places[one] for one in bucket], ranks


def has_input_gradient(split: SpatialSplit, number: int) -> bool:
    """Not where the samples themselves go in."""
    row = split.rows[number]
    if row.kind in CONVOLUTION_KINDS:
        return row.backward_flops > row.forward_flops
    return any(before.parameters for before in split.rows[:number])


def pools_by_all_reduce(spec: RunSpec, split: SpatialSplit) -> bool:
    """Whether the switch is a mean of which every rank has a part."""
    return split.by_mean and options_with_defaults(spec)["global_pool"] == "reduce"


def micro_batch_samples(spec: RunSpec) -> int:
    """Of a micro-batch."""
    return spec.batch_size // spec.micro_batches


def parameter_element_bytes(spec: RunSpec) -> int:
    """Of a parameter, and of a sum."""
    return FP64_BYTES if spec.precision == "fp64" else FP32_BYTES


def feature_map_element_bytes(spec: RunSpec) -> int:
    """Of a number in a feature map."""
    return HALF_BYTES if spec.precision in ("bf16", "fp16") else parameter_element_bytes(spec)


def _halo_sends(messages: tuple[HaloMessage, ...], unit: int) -> list[CommOp]:
    sizes = [unit * box_volume(message.box) for message in messages]
    return [CommOp("send", size, _one_call("send", 2, size)) for size in sizes]


def _in_place_op(call: Traffic) -> CommOp:
    return CommOp(call.operation, 0, call)


def _one_call(operation: str, ranks: int, payload_bytes: int) -> Traffic:
    return Traffic(operation=operation, group_size=ranks, payload_bytes=payload_bytes)


_INDEX_BYTES = 8
"""A max pool keeps where each of its outputs came from."""


class SpatialRowMemory(NamedTuple):
    """One row of the table on one rank, in bytes of one micro-batch."""

    activations: int
    """Kept for the backward pass."""
    received: int
    """Kept, too: a convolution's halo, what the switch gathered."""
    working: int
    """Beside both while the row runs backwards: gradients of output and input, halos put together and on their way,
    a convolution's weight in the library's own layout."""


def spatial_peak_memory(
    spec: RunSpec, table: LayerTable, split: SpatialSplit | None, place: int, reduced: list[list[int]]
) -> MemoryBreakdown:
    """The moment at which the rank at ``place`` holds most. ``reduced`` are the buckets, as places of tensors."""
    sizes, rows = parameter_bytes(spec, table), first_use_rows(table)
    held = spatial_row_memory(spec, table, split, place)
    sent = [0] * len(table.layers)
    for bucket in reduced:
        sent[min(rows[one] for one in bucket)] += sum(sizes[one] for one in bucket)
    buckets = list(accumulate(reversed(sent)))[::-1]
    received = saved_activation_bytes(spec, table, [RowMemory(one.received, 0, 0) for one in held])
    inputs = _block_input_bytes(spec, table, split, place)
    own = [RowMemory(one.activations, one.working, arriving) for one, arriving in zip(held, inputs, strict=True)]
    kept = PersistentMemory(sum(sizes), sizes, gradient_rows(spec, table), sizes)
    underway = [one + other for one, other in zip(received, buckets, strict=True)]
    return peak_memory(spec, table, kept, underway, own)


def _block_input_bytes(spec: RunSpec, table: LayerTable, split: SpatialSplit | None, place: int) -> list[int]:
    """Of every row: the part of its input that arrives at it."""
    unit = _samples_per_micro_batch(spec) * _number_bytes(spec)
    return [
        unit * (prod(row.input_shape) if split is None or number > split.end else _own_input_numbers(row, split, place))
        for number, row in enumerate(table.layers)
    ]


def spatial_row_memory(
    spec: RunSpec, table: LayerTable, split: SpatialSplit | None, place: int
) -> list[SpatialRowMemory]:
    """Every row of the table on the rank at ``place``.

    A layer keeps its share of what the table says; a convolution also its halo, a max pool its indices and no input.
    """
    samples, unit = _samples_per_micro_batch(spec), _samples_per_micro_batch(spec) * _number_bytes(spec)
    by_sums = options_with_defaults(spec)["global_pool"] == "reduce"
    found = []
    for number, row in enumerate(table.layers):
        whole = (samples * row.activation_bytes + row.activation_fixed_bytes) * _number_bytes(spec) // FP32_BYTES
        laid_out = row.parameters * _number_bytes(spec) if row.kind in CONVOLUTION_KINDS else 0
        if split is None or number > split.end:
            flows = unit * (row.output_bytes // FP32_BYTES + prod(row.input_shape))
            found.append(SpatialRowMemory(whole, 0, flows + laid_out))
        elif number < split.end:
            working = unit * _working_numbers(row, split, place) + laid_out
            found.append(
                SpatialRowMemory(
                    _split_layer_bytes(spec, row, split, place), unit * _halo_numbers(row, split, place), working
                )
            )
        else:
            gathered = (
                0 if by_sums and split.by_mean and row.kind in GLOBAL_POOL_KINDS else unit * prod(row.input_shape)
            )
            flows = gathered + unit * (row.output_bytes // FP32_BYTES + _own_input_numbers(row, split, place))
            found.append(SpatialRowMemory(max(whole - gathered, 0) if gathered else 0, gathered, flows + laid_out))
    return found


def _split_layer_bytes(spec: RunSpec, row: LayerRow, split: SpatialSplit, place: int) -> int:
    shape = row.output_shape if row.kind not in CONVOLUTION_KINDS | NORM_KINDS else row.input_shape
    own = box_volume(owned_box(spatial_extents(shape), split.grid, place))
    if row.kind in POOL_KINDS:
        return _samples_per_micro_batch(spec) * shape[0] * own * _INDEX_BYTES if row.kind in MAX_POOL_KINDS else 0
    kept = (
        _samples_per_micro_batch(spec) * row.activation_bytes * own // prod(spatial_extents(shape))
        + row.activation_fixed_bytes
    )
    return kept * _number_bytes(spec) // FP32_BYTES


def _halo_numbers(row: LayerRow, split: SpatialSplit, place: int) -> int:
    """Of a convolution's halo, per sample."""
    if row.kind not in CONVOLUTION_KINDS:
        return 0
    return _message_numbers(row, compute_halo(halo_layer(row), split.grid, place).receives)


def _working_numbers(row: LayerRow, split: SpatialSplit, place: int) -> int:
    """Per sample, while a cut layer runs backwards."""
    own = _own_input_numbers(row, split, place)
    gradient = row.output_shape[0] * box_volume(owned_box(spatial_extents(row.output_shape), split.grid, place))
    if row.kind not in WINDOWED_KINDS:
        return gradient + own
    needs = compute_halo(halo_layer(row), split.grid, place)
    needed = row.input_shape[0] * box_volume(needs.needed)
    under_way = _message_numbers(row, needs.receives) + _message_numbers(row, needs.sends)
    is_copied = needs.own != needs.needed
    if row.kind in POOL_KINDS:
        return gradient + needed + (own if is_copied or needs.sends else 0) + under_way
    if row.backward_flops <= row.forward_flops:
        # The samples themselves have no gradient.
        return gradient + (needed if is_copied else 0)
    return gradient + needed * (1 + is_copied) + under_way


def _own_input_numbers(row: LayerRow, split: SpatialSplit, place: int) -> int:
    extents = spatial_extents(row.input_shape)
    return row.input_shape[0] * box_volume(owned_box(extents, split.grid, place))


def _message_numbers(row: LayerRow, messages: tuple[HaloMessage, ...]) -> int:
    return row.input_shape[0] * sum(box_volume(message.box) for message in messages)


def _samples_per_micro_batch(spec: RunSpec) -> int:
    return spec.batch_size // spec.micro_batches


def _number_bytes(spec: RunSpec) -> int:
    """Bytes of a number; half precision is counted as fp32."""
    return FP64_BYTES if spec.precision == "fp64" else FP32_BYTES
