"""Halo exchange of a layer that is split along spatial dims: the boxes that each rank owns, needs, sends and receives.
Every dim of a feature map is divided by ``even_ranges`` over one dim of a grid of ranks, a layer's input and its
output separately. A rank computes its own outputs; the inputs that they need and another rank owns are the halo
(Dryden et al. 2019, arXiv:1903.06681, section 3.1). Boxes are global coordinates without batch and channels.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from hpcbench.parallel.mesh import even_ranges

Box = tuple[range, ...]
"""A range per spatial dim."""


class SlidingWindow(NamedTuple):
    """How a convolution or a pool goes over one dim, in torch's words."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    ceil_mode: bool = False

    @property
    def span(self) -> int:
        """Positions from the first to the last that one output looks at."""
        return self.dilation * (self.kernel - 1) + 1

    def output_extent(self, extent: int) -> int:
        """What torch makes of an input of ``extent``."""
        steps = extent + 2 * self.padding - self.span
        outputs = (-(-steps // self.stride) if self.ceil_mode else steps // self.stride) + 1
        if self.ceil_mode and (outputs - 1) * self.stride >= extent + self.padding:
            # torch drops a window that would begin in the padding at the end.
            outputs -= 1
        return outputs

    def needs(self, outputs: range) -> range:
        """The inputs that ``outputs`` look at; beyond the image it is padding."""
        first = outputs.start * self.stride - self.padding
        return range(first, first + (len(outputs) - 1) * self.stride + self.span)

    def fed_by(self, own: range, outputs: range) -> range:
        """Those of ``outputs`` that look at nothing but ``own``."""
        first = max(outputs.start, -((-own.start - self.padding) // self.stride))
        stop = min(outputs.stop, (own.stop - self.span + self.padding) // self.stride + 1)
        return range(first, max(first, stop))


class HaloLayer(NamedTuple):
    """One convolution or pool on feature maps of ``extents``.

    ``pads_itself``: along dims that are not cut its own padding stays with it, and nothing is said about them here.
    """

    extents: tuple[int, ...]
    windows: tuple[SlidingWindow, ...]
    pads_itself: bool = False


class HaloMessage(NamedTuple):
    """A part of the input that goes to, or comes from, the rank at ``place``."""

    place: int
    box: Box


class Halo(NamedTuple):
    """One rank's part in a layer. Messages are in the order of places, one per pair of ranks."""

    own: Box
    needed: Box
    """With padding: may reach beyond the image."""
    outputs: Box
    interior: Box
    """The outputs that need no other rank; empty where any of its ranges is."""
    sends: tuple[HaloMessage, ...]
    receives: tuple[HaloMessage, ...]

    @property
    def is_local(self) -> bool:
        """Whether what is owned is what is needed, neither more nor less."""
        return not self.sends and not self.receives and self.own == self.needed


@lru_cache(maxsize=4096)
def owned_box(extents: tuple[int, ...], grid: tuple[int, ...], place: int) -> Box:
    """The part of a feature map that the rank at ``place`` owns; places go through the grid row by row.

    >>> own_box((5, 4), (2, 2), 1)
    (range(0, 3), range(2, 4))
    """
    at = grid_coordinates(grid, place)
    return tuple(even_ranges(extent, parts)[one] for extent, parts, one in zip(extents, grid, at, strict=True))


def grid_coordinates(grid: tuple[int, ...], place: int) -> tuple[int, ...]:
    """Where ``place`` stands in the grid."""
    found = []
    for parts in reversed(grid):
        place, one = divmod(place, parts)
        found.append(one)
    assert place == 0, "a place beyond the grid"
    return tuple(reversed(found))


@lru_cache(maxsize=4096)
def compute_halo(layer: HaloLayer, grid: tuple[int, ...], place: int) -> Halo:
    """What the rank at ``place`` owns, needs, sends and receives for ``layer``."""
    dims = [
        _halo_along_dim(extent, window, parts, at, pads_itself=layer.pads_itself)
        for extent, window, parts, at in zip(
            layer.extents, layer.windows, grid, grid_coordinates(grid, place), strict=True
        )
    ]
    return Halo(
        own=tuple(one.own for one in dims),
        needed=tuple(one.needed for one in dims),
        outputs=tuple(one.outputs for one in dims),
        interior=tuple(one.interior for one in dims),
        sends=_halo_messages(grid, place, [one.wanted_by for one in dims]),
        receives=_halo_messages(grid, place, [one.found_at for one in dims]),
    )


class _HaloDim(NamedTuple):
    own: range
    needed: range
    outputs: range
    interior: range
    found_at: dict[int, range]
    """Parts of what is needed, by who owns them: coordinates along this dim, the own one among them."""
    wanted_by: dict[int, range]


def _halo_along_dim(extent: int, window: SlidingWindow, parts: int, at: int, *, pads_itself: bool) -> _HaloDim:
    out_extent = window.output_extent(extent)
    assert min(extent, out_extent) >= parts, f"{extent} -> {out_extent} positions for {parts} ranks"
    if parts == 1 and pads_itself:
        whole, outputs = range(extent), range(out_extent)
        return _HaloDim(whole, whole, outputs, outputs, {0: whole}, {0: whole})
    owned, outputs_of = even_ranges(extent, parts), even_ranges(out_extent, parts)
    needed = [window.needs(outputs) for outputs in outputs_of]
    return _HaloDim(
        own=owned[at],
        needed=needed[at],
        outputs=outputs_of[at],
        interior=window.fed_by(owned[at], outputs_of[at]),
        found_at={other: both for other in range(parts) if (both := range_intersection(needed[at], owned[other]))},
        wanted_by={other: both for other in range(parts) if (both := range_intersection(owned[at], needed[other]))},
    )


def _halo_messages(grid: tuple[int, ...], place: int, parts: list[dict[int, range]]) -> tuple[HaloMessage, ...]:
    """One for every other rank with a part in every dim: at a corner that is one that lies diagonally."""
    found = []
    for named in product(*(one.items() for one in parts)):
        other = 0
        for (at, _), size in zip(named, grid, strict=True):
            other = other * size + at
        if other != place:
            found.append(HaloMessage(other, tuple(part for _, part in named)))
    return tuple(sorted(found, key=lambda message: message.place))


def range_intersection(a: range, b: range) -> range:
    """What two ranges share."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def box_intersection(a: Box, b: Box) -> Box:
    """What two boxes share."""
    return tuple(range_intersection(one, other) for one, other in zip(a, b, strict=True))


def box_volume(box: Box) -> int:
    """Positions in a box."""
    return prod(len(one) for one in box)


def box_difference(outer: Box, inner: Box) -> list[Box]:
    """``outer`` without ``inner``, which lies in it and is not empty, as boxes that share nothing.

    >>> around((range(4), range(4)), (range(1, 4), range(0, 4)))
    [(range(0, 1), range(0, 4))]
    """
    found: list[Box] = []
    for dim, (whole, kept) in enumerate(zip(outer, inner, strict=True)):
        for part in (range(whole.start, kept.start), range(kept.stop, whole.stop)):
            box = (*inner[:dim], part, *outer[dim + 1 :])
            if box_volume(box):
                found.append(box)
    return found
