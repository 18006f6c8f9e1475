"""Halo exchange of a layer that is split along spatial dims: the boxes that each rank owns, needs, sends and receives.

Every dim of a feature map is divided by ``even_ranges`` over one dim of a grid of ranks, a layer's input and its
output separately. A rank computes its own outputs; the inputs that they need and another rank owns are the halo
(Dryden et al. 2019, arXiv:1903.06681, section 3.1). Boxes are global coordinates without batch and channels.

A convolution with kernel 3 and padding 1 over 8 positions on 2 ranks::

    position      p 0 1 2 3 4 5 6 7 p      p: padding
    rank 0 owns     # # # #
    rank 0 needs  # # # # # h              h: its halo, received from rank 1
    rank 1 owns             # # # #
    rank 1 needs          h # # # # #      h: its halo, received from rank 0
    interior        0 1 2     5 6 7        outputs that need no halo, computed while halos travel
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from hpcbench.strategies.mesh import even_ranges, grid_coordinates, grid_rank

Box = tuple[range, ...]
"""A range per spatial dim."""


class SlidingWindow(NamedTuple):
    """The window of a convolution or a pool along one dim, in torch's terms."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    ceil_mode: bool = False

    @property
    def span(self) -> int:
        """Positions from the first to the last input of one output."""
        return self.dilation * (self.kernel - 1) + 1

    def output_extent(self, extent: int) -> int:
        """Return torch's number of outputs for an input of ``extent``."""
        steps = extent + 2 * self.padding - self.span
        outputs = (-(-steps // self.stride) if self.ceil_mode else steps // self.stride) + 1
        if self.ceil_mode and (outputs - 1) * self.stride >= extent + self.padding:
            # torch drops a window that would begin in the padding at the end.
            outputs -= 1
        return outputs

    def input_range(self, outputs: range) -> range:
        """Return the inputs of ``outputs``; positions beyond the image are padding."""
        first = outputs.start * self.stride - self.padding
        return range(first, first + (len(outputs) - 1) * self.stride + self.span)

    def outputs_within(self, inputs: range, outputs: range) -> range:
        """Return the part of ``outputs`` that depends on ``inputs`` alone."""
        first = max(outputs.start, -((-inputs.start - self.padding) // self.stride))
        stop = min(outputs.stop, (inputs.stop - self.span + self.padding) // self.stride + 1)
        return range(first, max(first, stop))


class HaloLayer(NamedTuple):
    """A convolution or pool on feature maps of ``extents``.

    With ``pads_itself`` the layer pads those dims that are not split; their padding is not part of the boxes.
    """

    extents: tuple[int, ...]
    windows: tuple[SlidingWindow, ...]
    pads_itself: bool = False


class HaloMessage(NamedTuple):
    """A part of the input that is sent to, or received from, ``rank``."""

    rank: int
    box: Box


class Halo(NamedTuple):
    """The part of a rank in a layer. Messages are in the order of ranks, one per pair of ranks."""

    own: Box
    """The input positions that the rank owns."""
    needed: Box
    """The input positions of ``outputs``; with padding they may reach beyond the image."""
    outputs: Box
    interior: Box
    """The outputs that need no other rank; empty if any of its ranges is."""
    sends: tuple[HaloMessage, ...]
    receives: tuple[HaloMessage, ...]


@lru_cache(maxsize=4096)
def owned_box(extents: tuple[int, ...], grid: tuple[int, ...], rank: int) -> Box:
    """Return the part of a feature map that ``rank`` owns; ranks are numbered row by row through the grid.

    >>> owned_box((5, 4), (2, 2), 1)
    (range(0, 3), range(2, 4))
    """
    coordinates = grid_coordinates(grid, rank)
    return tuple(
        even_ranges(extent, parts)[index] for extent, parts, index in zip(extents, grid, coordinates, strict=True)
    )


@lru_cache(maxsize=4096)
def compute_halo(layer: HaloLayer, grid: tuple[int, ...], rank: int) -> Halo:
    """Return the boxes that ``rank`` owns, needs, sends and receives for ``layer``."""
    coordinates = grid_coordinates(grid, rank)
    dims = zip(layer.extents, layer.windows, grid, coordinates, strict=True)
    ranges, shared = zip(*[_halo_along_dim(*dim, pads_itself=layer.pads_itself) for dim in dims], strict=True)
    needed_from, needed_by = zip(*shared, strict=True)
    sends, receives = _halo_messages(grid, rank, needed_by), _halo_messages(grid, rank, needed_from)
    owned, needed, outputs, interior = zip(*ranges, strict=True)
    return Halo(owned, needed, outputs, interior, sends, receives)


_SharedRanges = dict[int, range]


def _halo_along_dim(
    extent: int, window: SlidingWindow, parts: int, index: int, *, pads_itself: bool
) -> tuple[tuple[range, range, range, range], tuple[_SharedRanges, _SharedRanges]]:
    """Return the ranges of ``Halo`` along one dim, and which parts of inputs are shared, by coordinate.

    Those are the parts of the needed inputs by the coordinate of their owner, this rank included, and the parts of the
    own inputs by the coordinate of the rank that needs them.
    """
    output_extent = window.output_extent(extent)
    assert min(extent, output_extent) >= parts, f"{extent} -> {output_extent} positions for {parts} ranks"
    if parts == 1 and pads_itself:
        whole, outputs = range(extent), range(output_extent)
        return (whole, whole, outputs, outputs), ({0: whole}, {0: whole})
    owned, output_ranges = even_ranges(extent, parts), even_ranges(output_extent, parts)
    needed = [window.input_range(outputs) for outputs in output_ranges]
    owned_range, outputs = owned[index], output_ranges[index]
    received = {other: range_intersection(needed[index], owned[other]) for other in range(parts)}
    sent = {other: range_intersection(owned_range, needed[other]) for other in range(parts)}
    needed_from, needed_by = (
        {other: positions for other, positions in shared.items() if positions} for shared in (received, sent)
    )
    return (owned_range, needed[index], outputs, window.outputs_within(owned_range, outputs)), (needed_from, needed_by)


def _halo_messages(
    grid: tuple[int, ...], rank: int, parts_by_dim: tuple[_SharedRanges, ...]
) -> tuple[HaloMessage, ...]:
    """A message for every other rank with a part in every dim; diagonal neighbours share corners."""
    messages = []
    for parts in product(*(shared.items() for shared in parts_by_dim)):
        other = grid_rank(grid, [index for index, _ in parts])
        if other != rank:
            messages.append(HaloMessage(other, tuple(positions for _, positions in parts)))
    return tuple(sorted(messages, key=lambda message: message.rank))


def range_intersection(a: range, b: range) -> range:
    """Return the positions that both ranges contain."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def box_intersection(a: Box, b: Box) -> Box:
    """Return the box that both boxes contain."""
    return tuple(range_intersection(first, second) for first, second in zip(a, b, strict=True))


def box_volume(box: Box) -> int:
    """Return the number of positions in a box."""
    return prod(len(positions) for positions in box)


def box_difference(outer: Box, inner: Box) -> list[Box]:
    """Return ``outer`` without ``inner``, a non-empty box inside it, as disjoint boxes.

    >>> box_difference((range(4), range(4)), (range(1, 4), range(0, 4)))
    [(range(0, 1), range(0, 4))]
    """
    boxes: list[Box] = []
    for dim, (whole, removed) in enumerate(zip(outer, inner, strict=True)):
        for part in (range(whole.start, removed.start), range(removed.stop, whole.stop)):
            box = (*inner[:dim], part, *outer[dim + 1 :])
            if box_volume(box):
                boxes.append(box)
    return boxes
