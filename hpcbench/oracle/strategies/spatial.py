"""Costs of spatial parallelism: traffic, memory and step of one rank. ``docs/formulas.md`` derives the formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import FULL_SHARE, CostModel, RowShare, row_kernels
from hpcbench.oracle.model_parallel import (
    CommOp,
    ReductionPlan,
    RowEvents,
    comm_events,
    copy_event,
    local_row_events,
    model_parallel_step,
    unsharded_row_events,
)
from hpcbench.oracle.peak_memory import MemoryBreakdown, parameter_bytes
from hpcbench.oracle.placement import HaloPlacement, halo_placement, place_group
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.oracle.strategies.spatial_rows import (
    feature_map_element_bytes,
    has_input_gradient,
    micro_batch_samples,
    parameter_element_bytes,
    pools_by_all_reduce,
    spatial_gradient_buckets,
    spatial_peak_memory,
    spatial_row_comm,
)
from hpcbench.oracle.stream_simulator import ComputeEvent, StreamEvent, WaitEvent
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.layer_table import LayerRow, LayerTable
from hpcbench.parallel.mesh import RankMesh
from hpcbench.parallel.strategies.halo import (
    Box,
    Halo,
    HaloMessage,
    box_intersection,
    box_volume,
    compute_halo,
    owned_box,
)
from hpcbench.parallel.strategies.halo import box_difference as strips_around
from hpcbench.parallel.strategies.spatial import (
    CONVOLUTION_KINDS,
    NORM_KINDS,
    WINDOWED_KINDS,
    SpatialSplit,
    halo_layer,
    spatial_extents,
    spatial_split_of_run,
)
from hpcbench.parallel.traffic import Traffic, merge_calls

_COMM_STREAM = "sp"
_VECTOR_OPS_FORWARD, _VECTOR_OPS_BACKWARD = 16, 10
"""Operations on one number per channel around a BatchNorm over all parts (``worker.spatial.batch_norm``)."""
_NORM_COPIES_FORWARD, _NORM_COPIES_BACKWARD = 0.5, 3.0
"""What it reads and writes of its input beyond the library's own BatchNorm: one pass more forward, six backward."""


def spatial_step(clock: CostModel, spec: RunSpec, table: LayerTable, split: SpatialSplit | None) -> StepBreakdown:
    """Of the rank with most neighbours, on other nodes where there are any. ``split``: ``None`` without others."""
    sizes = parameter_bytes(spec, table)
    rows = unsharded_row_events(clock, spec, table) if split is None else list(_SpatialRank(clock, spec, split).rows())
    by_ranks: dict[int, list[Sequence[int]]] = {}
    for places, ranks in spatial_gradient_buckets(spec, table, split):
        by_ranks.setdefault(ranks, []).append(places)
    groups = {spec.dp_degree: ("dp", ["dp"]), spec.ranks: ("dp sp", ["dp", "sp"])}
    reducers = [
        ReductionPlan(place_group(spec, *groups[ranks][1]), groups[ranks][0], found)
        for ranks, found in by_ranks.items()
    ]
    return model_parallel_step(clock, spec, table, rows, sizes, reducers)


