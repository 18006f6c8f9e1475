"""Costs of ``filter``, ``channel`` and their hybrids: the rows, parameters and buffers of one rank.

``docs/formulas.md`` derives the formulas; ``tests/distributed/test_traffic.py`` compares them with real
ranks. A layer whose input and output channels are both whole, split by filters over two ranks::

    forward    x --------------> [W0 | W1] --> y0 | y1 --all_gather--> y
    backward   dx <--all_reduce-- [W0 | W1] <-- dy0 | dy1 <--narrow--- dy
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import FULL_SHARE, RowShare, row_kernels
from hpcbench.predict.model_parallel import ModelParallelCost, RankCost, plan_reductions
from hpcbench.predict.placement import place_group
from hpcbench.predict.row_cost import CollectiveOp, ComputeOp, RowCost, RowOp, copy_op
from hpcbench.predict.tensor_sizes import (
    FP32_BYTES,
    activation_number_bytes,
    buffer_bytes,
    input_bytes,
    parameter_number_bytes,
    weight_layout_copies,
)
from hpcbench.strategies.channel.channel_split import (
    ChannelLayerSplit,
    ChannelRow,
    channel_extents,
    channel_layer_rows,
    channel_scheme,
)
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.mesh import RankMesh

_KINDS_WITHOUT_ACTIVATIONS = ("Flatten", "Identity")


class ChannelRank:
    """The share of a rank in every row."""

    def __init__(self, spec: RunSpec, table: LayerTable, rank: int) -> None:
        self.spec, self.table, self.rows = spec, table, channel_layer_rows(table)
        self.degree, self.scheme = spec.tp_degree, channel_scheme(spec)
        self.index, self.group = RankMesh.of(spec).coordinates(rank).tp, place_group(spec, "tp")
        self.samples = spec.batch_size // spec.micro_batches
        self.is_sharded = self.degree > 1 and self.scheme.form == "sharded"

    def share(self, channels: int) -> float:
        """Return the rank's part of a tensor between layers; all of it where no channels are shared."""
        return self.part(channels) if channels and self.is_sharded else 1.0

    def part(self, channels: int) -> float:
        """Return the rank's part of ``channels`` that are split over the ranks."""
        return channel_extents(channels, self.degree)[self.index] / channels

    def split(self, row: ChannelRow) -> ChannelLayerSplit | None:
        """Return the split of the row's layer; ``None`` without a layer, or on one rank."""
        return row.split(self.scheme, self.degree) if self.degree > 1 else None

    def describe_rows(self) -> list[RowCost]:
        """Return every row of the table. ``channels`` are those of a row's input that ranks may share."""
        biased = {
            tensor.name.rpartition(".")[0] for tensor in self.table.parameter_tensors if tensor.name.endswith(".bias")
        }
        costs, channels = [], 0
        for row, keeps_later_rows in zip(self.rows, _keeps_later_rows(self.rows), strict=True):
            costs.append(self._with_memory(self._operations(row, channels, biased, keeps_later_rows), row, channels))
            channels = row.channels
        return costs

    def _operations(self, row: ChannelRow, channels: int, biased: set[str], keeps_later_rows: bool) -> RowCost:
        kernels = row_kernels(self.spec, row.row, self.samples, self._row_share(row, channels))
        forward, backward = (ComputeOp(kernel) for kernel in kernels)
        split = self.split(row)
        if row.layer is None or split is None:
            return RowCost([forward], [backward])
        # Channels, and numbers a channel and sample, of the layer's input and output.
        inside = row.layer.in_channels, row.layer.features * prod(row.row.input_shape[1:])
        outside = row.layer.out_channels, prod(row.row.output_shape[1:])
        enter, leave = self._side(split.enter.forward, *inside), self._side(split.leave.forward, *outside)
        if split.by == "channels" and row.row.name in biased:
            # Added to what has been summed over the ranks.
            leave.append(copy_op(self.spec, kernels.forward.output_bytes * self.share(row.channels)))
        return RowCost(
            forward=[*enter, forward, *leave],
            backward=[*self._side(split.leave.backward, *outside), backward],
            # The sample has no gradient.
            after_backward=[] if row.layer.is_first else self._side(split.enter.backward, *inside),
            recompute=[*enter, forward, *(leave if keeps_later_rows else ())],
        )

    def _side(self, operation: str, channels: int, unit: int) -> list[RowOp]:
        """Return the operation on a layer's input or output: a copy of the tensor, and the call."""
        if not operation:
            return []
        channel_bytes = self.samples * unit * activation_number_bytes(self.spec)
        part = max(channel_extents(channels, self.degree)) * channel_bytes
        whole = channels * channel_bytes
        payload = {"all_gather": part, "reduce_scatter": self.degree * part, "all_reduce": whole}.get(operation)
        if payload is None:
            return [copy_op(self.spec, part)]
        return [copy_op(self.spec, whole), CollectiveOp(operation, payload, self.group, "tp")]

    def _row_share(self, row: ChannelRow, channels: int) -> RowShare:
        split = self.split(row)
        if row.layer is None:
            share = self.share(row.channels)
            return RowShare(share, self.share(channels), share, share)
        if split is None or not split.by:
            return FULL_SHARE
        inputs, outputs = self.part(row.layer.in_channels), self.part(row.layer.out_channels)
        if split.by == "channels":
            return RowShare(inputs, inputs, 1.0, inputs)
        return RowShare(outputs, inputs if split.by == "groups" else 1.0, outputs, outputs)

    def _with_memory(self, cost: RowCost, row: ChannelRow, channels: int) -> RowCost:
        """Add the row's bytes. bf16 is counted as half of fp32, weights in any layout as fp32."""
        split, layer = self.split(row), row.layer
        scale = activation_number_bytes(self.spec) / FP32_BYTES
        whole_in, whole_out = self.samples * input_bytes(row.row), self.samples * row.row.output_bytes
        saved = float(self.samples * row.row.activation_bytes + row.row.activation_fixed_bytes)
        input_part, output_part = whole_in * self.share(channels), whole_out * self.share(row.channels)
        # While the gradients of output and input are there, while the former is assembled from the next layer's parts,
        # and while the latter is sent to the layer before: the row keeps nothing any more.
        gradients, before, after = input_part + output_part, 0.0, 0.0
        weight_share = self.share(row.channels) if layer is None else 1.0
        if layer is None or split is None:
            saved *= self.share(channels if layer is not None else row.channels)
        else:
            if split.weight_dim is not None:
                weight_share = self.part(layer.in_channels if split.weight_dim else layer.out_channels)
            if split.enter.forward == "all_gather":
                # A copy of its own, whoever keeps the parts.
                saved = float(whole_in)
            else:
                saved *= 1.0 if layer.is_first else self.share(layer.in_channels)
            inside_in = whole_in * (self.part(layer.in_channels) if split.by in ("channels", "groups") else 1.0)
            inside_out = whole_out * (self.part(layer.out_channels) if split.by in ("filters", "groups") else 1.0)
            # Parts one behind the other as they are received, and then side by side.
            before = {"all_gather": output_part + 2 * whole_out, "narrow": whole_out}.get(split.leave.backward, 0.0)
            if split.leave.backward == "narrow":
                inside_out = max(inside_out, whole_out)
            gradients = inside_out
            if not layer.is_first:
                gradients = inside_in + inside_out
                after = {
                    "all_gather": inside_in + 2 * whole_in,
                    "reduce_scatter": 2 * whole_in + input_part,
                    "all_reduce": 2 * whole_in,
                }.get(split.enter.backward, 0.0)
        weight_copies = weight_share * weight_layout_copies(self.spec, row.row)
        weights = weight_copies * row.row.parameters * parameter_number_bytes(self.spec)
        moved = max(before * scale, (after - saved) * scale)
        working = round(max(gradients * scale + weights, moved))
        return cost._replace(
            saved_bytes=round(saved * scale),
            working_bytes=working,
            library_bytes=working - round(max(gradients * scale, moved)),
            block_input_bytes=round(input_part * scale),
        )

    def parameter_bytes(self) -> list[int]:
        """Return the rank's part of every parameter, in the model's order."""
        vector_shares = self._vector_shares()
        layers = {row.row.name: row for row in self.rows if row.layer is not None}
        sizes = []
        for tensor in self.table.parameter_tensors:
            owner, _, name = tensor.name.rpartition(".")
            shape, row = list(tensor.shape), layers.get(owner)
            split = self.split(row) if row is not None else None
            if row is not None and row.layer is not None and split is not None:
                outputs = channel_extents(row.layer.out_channels, self.degree)[self.index]
                inputs = channel_extents(row.layer.in_channels, self.degree, row.layer.features)[self.index]
                if name == "weight" and split.weight_dim is not None:
                    shape[split.weight_dim] = inputs if split.weight_dim else outputs
                elif name == "bias" and split.is_bias_split:
                    shape[0] = outputs
            elif owner in vector_shares:
                shape[0] = round(shape[0] * vector_shares[owner])
            sizes.append(prod(shape) * parameter_number_bytes(self.spec))
        return sizes

    def buffer_bytes(self) -> int:
        """Return the bytes of the rank's buffers: parts of vectors over channels."""
        shares = self._vector_shares()
        return round(
            sum(
                size * (shares.get(tensor.name.rpartition(".")[0], 1.0) if tensor.shape else 1.0)
                for tensor, size in zip(self.table.buffers, buffer_bytes(self.spec, self.table), strict=True)
            )
        )

    def _vector_shares(self) -> dict[str, float]:
        """Return by module the rank's part of vectors over channels between split layers."""
        return {row.row.name: self.share(row.channels) for row in self.rows if row.channels and row.layer is None}


