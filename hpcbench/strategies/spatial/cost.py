"""Costs of spatial parallelism and its hybrid with replicas. ``docs/formulas.md`` derives the formulas.

Ranks own parts of every feature map. A convolution over two ranks needs the neighbour's border (the halo)::

    rank 0   [ own ........ | halo ]          halo: received before the border outputs are computed
    rank 1          [ halo | own ........ ]   its gradient goes back the same way

The interior outputs need no halo and are computed while it travels. Behind the gather point layers are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import RowShare, row_kernels
from hpcbench.predict.model_parallel import ModelParallelCost, RankCost, plan_reductions
from hpcbench.predict.placement import halo_placement, place_group
from hpcbench.predict.row_cost import CollectiveOp, ComputeOp, RowCost, RowOp, copy_op
from hpcbench.predict.stream_simulator import WaitEvent
from hpcbench.predict.tensor_sizes import (
    FP32_BYTES,
    activation_number_bytes,
    buffer_bytes,
    cast_weight_bytes,
    parameter_bytes,
    parameter_number_bytes,
    row_number_bytes,
    saved_row_bytes,
    weight_layout_copies,
)
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.gradient_buckets import MIB
from hpcbench.strategies.layer_table import LayerRow, LayerTable
from hpcbench.strategies.mesh import RankMesh
from hpcbench.strategies.spatial import spatial_split as spatial
from hpcbench.strategies.spatial.halo import (
    Box,
    Halo,
    HaloMessage,
    box_difference,
    box_intersection,
    box_volume,
    compute_halo,
    owned_box,
)

_STREAM = "sp"
_VECTOR_OPS_FORWARD, _VECTOR_OPS_BACKWARD = 16, 10
"""Operations on one number per channel around a BatchNorm over all parts, as in
``layers``."""
_NORM_COPIES_FORWARD, _NORM_COPIES_BACKWARD = 0.5, 3.0
"""Passes over its input beyond the library's own BatchNorm, each a read and a write."""
_INDEX_BYTES = 8
"""A max pool keeps the position of each of its outputs."""