class _SpatialRank:
    """One rank's part of every layer."""

    def __init__(self, clock: CostModel, spec: RunSpec, split: SpatialSplit) -> None:
        self.clock, self.spec, self.split = clock, spec, split
        self.samples, self.group = micro_batch_samples(spec), place_group(spec, _COMM_STREAM)
        self.near: HaloPlacement = halo_placement(split.grid, self.group)
        self.overlaps = bool(options_with_defaults(spec)["overlap"])
        self.unit = micro_batch_samples(spec) * feature_map_element_bytes(spec)

    def rows(self) -> Iterator[RowEvents]:
        """Of the whole table."""
        made: dict[tuple[object, ...], RowEvents] = {}
        for number, row in enumerate(self.split.rows):
            if number >= self.split.end:
                yield self._whole(number, row)
                continue
            key = self._kind_of(number, row)
            if key not in made:
                made[key] = self._windowed(number, row) if row.kind in WINDOWED_KINDS else self._cut(number, row)
            found = made[key]
            if number == 0:
                # The own part of the samples is a copy.
                taken = self._copy(row.input_shape[0] * box_volume(self._own(row.input_shape)))
                found = found._replace(forward=[*taken, *found.forward])
            yield found

    def _kind_of(self, number: int, row: LayerRow) -> tuple[object, ...]:
        """Equal for rows that take equal time."""
        window = halo_layer(row) if row.kind in WINDOWED_KINDS else None
        sizes = row.parameters, row.forward_flops, row.forward_moved_bytes, row.backward_moved_bytes
        has_gradient = has_input_gradient(self.split, number)
        return row.kind, window, *row.input_shape, *row.output_shape, *sizes, has_gradient

    def _cut(self, number: int, row: LayerRow) -> RowEvents:
        """A layer that looks at each position by itself; a BatchNorm over all parts."""
        share = self._share(row, self._own(row.input_shape), self._own(row.output_shape))
        found, moves = self._computed(row, share), spatial_row_comm(self.spec, self.split, number, self.near.place)
        if not moves.enter:
            return found
        assert row.kind in NORM_KINDS, f"{row.kind} passes nothing"
        vector = copy_event(self.clock, self.spec, row.input_shape[0] * parameter_element_bytes(self.spec))
        whole = row.input_shape[0] * box_volume(self._own(row.input_shape))
        gathered, summed = self._moved(moves.enter), self._moved(moves.enter_backward)
        forward = [
            *[vector] * _VECTOR_OPS_FORWARD, *gathered, *found.forward, *self._copy(whole * _NORM_COPIES_FORWARD)
        ]  # fmt: skip
        backward = [*found.backward]
        if summed:
            backward += [*[vector] * _VECTOR_OPS_BACKWARD, *summed, *self._copy(whole * _NORM_COPIES_BACKWARD)]
        return RowEvents(forward, backward, forward)

    def _windowed(self, number: int, row: LayerRow) -> RowEvents:
        """A convolution or pool with its halo."""
        needs = compute_halo(halo_layer(row), self.split.grid, self.near.place)
        moves = spatial_row_comm(self.spec, self.split, number, self.near.place)
        is_convolution = row.kind in CONVOLUTION_KINDS
        sends, waits = self._exchange(moves.enter, needs.sends)
        hides = (
            is_convolution and self.overlaps and bool(needs.sends or needs.receives) and box_volume(needs.interior) > 0
        )
        forward: list[StreamEvent] = [*sends]
        if hides:
            forward += [*self._part(row, needs, needs.interior), *waits]
            for box in strips_around(needs.outputs, needs.interior):
                forward += self._part(row, needs, box)
        else:
            whole = self._share(row, needs.needed, needs.outputs)
            forward += [*waits, *self._assembled(row, needs), *self._computed(row, whole).forward]
        return RowEvents(forward, self._backward(number, row, needs, moves.enter_backward), forward)

    def _backward(self, number: int, row: LayerRow, needs: Halo, moves: Sequence[CommOp]) -> list[StreamEvent]:
        """The input's gradient first, so that what others own of it is on its way during the weight's."""
        computed = self._computed(row, self._share(row, needs.needed, needs.outputs)).backward
        is_convolution = row.kind in CONVOLUTION_KINDS
        assembled = self._assembled(row, needs) if is_convolution else []
        if not has_input_gradient(self.split, number):
            return [*assembled, *computed]
        sends, waits = self._exchange(moves, needs.receives)
        own = self._copy(row.input_shape[0] * box_volume(needs.own)) if needs.sends or needs.own != needs.needed else []
        if not is_convolution:
            return [*computed, *sends, *waits, *own]
        halves = [ComputeEvent(one.seconds / 2) for one in computed if isinstance(one, ComputeEvent)]
        if self.overlaps:
            return [*assembled, *halves, *sends, *halves, *waits, *own]
        return [*assembled, *halves, *sends, *waits, *halves, *own]

    def _part(self, row: LayerRow, needs: Halo, box: Box) -> list[StreamEvent]:
        """Some of the outputs by themselves: what they look at put together, and what comes out put in its place."""
        layer = halo_layer(row)
        feeds = tuple(
            needed if parts == 1 else window.needs(wanted)
            for needed, parts, window, wanted in zip(needs.needed, self.split.grid, layer.windows, box, strict=True)
        )
        computed = self._computed(row, self._share(row, feeds, box)).forward
        given = [] if box == needs.interior else self._copy(row.input_shape[0] * box_volume(feeds))
        return [*given, *computed, *self._copy(row.output_shape[0] * box_volume(box))]

    def _assembled(self, row: LayerRow, needs: Halo) -> list[StreamEvent]:
        """Own and received side by side."""
        return [] if needs.needed == needs.own else self._copy(row.input_shape[0] * box_volume(needs.needed))

    def _whole(self, number: int, row: LayerRow) -> RowEvents:
        """Behind the switch; a mean over all positions begins with the own ones."""
        is_mean = number == self.split.end and pools_by_all_reduce(self.spec, self.split)
        share = self._share(row, self._own(row.input_shape), None) if is_mean else FULL_SHARE
        found = self._computed(row, share)
        if number > self.split.end:
            return found
        moves = spatial_row_comm(self.spec, self.split, number, self.near.place)
        leave, before = self._moved(moves.leave), self._moved(moves.leave_backward)
        again = [*found.forward, *(leave if moves.is_left_again else ())]
        return RowEvents([*found.forward, *leave], [*before, *found.backward], again)

    def _exchange(
        self, moves: Sequence[CommOp], messages: Sequence[HaloMessage]
    ) -> tuple[list[StreamEvent], list[StreamEvent]]:
        """Messages at a time: of those that share a wire the first one's latency is the only one. And the waiting."""
        copies: list[StreamEvent] = [copy_event(self.clock, self.spec, one.copied_bytes) for one in moves]
        calls: list[StreamEvent] = []
        keys: list[str] = []
        for move, message in zip(moves, messages, strict=True):
            assert move.traffic is not None, "a message of nothing"
            group = self.near.group_with(message.place)
            key = f"halo {group.nodes}"
            call = self.clock.call("send", move.traffic.payload_bytes, group, key, _COMM_STREAM)
            if key in keys:
                call = call._replace(seconds=call.seconds - call.latency_s, latency_s=0.0)
            else:
                keys.append(key)
            calls.append(call)
        return [*copies, *calls], [WaitEvent(key) for key in keys]

    def _computed(self, row: LayerRow, share: RowShare) -> RowEvents:
        return local_row_events(self.clock, row_kernels(self.spec, row, self.samples, share))

    def _moved(self, moves: Sequence[CommOp]) -> list[StreamEvent]:
        return comm_events(self.clock, self.spec, moves, self.group, _COMM_STREAM)

    def _copy(self, numbers: float) -> list[StreamEvent]:
        """Of so many numbers per sample."""
        return [copy_event(self.clock, self.spec, numbers * self.unit)] if numbers else []

    def _own(self, shape: Sequence[int]) -> Box:
        return owned_box(spatial_extents(shape), self.split.grid, self.near.place)

    def _share(self, row: LayerRow, given: Box, made: Box | None) -> RowShare:
        """By positions; ``made`` is ``None`` where all that comes out is made here."""
        extents = spatial_extents(row.input_shape)
        image = tuple(range(extent) for extent in extents)
        inputs = box_volume(box_intersection(given, image)) / box_volume(image)
        if made is None:
            return RowShare(inputs, inputs, 1.0, 1.0)
        outputs = box_volume(made) / box_volume(tuple(range(extent) for extent in spatial_extents(row.output_shape)))
        return RowShare(outputs, inputs, outputs, 1.0)