def _keeps_later_rows(rows: Sequence[ChannelRow]) -> list[bool]:
    """Return for each row whether a later one of its block keeps activations: recomputation goes beyond the row."""
    flags: list[bool] = []
    block, keeps = -1, False
    for row in reversed(rows):
        if row.row.block != block:
            block, keeps = row.row.block, False
        flags.append(keeps)
        keeps = keeps or row.row.kind not in _KINDS_WITHOUT_ACTIVATIONS
    return flags[::-1]


class ChannelSplitCost(ModelParallelCost):
    """The cost of ``filter`` and ``channel``; ``channel_split`` has their differences."""

    def describe(self, spec: RunSpec, table: LayerTable, rank: int) -> RankCost:
        view = ChannelRank(spec, table, rank)
        sizes = view.parameter_bytes()
        return RankCost(
            view.describe_rows(),
            sizes,
            plan_reductions(spec, sizes, [([True] * len(sizes), ("dp",))]),
            view.buffer_bytes(),
        )


class FilterCost(ChannelSplitCost):
    """Output channels shared by the ranks along ``tp``."""


class ChannelCost(ChannelSplitCost):
    """Input channels shared by the ranks along ``tp``."""


COSTS = {
    "filter": FilterCost,
    "channel": ChannelCost,
}
"""The cost of each strategy."""
