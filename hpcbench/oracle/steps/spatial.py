"""Steps of ``spatial``: halos under the interior, statistics over all parts, and a switch to whole layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import WHOLE, Share, row_pass
from hpcbench.oracle.moves import Move
from hpcbench.oracle.neighbours import Neighbours, neighbours_of
from hpcbench.oracle.placement import group_of
from hpcbench.oracle.spatial_calls import (
    around,
    gradient_buckets,
    has_input_gradient,
    is_reduced,
    samples_of,
    sent_bytes,
    stored_bytes,
)
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.model_parallel import (
    Reducer,
    RowEvents,
    alone,
    copied,
    moved,
    step_of_rows,
    whole_rows,
)
from hpcbench.oracle.streams import Compute, Event, Wait
from hpcbench.oracle.tensors import parameter_bytes
from hpcbench.parallel.catalog import chosen_options
from hpcbench.parallel.halo import Box, Halo, Message, halo, own_box, shared, volume
from hpcbench.parallel.halo import around as strips_around
from hpcbench.parallel.layers import Layer, LayerTable
from hpcbench.parallel.spatial import CONVOLUTIONS, NORMS, WINDOWED, Split, positions, window_layer

_LANE = "sp"
_STATISTICS_FORWARD, _STATISTICS_BACKWARD = 16, 10
"""Operations on one number per channel around a BatchNorm over all parts (``worker.spatial.batch_norm``)."""
_NORM_COPIES_FORWARD, _NORM_COPIES_BACKWARD = 0.5, 3.0
"""What it reads and writes of its input beyond the library's own BatchNorm: one pass more forward, six backward."""


def step_of_parts(clock: Clock, spec: RunSpec, table: LayerTable, split: Split | None) -> StepTime:
    """Of the rank with most neighbours, on other nodes where there are any. ``split``: ``None`` without others."""
    sizes = parameter_bytes(spec, table)
    rows = whole_rows(clock, spec, table) if split is None else list(_Rank(clock, spec, split).rows())
    by_ranks: dict[int, list[Sequence[int]]] = {}
    for places, ranks in gradient_buckets(spec, table, split):
        by_ranks.setdefault(ranks, []).append(places)
    groups = {spec.dp_degree: ("dp", ["dp"]), spec.ranks: ("dp sp", ["dp", "sp"])}
    reducers = [
        Reducer(group_of(spec, *groups[ranks][1]), groups[ranks][0], found) for ranks, found in by_ranks.items()
    ]
    return step_of_rows(clock, spec, table, rows, sizes, reducers)