class SpatialCost:
    """One replica's ranks share every sample; with replicas ParaDL's data+spatial."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Halos of this rank, by neighbour; collectives are the same on all ranks."""
        sizes, split = parameter_bytes(spec, table), _spatial_split(spec, table)
        calls: list[Traffic] = []
        if split is not None:
            place = RankMesh.of(spec).coordinates(rank).sp
            for number in range(split.end + 1):
                calls += spatial_row_comm(spec, split, number, place).calls(spec.activation_checkpointing)
        calls *= spec.micro_batches
        for places, ranks in spatial_gradient_buckets(spec, table, split):
            payload = sum(sizes[one] for one in places)
            calls.append(Traffic(operation="all_reduce", group_size=ranks, payload_bytes=payload))
        return merge_calls(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """All weights, and a part of what the cut layers keep. Half precision is counted as fp32."""
        split = _spatial_split(spec, table)
        reduced = [places for places, _ in spatial_gradient_buckets(spec, table, split)]
        return spatial_peak_memory(spec, table, split, RankMesh.of(spec).coordinates(rank).sp, reduced)

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """A rank with neighbours on all sides, and one on another node where there are several, sets the pace."""
        return spatial_step(clock, spec, table, _spatial_split(spec, table))


def _spatial_split(spec: RunSpec, table: LayerTable) -> SpatialSplit | None:
    return spatial_split_of_run(spec, table) if spec.sp_degree > 1 else None
