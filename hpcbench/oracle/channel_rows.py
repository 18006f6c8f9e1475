"""What each row of the table costs a rank of ``filter`` or ``channel`` in the backward pass; see ``oracle.live``."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.live import Row, input_bytes, layouts
from hpcbench.oracle.tensors import FP32_BYTES, FP64_BYTES, HALF_BYTES
from hpcbench.parallel import channel_table, layers
from hpcbench.parallel.channel_limits import scheme_of
from hpcbench.parallel.channels import Split
from hpcbench.parallel.mesh import Mesh

_SCALE = {"fp64": FP64_BYTES / FP32_BYTES, "bf16": HALF_BYTES / FP32_BYTES}


def channel_rows(spec: RunSpec, table: layers.LayerTable, rank: int) -> list[Row]:
    """Of every row of ``table``, on ``rank``. bf16 is counted as half of fp32, weights in any layout as fp32."""
    own, scale = RankParts(spec, rank), _SCALE.get(spec.precision, 1.0)
    wide = max(scale, 1.0)
    found, channels = [], 0
    for one in channel_table.rows(table):
        kept, moments = own.costs(one, channels)
        laid_out = own.weight_share(one) * one.row.parameters * FP32_BYTES * layouts(one.row) * wide
        during = max(moments.backward * scale + laid_out, moments.before * scale, (moments.after - kept) * scale)
        block_input = own.samples * input_bytes(one.row) * own.share(channels)
        found.append(Row(round(kept * scale), round(during), round(block_input * scale)))
        channels = one.channels
    return found


class Moments(NamedTuple):
    """Bytes in fp32 that come and go with a row."""

    backward: float
    """Gradients of output and input."""
    before: float
    """While the gradient of the output is made of what comes from the next layer."""
    after: float
    """While that of the input is made into what goes to the layer before; the row keeps nothing any more."""


class RankParts:
    """The shares of one rank."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self.spec, self.degree = spec, spec.tp_degree
        self.place = Mesh.of(spec).coordinates(rank).tp
        self.samples = spec.batch_size // spec.micro_batches
        self.is_sharded = self.degree > 1 and scheme_of(spec).form == "sharded"

    def share(self, channels: int) -> float:
        """Of a tensor of so many channels between layers; all of it where there is none to share."""
        return self.of(channels) if channels and self.is_sharded else 1.0

    def of(self, channels: int) -> float:
        """The rank's part of what is split into shares of ``channels``."""
        small, larger = divmod(channels, self.degree)
        return (small + (self.place < larger)) / channels

    def split(self, one: channel_table.Row) -> Split | None:
        """How the row's layer is split, if it is one and there is somebody to share it with."""
        return one.split(scheme_of(self.spec), self.degree) if self.degree > 1 else None

    def weight_share(self, one: channel_table.Row) -> float:
        """Of the row's parameters."""
        split = self.split(one)
        if one.layer is None or split is None or split.weight_dim is None:
            return self.share(one.channels) if one.layer is None else 1.0
        return self.of(one.layer.in_channels if split.weight_dim else one.layer.out_channels)

    def costs(self, one: channel_table.Row, channels: int) -> tuple[float, Moments]:
        """What is kept for the row, and what comes and goes; ``channels`` are those of what is given to it."""
        whole_in, whole_out = self.samples * input_bytes(one.row), self.samples * one.row.output_bytes
        table_bytes = self.samples * one.row.activation_bytes + one.row.activation_fixed_bytes
        given, made = whole_in * self.share(channels), whole_out * self.share(one.channels)
        split = self.split(one)
        if one.layer is None or split is None:
            kept_share = self.share(channels if one.layer is not None else one.channels)
            return table_bytes * kept_share, Moments(given + made, 0.0, 0.0)
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
        return kept, Moments(inside_in + inside_out, before, 0.0 if one.layer.is_first else after)
