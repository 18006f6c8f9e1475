"""What ``filter`` and ``channel`` do to the tensors around every layer, and what of it is passed to others."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.moves import NOTHING, Around, Move
from hpcbench.parallel.channel_limits import scheme_of
from hpcbench.parallel.channel_table import Row, rows
from hpcbench.parallel.channels import extents
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.traffic import Traffic

_SENT_BYTES = {"fp64": 8, "bf16": 2, "fp16": 2}
_KEEPING_NOTHING = ("Flatten", "Identity")


def around_rows(spec: RunSpec, table: LayerTable) -> list[Around]:
    """Of every row of ``table`` on each of several ranks."""
    found: list[Around] = []
    block, keeps = -1, False
    for one in reversed(rows(table)):
        if one.row.block != block:
            block, keeps = one.row.block, False
        found.append(_around(spec, one, keeps))
        keeps = keeps or one.row.kind not in _KEEPING_NOTHING
    return found[::-1]


class _Side(NamedTuple):
    """A layer's input or output: ``unit`` entries a channel and sample."""

    channels: int
    unit: int


def _around(spec: RunSpec, one: Row, keeps: bool) -> Around:
    split = one.split(scheme_of(spec), spec.tp_degree)
    if one.layer is None or split is None:
        return NOTHING
    into = _Side(one.layer.in_channels, one.layer.features * prod(one.row.input_shape[1:]))
    out = _Side(one.layer.out_channels, prod(one.row.output_shape[1:]))
    # The sample has no gradient.
    of_input = [] if one.layer.is_first else _moves(spec, split.enter.backward, into)
    return Around(
        enter=_moves(spec, split.enter.forward, into),
        leave=_moves(spec, split.leave.forward, out),
        leave_backward=_moves(spec, split.leave.backward, out),
        enter_backward=of_input,
        is_left_again=keeps,
    )


def _moves(spec: RunSpec, operation: str, side: _Side) -> list[Move]:
    if not operation:
        return []
    degree, samples = spec.tp_degree, spec.batch_size // spec.micro_batches
    one_channel = samples * side.unit * _SENT_BYTES.get(spec.precision, 4)
    part, whole = max(extents(side.channels, degree)) * one_channel, side.channels * one_channel
    payload = {"all_gather": part, "reduce_scatter": degree * part, "all_reduce": whole}.get(operation)
    if payload is None:
        return [Move(operation, part, None)]
    return [Move(operation, whole, Traffic(operation=operation, group_size=degree, payload_bytes=payload))]