def whole_row(spec: RunSpec, row: LayerRow) -> RowCost:
    """Return a row that is whole on the rank."""
    samples = spec.batch_size // spec.micro_batches
    unit, weights = samples * row_number_bytes(spec, row), _weight_layout_bytes(spec, row)
    forward, backward = row_kernels(spec, row, samples)
    return RowCost(
        [ComputeOp(forward)],
        [ComputeOp(backward)],
        saved_bytes=saved_row_bytes(spec, row, samples),
        working_bytes=unit * (row.output_bytes // FP32_BYTES + prod(row.input_shape)) + weights,
        library_bytes=weights,
        block_input_bytes=unit * prod(row.input_shape),
    )


def _weight_layout_bytes(spec: RunSpec, row: LayerRow) -> int:
    """Return the bytes of a weight in the library's layout; further copies, for gradients in 3-D, are not counted."""
    return row.parameters * parameter_number_bytes(spec) * min(weight_layout_copies(spec, row), 1)


class SpatialRank:
    """The part of every layer on the rank at ``index`` of the grid."""

    def __init__(self, spec: RunSpec, split: spatial.SpatialSplit, index: int) -> None:
        self.spec, self.split, self.index = spec, split, index
        self.group = place_group(spec, "sp")
        self.placement = halo_placement(split.grid, self.group)._replace(place=index)
        self.options = options_with_defaults(spec)
        self.samples = spec.batch_size // spec.micro_batches
        self.activation_unit = self.samples * activation_number_bytes(spec)
        """Bytes of one number per sample, as it is computed, kept and sent."""
        self.number_bytes = parameter_number_bytes(spec)

    def describe_rows(self) -> list[RowCost]:
        """Return every row of the table; equal ones are described once."""
        known: dict[tuple[object, ...], RowCost] = {}
        costs = []
        for number, row in enumerate(self.split.rows):
            if number >= self.split.end:
                costs.append(self._whole(number, row))
                continue
            key = self._kind_of(number, row)
            if key not in known:
                operations = (
                    self._windowed(number, row) if row.kind in spatial.WINDOWED_KINDS else self._pointwise(number, row)
                )
                known[key] = self._with_memory(operations, row)
            cost = known[key]
            if number == 0:
                # The rank's part of the samples is a copy.
                samples_part = self._copy(self._owned_numbers(row.input_shape))
                cost = cost._replace(forward=[*samples_part, *cost.forward], recompute=cost.forward)
            costs.append(cost)
        return costs

    def _kind_of(self, number: int, row: LayerRow) -> tuple[object, ...]:
        """Return a key that is equal for rows with equal costs."""
        window = spatial.halo_layer(row) if row.kind in spatial.WINDOWED_KINDS else None
        flops_and_bytes = row.forward_flops, row.backward_flops, row.forward_moved_bytes, row.backward_moved_bytes
        kept = row.parameters, row.activation_bytes, row.activation_fixed_bytes
        has_gradient = self._has_input_gradient(number)
        return row.kind, window, *row.input_shape, *row.output_shape, *flops_and_bytes, *kept, has_gradient

    def _pointwise(self, number: int, row: LayerRow) -> RowCost:
        """Describe a layer that looks at each position by itself, or a BatchNorm over all parts."""
        forward, backward = self._kernels(row, self._share(row, self._owned(row.input_shape)))
        if row.kind not in spatial.NORM_KINDS or self.options["batch_norm"] == "local":
            return RowCost(forward, backward)
        payload = 2 * row.input_shape[0] * self.number_bytes
        vector: RowOp = copy_op(self.spec, row.input_shape[0] * self.number_bytes)
        numbers = self._owned_numbers(row.input_shape)
        forward = [
            *[vector] * _VECTOR_OPS_FORWARD,
            CollectiveOp("all_gather", payload, self.group, _STREAM),
            *forward,
            *self._copy(numbers * _NORM_COPIES_FORWARD),
        ]
        if self._has_input_gradient(number):
            backward += [
                *[vector] * _VECTOR_OPS_BACKWARD,
                CollectiveOp("all_reduce", payload, self.group, _STREAM),
                *self._copy(numbers * _NORM_COPIES_BACKWARD),
            ]
        return RowCost(forward, backward)

    def _windowed(self, number: int, row: LayerRow) -> RowCost:
        """Describe a convolution or pool with its halo."""
        halo = self._halo(row)
        sends, waits = self._exchange(row, halo.sends)
        has_halo = bool(halo.sends or halo.receives)
        if (
            row.kind in spatial.CONVOLUTION_KINDS
            and self.options["overlap"]
            and has_halo
            and box_volume(halo.interior) > 0
        ):
            forward = [*sends, *self._part(row, halo, halo.interior), *waits]
            for box in box_difference(halo.outputs, halo.interior):
                forward += self._part(row, halo, box)
        else:
            kernels, _ = self._kernels(row, self._share(row, halo.needed))
            forward = [*sends, *waits, *self._assembled(row, halo), *kernels]
        return RowCost(forward, self._windowed_backward(number, row, halo))

    def _windowed_backward(self, number: int, row: LayerRow, halo: Halo) -> list[RowOp]:
        """Compute the input's gradient first: the neighbours' part of it travels during the weight's."""
        _, kernels = self._kernels(row, self._share(row, halo.needed))
        is_convolution = row.kind in spatial.CONVOLUTION_KINDS
        assembled = self._assembled(row, halo) if is_convolution else []
        if not self._has_input_gradient(number):
            return [*assembled, *kernels]
        sends, waits = self._exchange(row, halo.receives)
        is_padded = halo.sends or halo.own != halo.needed
        own_part = self._copy(row.input_shape[0] * box_volume(halo.own)) if is_padded else []
        if not is_convolution:
            return [*kernels, *sends, *waits, *own_part]
        halves = [kernel._replace(fraction=0.5) for kernel in kernels if isinstance(kernel, ComputeOp)]
        if self.options["overlap"]:
            return [*assembled, *halves, *sends, *halves, *waits, *own_part]
        return [*assembled, *halves, *sends, *waits, *halves, *own_part]

    def _part(self, row: LayerRow, halo: Halo, outputs: Box) -> list[RowOp]:
        """Compute some of the outputs by themselves: lay their inputs together, and copy them to their position."""
        inputs = tuple(
            needed if parts == 1 else window.input_range(wanted)
            for needed, parts, window, wanted in zip(
                halo.needed, self.split.grid, spatial.halo_layer(row).windows, outputs, strict=True
            )
        )
        kernels, _ = self._kernels(row, self._share(row, inputs, outputs))
        laid_out = [] if outputs == halo.interior else self._copy(row.input_shape[0] * box_volume(inputs))
        return [*laid_out, *kernels, *self._copy(row.output_shape[0] * box_volume(outputs))]

    def _assembled(self, row: LayerRow, halo: Halo) -> list[RowOp]:
        """Lay the own part and the received halo side by side."""
        return [] if halo.needed == halo.own else self._copy(row.input_shape[0] * box_volume(halo.needed))

    def _whole(self, number: int, row: LayerRow) -> RowCost:
        """Describe a row at or behind the gather point; a mean over all positions begins with the own ones."""
        whole = whole_row(self.spec, row)
        if number > self.split.end:
            return whole
        own_input = self.activation_unit * self._owned_numbers(row.input_shape)
        channels = self.split.rows[number - 1].output_shape[0]
        if self.split.by_mean and self.options["global_pool"] == "reduce":
            fraction = box_volume(self._owned(row.input_shape)) / prod(spatial.spatial_extents(row.input_shape))
            forward, backward = self._kernels(row, RowShare(fraction, fraction, 1.0, 1.0))
            received, is_left_again = 0, self._keeps_activations_from(number + 1)
            payload = self.samples * channels * self.number_bytes
            leave: list[RowOp] = [CollectiveOp("all_reduce", payload, self.group, _STREAM)]
        else:
            forward, backward = list(whole.forward), list(whole.backward)
            received, is_left_again = self.activation_unit * prod(row.input_shape), self._keeps_activations_from(number)
            payload = self.activation_unit * channels * box_volume(owned_box(self.split.extents, self.split.grid, 0))
            leave = [
                copy_op(self.spec, payload * self.spec.sp_degree),
                CollectiveOp("all_gather", payload, self.group, _STREAM),
            ]
            backward = [copy_op(self.spec, payload), *backward]
        return whole._replace(
            forward=[*forward, *leave],
            backward=backward,
            recompute=[*forward, *(leave if is_left_again else ())],
            saved_bytes=max(whole.saved_bytes - received, 0) if received else 0,
            received_bytes=received,
            working_bytes=whole.working_bytes - whole.block_input_bytes + received + own_input,
            block_input_bytes=own_input,
        )

    def _keeps_activations_from(self, number: int) -> bool:
        """Return whether a recomputed block comes as far as row ``number``: it ends with the last row that is kept."""
        block, kinds = self.split.rows[self.split.end].block, spatial.POOL_KINDS | spatial.GLOBAL_POOL_KINDS
        later = [row for row in self.split.rows[number:] if row.block == block]
        return any(row.activation_bytes or row.parameters or row.kind in kinds for row in later)

    def _with_memory(self, operations: RowCost, row: LayerRow) -> RowCost:
        """Add the bytes of a cut row: its share of the table's, a convolution also its halo."""
        weights = received = 0
        if row.kind in spatial.CONVOLUTION_KINDS:
            weights, halo = _weight_layout_bytes(self.spec, row), self._halo(row)
            received = self.activation_unit * _message_numbers(row, halo.receives)
        return operations._replace(
            saved_bytes=self._saved_bytes(row),
            received_bytes=received,
            working_bytes=self.activation_unit * self._working_numbers(row) + weights,
            library_bytes=weights,
            block_input_bytes=self.activation_unit * self._owned_numbers(row.input_shape),
        )

    def _saved_bytes(self, row: LayerRow) -> int:
        """Return the rank's share of a cut row's activations; a max pool keeps its indices and no input."""
        shape = row.input_shape if row.kind in spatial.CONVOLUTION_KINDS | spatial.NORM_KINDS else row.output_shape
        positions = box_volume(self._owned(shape))
        if row.kind in spatial.POOL_KINDS:
            return self.samples * shape[0] * positions * _INDEX_BYTES if row.kind in spatial.MAX_POOL_KINDS else 0
        per_batch = self.samples * row.activation_bytes * positions // prod(spatial.spatial_extents(shape))
        kept = (per_batch + row.activation_fixed_bytes) * row_number_bytes(self.spec, row) // FP32_BYTES
        return kept + cast_weight_bytes(self.spec, row)

    def _working_numbers(self, row: LayerRow) -> int:
        """Return the numbers per sample that are alive while a cut layer runs backwards."""
        owned, gradient = self._owned_numbers(row.input_shape), self._owned_numbers(row.output_shape)
        if row.kind not in spatial.WINDOWED_KINDS:
            return gradient + owned
        halo = self._halo(row)
        needed = row.input_shape[0] * box_volume(halo.needed)
        in_flight = _message_numbers(row, halo.receives) + _message_numbers(row, halo.sends)
        is_copied = halo.own != halo.needed
        if row.kind in spatial.POOL_KINDS:
            return gradient + needed + (owned if is_copied or halo.sends else 0) + in_flight
        if row.backward_flops <= row.forward_flops:
            # The samples themselves have no gradient.
            return gradient + (needed if is_copied else 0)
        return gradient + needed * (1 + is_copied) + in_flight

    def _exchange(self, row: LayerRow, messages: Sequence[HaloMessage]) -> tuple[list[RowOp], list[RowOp]]:
        """Return the copies and sends of ``messages``, and the waiting for them.

        Of messages that share a link only the first pays the latency.
        """
        copies: list[RowOp] = []
        sends: list[RowOp] = []
        keys: list[str] = []
        for message in messages:
            size = self.activation_unit * row.input_shape[0] * box_volume(message.box)
            group = self.placement.group_with(message.rank)
            key = f"halo {group.nodes}"
            copies.append(copy_op(self.spec, size))
            sends.append(CollectiveOp("send", size, group, _STREAM, key, shares_latency=key in keys))
            keys.append(key)
        return [*copies, *sends], [WaitEvent(key) for key in dict.fromkeys(keys)]

    def _has_input_gradient(self, number: int) -> bool:
        """Return whether a gradient flows beyond the row: not to the samples themselves."""
        row = self.split.rows[number]
        if row.kind in spatial.CONVOLUTION_KINDS:
            return row.backward_flops > row.forward_flops
        return any(before.parameters for before in self.split.rows[:number])

    def _kernels(self, row: LayerRow, share: RowShare) -> tuple[list[RowOp], list[RowOp]]:
        forward, backward = row_kernels(self.spec, row, self.samples, share)
        return [ComputeOp(forward)], [ComputeOp(backward)]

    def _copy(self, numbers: float) -> list[RowOp]:
        """Return the copy of so many numbers per sample."""
        return [copy_op(self.spec, numbers * self.activation_unit)] if numbers else []

    def _halo(self, row: LayerRow) -> Halo:
        return compute_halo(spatial.halo_layer(row), self.split.grid, self.index)

    def _owned(self, shape: Sequence[int]) -> Box:
        return owned_box(spatial.spatial_extents(shape), self.split.grid, self.index)

    def _owned_numbers(self, shape: Sequence[int]) -> int:
        return shape[0] * box_volume(self._owned(shape))

    def _share(self, row: LayerRow, inputs: Box, outputs: Box | None = None) -> RowShare:
        """Return the rank's part of a row by the positions that it reads and writes: all its outputs by default."""
        outputs = self._owned(row.output_shape) if outputs is None else outputs
        extents = spatial.spatial_extents(row.input_shape)
        image = tuple(range(extent) for extent in extents)
        input_share = box_volume(box_intersection(inputs, image)) / prod(extents)
        output_share = box_volume(outputs) / prod(spatial.spatial_extents(row.output_shape))
        return RowShare(output_share, input_share, output_share, 1.0)


def _message_numbers(row: LayerRow, messages: tuple[HaloMessage, ...]) -> int:
    return row.input_shape[0] * sum(box_volume(message.box) for message in messages)


class SpatialCost(ModelParallelCost):
    """The cost of ``spatial``: the ranks of a replica share every sample; with replicas ParaDL's data+spatial."""

    # A halo is cut out, sent, received and joined; with overlap the interior and the borders are computed apart.
    operators_per_call = 10

    def describe(self, spec: RunSpec, table: LayerTable, rank: int) -> RankCost:
        sizes = parameter_bytes(spec, table)
        split = spatial.spatial_split_of_run(spec, table) if spec.sp_degree > 1 else None
        if split is None:
            rows, cut = [whole_row(spec, row) for row in table.layers], [False] * len(sizes)
        else:
            rows = SpatialRank(spec, split, RankMesh.of(spec).coordinates(rank).sp).describe_rows()
            cut = [split.is_cut(tensor.name) for tensor in table.parameter_tensors]
        # Gradients of cut layers are reduced over all ranks that share them, others over the replicas.
        parts = ((cut, ("dp", "sp")), ([not is_cut for is_cut in cut], ("dp",)))
        cap_bytes = max(int(float(options_with_defaults(spec)["bucket_cap_mb"]) * MIB), 1)
        reductions = plan_reductions(spec, sizes, parts, cap_bytes)
        return RankCost(rows, sizes, reductions, sum(buffer_bytes(spec, table)))

    def slowest_rank(self, spec: RunSpec) -> int:
        """Return a rank with neighbours on all sides, and one on another node where there are several."""
        place = halo_placement(spatial.spatial_grid(spec), place_group(spec, "sp")).place if spec.sp_degree > 1 else 0
        return RankMesh.of(spec).rank(RankMesh(dp=0, pp=0, sp=place, tp=0))

    def ranks_that_differ(self, spec: RunSpec) -> list[int]:
        """Return the rank with the largest part of a sample, and the one with the most halos."""
        return sorted({0, self.slowest_rank(spec)})


COSTS = {
    "spatial": SpatialCost,
}
"""The cost of each strategy."""
