"""What a rank of ``spatial`` holds: its parts of the cut layers, halos, and what a backward pass works with."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.live import Kept, Row, held_at_peak, in_turn, saved_bytes
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.tensors import FP32_BYTES, FP64_BYTES, parameter_bytes
from hpcbench.parallel.catalog import chosen_options
from hpcbench.parallel.gradients import first_rows
from hpcbench.parallel.halo import Message, halo, own_box, volume
from hpcbench.parallel.layers import Layer, LayerTable
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

_INDEX_BYTES = 8
"""A max pool keeps where each of its outputs came from."""


class Held(NamedTuple):
    """One row of the table on one rank, in bytes of one micro-batch."""

    activations: int
    """Kept for the backward pass."""
    received: int
    """Kept, too: a convolution's halo, what the switch gathered."""
    working: int
    """Beside both while the row runs backwards: gradients of output and input, halos put together and on their way,
    a convolution's weight in the library's own layout."""


def peak(spec: RunSpec, table: LayerTable, split: Split | None, place: int, reduced: list[list[int]]) -> Memory:
    """The moment at which the rank at ``place`` holds most. ``reduced`` are the buckets, as places of tensors."""
    sizes, rows = parameter_bytes(spec, table), first_rows(table)
    held = held_rows(spec, table, split, place)
    sent = [0] * len(table.layers)
    for bucket in reduced:
        sent[min(rows[one] for one in bucket)] += sum(sizes[one] for one in bucket)
    buckets = list(accumulate(reversed(sent)))[::-1]
    received = saved_bytes(spec, table, [Row(one.received, 0, 0) for one in held])
    inputs = _block_inputs(spec, table, split, place)
    own = [Row(one.activations, one.working, arriving) for one, arriving in zip(held, inputs, strict=True)]
    kept = Kept(sum(sizes), sizes, in_turn(spec, table), sizes)
    underway = [one + other for one, other in zip(received, buckets, strict=True)]
    return held_at_peak(spec, table, kept, underway, own)


def _block_inputs(spec: RunSpec, table: LayerTable, split: Split | None, place: int) -> list[int]:
    """Of every row: the part of its input that arrives at it."""
    unit = _samples(spec) * _wide(spec)
    return [
        unit * (prod(row.input_shape) if split is None or number > split.end else _own_input(row, split, place))
        for number, row in enumerate(table.layers)
    ]


def held_rows(spec: RunSpec, table: LayerTable, split: Split | None, place: int) -> list[Held]:
    """Every row of the table on the rank at ``place``.

    A layer keeps its share of what the table says; a convolution also its halo, a max pool its indices and no input.
    """
    samples, unit = _samples(spec), _samples(spec) * _wide(spec)
    by_sums = chosen_options(spec)["global_pool"] == "reduce"
    found = []
    for number, row in enumerate(table.layers):
        whole = (samples * row.activation_bytes + row.activation_fixed_bytes) * _wide(spec) // FP32_BYTES
        laid_out = row.parameters * _wide(spec) if row.kind in CONVOLUTIONS else 0
        if split is None or number > split.end:
            flows = unit * (row.output_bytes // FP32_BYTES + prod(row.input_shape))
            found.append(Held(whole, 0, flows + laid_out))
        elif number < split.end:
            working = unit * _working_numbers(row, split, place) + laid_out
            found.append(Held(_cut_bytes(spec, row, split, place), unit * _halo_numbers(row, split, place), working))
        else:
            gathered = 0 if by_sums and split.by_mean and row.kind in GLOBAL_POOLS else unit * prod(row.input_shape)
            flows = gathered + unit * (row.output_bytes // FP32_BYTES + _own_input(row, split, place))
            found.append(Held(max(whole - gathered, 0) if gathered else 0, gathered, flows + laid_out))
    return found


def _cut_bytes(spec: RunSpec, row: Layer, split: Split, place: int) -> int:
    shape = row.output_shape if row.kind not in CONVOLUTIONS | NORMS else row.input_shape
    own = volume(own_box(positions(shape), split.grid, place))
    if row.kind in POOLS:
        return _samples(spec) * shape[0] * own * _INDEX_BYTES if row.kind in MAX_POOLS else 0
    kept = _samples(spec) * row.activation_bytes * own // prod(positions(shape)) + row.activation_fixed_bytes
    return kept * _wide(spec) // FP32_BYTES


def _halo_numbers(row: Layer, split: Split, place: int) -> int:
    """Of a convolution's halo, per sample."""
    if row.kind not in CONVOLUTIONS:
        return 0
    return _numbers(row, halo(window_layer(row), split.grid, place).receives)


def _working_numbers(row: Layer, split: Split, place: int) -> int:
    """Per sample, while a cut layer runs backwards."""
    own = _own_input(row, split, place)
    gradient = row.output_shape[0] * volume(own_box(positions(row.output_shape), split.grid, place))
    if row.kind not in WINDOWED:
        return gradient + own
    needs = halo(window_layer(row), split.grid, place)
    needed = row.input_shape[0] * volume(needs.needed)
    under_way = _numbers(row, needs.receives) + _numbers(row, needs.sends)
    is_copied = needs.own != needs.needed
    if row.kind in POOLS:
        return gradient + needed + (own if is_copied or needs.sends else 0) + under_way
    if row.backward_flops <= row.forward_flops:
        # The samples themselves have no gradient.
        return gradient + (needed if is_copied else 0)
    return gradient + needed * (1 + is_copied) + under_way


def _own_input(row: Layer, split: Split, place: int) -> int:
    extents = positions(row.input_shape)
    return row.input_shape[0] * volume(own_box(extents, split.grid, place))


def _numbers(row: Layer, messages: tuple[Message, ...]) -> int:
    return row.input_shape[0] * sum(volume(message.box) for message in messages)


def _samples(spec: RunSpec) -> int:
    return spec.batch_size // spec.micro_batches


def _wide(spec: RunSpec) -> int:
    """Bytes of a number; half precision is counted as fp32."""
    return FP64_BYTES if spec.precision == "fp64" else FP32_BYTES