class _Rank:
    """One rank's part of every layer."""

    def __init__(self, clock: Clock, spec: RunSpec, split: Split) -> None:
        self.clock, self.spec, self.split = clock, spec, split
        self.samples, self.group = samples_of(spec), group_of(spec, _LANE)
        self.near: Neighbours = neighbours_of(split.grid, self.group)
        self.overlaps = bool(chosen_options(spec)["overlap"])
        self.unit = samples_of(spec) * sent_bytes(spec)

    def rows(self) -> Iterator[RowEvents]:
        """Of the whole table."""
        made: dict[tuple[object, ...], RowEvents] = {}
        for number, row in enumerate(self.split.rows):
            if number >= self.split.end:
                yield self._whole(number, row)
                continue
            key = self._kind_of(number, row)
            if key not in made:
                made[key] = self._windowed(number, row) if row.kind in WINDOWED else self._cut(number, row)
            found = made[key]
            if number == 0:
                # The own part of the samples is a copy.
                taken = self._copy(row.input_shape[0] * volume(self._own(row.input_shape)))
                found = found._replace(forward=[*taken, *found.forward])
            yield found

    def _kind_of(self, number: int, row: Layer) -> tuple[object, ...]:
        """Equal for rows that take equal time."""
        window = window_layer(row) if row.kind in WINDOWED else None
        sizes = row.parameters, row.forward_flops, row.forward_moved_bytes, row.backward_moved_bytes
        has_gradient = has_input_gradient(self.split, number)
        return row.kind, window, *row.input_shape, *row.output_shape, *sizes, has_gradient

    def _cut(self, number: int, row: Layer) -> RowEvents:
        """A layer that looks at each position by itself; a BatchNorm over all parts."""
        share = self._share(row, self._own(row.input_shape), self._own(row.output_shape))
        found, moves = self._computed(row, share), around(self.spec, self.split, number, self.near.place)
        if not moves.enter:
            return found
        assert row.kind in NORMS, f"{row.kind} passes nothing"
        vector = copied(self.clock, self.spec, row.input_shape[0] * stored_bytes(self.spec))
        whole = row.input_shape[0] * volume(self._own(row.input_shape))
        gathered, summed = self._moved(moves.enter), self._moved(moves.enter_backward)
        forward = [
            *[vector] * _STATISTICS_FORWARD, *gathered, *found.forward, *self._copy(whole * _NORM_COPIES_FORWARD)
        ]  # fmt: skip
        backward = [*found.backward]
        if summed:
            backward += [*[vector] * _STATISTICS_BACKWARD, *summed, *self._copy(whole * _NORM_COPIES_BACKWARD)]
        return RowEvents(forward, backward, forward)

    def _windowed(self, number: int, row: Layer) -> RowEvents:
        """A convolution or pool with its halo."""
        needs = halo(window_layer(row), self.split.grid, self.near.place)
        moves = around(self.spec, self.split, number, self.near.place)
        is_convolution = row.kind in CONVOLUTIONS
        sends, waits = self._exchange(moves.enter, needs.sends)
        hides = is_convolution and self.overlaps and bool(needs.sends or needs.receives) and volume(needs.interior) > 0
        forward: list[Event] = [*sends]
        if hides:
            forward += [*self._part(row, needs, needs.interior), *waits]
            for box in strips_around(needs.outputs, needs.interior):
                forward += self._part(row, needs, box)
        else:
            whole = self._share(row, needs.needed, needs.outputs)
            forward += [*waits, *self._assembled(row, needs), *self._computed(row, whole).forward]
        return RowEvents(forward, self._backward(number, row, needs, moves.enter_backward), forward)

    def _backward(self, number: int, row: Layer, needs: Halo, moves: Sequence[Move]) -> list[Event]:
        """The input's gradient first, so that what others own of it is on its way during the weight's."""
        computed = self._computed(row, self._share(row, needs.needed, needs.outputs)).backward
        is_convolution = row.kind in CONVOLUTIONS
        assembled = self._assembled(row, needs) if is_convolution else []
        if not has_input_gradient(self.split, number):
            return [*assembled, *computed]
        sends, waits = self._exchange(moves, needs.receives)
        own = self._copy(row.input_shape[0] * volume(needs.own)) if needs.sends or needs.own != needs.needed else []
        if not is_convolution:
            return [*computed, *sends, *waits, *own]
        halves = [Compute(one.seconds / 2) for one in computed if isinstance(one, Compute)]
        if self.overlaps:
            return [*assembled, *halves, *sends, *halves, *waits, *own]
        return [*assembled, *halves, *sends, *waits, *halves, *own]

    def _part(self, row: Layer, needs: Halo, box: Box) -> list[Event]:
        """Some of the outputs by themselves: what they look at put together, and what comes out put in its place."""
        layer = window_layer(row)
        feeds = tuple(
            needed if parts == 1 else window.needs(wanted)
            for needed, parts, window, wanted in zip(needs.needed, self.split.grid, layer.windows, box, strict=True)
        )
        computed = self._computed(row, self._share(row, feeds, box)).forward
        given = [] if box == needs.interior else self._copy(row.input_shape[0] * volume(feeds))
        return [*given, *computed, *self._copy(row.output_shape[0] * volume(box))]

    def _assembled(self, row: Layer, needs: Halo) -> list[Event]:
        """Own and received side by side."""
        return [] if needs.needed == needs.own else self._copy(row.input_shape[0] * volume(needs.needed))

    def _whole(self, number: int, row: Layer) -> RowEvents:
        """Behind the switch; a mean over all positions begins with the own ones."""
        is_mean = number == self.split.end and is_reduced(self.spec, self.split)
        share = self._share(row, self._own(row.input_shape), None) if is_mean else WHOLE
        found = self._computed(row, share)
        if number > self.split.end:
            return found
        moves = around(self.spec, self.split, number, self.near.place)
        leave, before = self._moved(moves.leave), self._moved(moves.leave_backward)
        again = [*found.forward, *(leave if moves.is_left_again else ())]
        return RowEvents([*found.forward, *leave], [*before, *found.backward], again)

    def _exchange(self, moves: Sequence[Move], messages: Sequence[Message]) -> tuple[list[Event], list[Event]]:
        """Messages at a time: of those that share a wire the first one's latency is the only one. And the waiting."""
        copies: list[Event] = [copied(self.clock, self.spec, one.copied_bytes) for one in moves]
        calls: list[Event] = []
        keys: list[str] = []
        for move, message in zip(moves, messages, strict=True):
            assert move.traffic is not None, "a message of nothing"
            group = self.near.group_with(message.place)
            key = f"halo {group.nodes}"
            call = self.clock.call("send", move.traffic.payload_bytes, group, key, _LANE)
            if key in keys:
                call = call._replace(seconds=call.seconds - call.latency_s, latency_s=0.0)
            else:
                keys.append(key)
            calls.append(call)
        return [*copies, *calls], [Wait(key) for key in keys]

    def _computed(self, row: Layer, share: Share) -> RowEvents:
        return alone(self.clock, row_pass(self.spec, row, self.samples, share))

    def _moved(self, moves: Sequence[Move]) -> list[Event]:
        return moved(self.clock, self.spec, moves, self.group, _LANE)

    def _copy(self, numbers: float) -> list[Event]:
        """Of so many numbers per sample."""
        return [copied(self.clock, self.spec, numbers * self.unit)] if numbers else []

    def _own(self, shape: Sequence[int]) -> Box:
        return own_box(positions(shape), self.split.grid, self.near.place)

    def _share(self, row: Layer, given: Box, made: Box | None) -> Share:
        """By positions; ``made`` is ``None`` where all that comes out is made here."""
        extents = positions(row.input_shape)
        image = tuple(range(extent) for extent in extents)
        inputs = volume(shared(given, image)) / volume(image)
        if made is None:
            return Share(inputs, inputs, 1.0, 1.0)
        outputs = volume(made) / volume(tuple(range(extent) for extent in positions(row.output_shape)))
        return Share(outputs, inputs, outputs, 1.0)
