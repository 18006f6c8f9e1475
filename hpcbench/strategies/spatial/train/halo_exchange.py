"""Halo exchange between the ranks that share feature maps, and the gather into whole feature maps.

A 3x3 convolution of a 4 x 8 image on a grid of (1, 2) ranks. Each rank owns four columns and needs one more::

    rank 0  o o o o h         o  own part
    rank 1        h o o o o   h  halo: received from the neighbour, which owns it

In the backward pass the gradient of the halo is sent back to its owner, which adds it. After the gather all ranks
compute the same loss, so its backward pass needs no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.errors import unsupported
from hpcbench.strategies.spatial.halo import (
    Box,
    Halo,
    HaloLayer,
    HaloMessage,
    box_intersection,
    box_volume,
    compute_halo,
    owned_box,
)
from hpcbench.worker.distributed import point_to_point
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_parallel_layers import all_gather_equal_parts

_CHANNELS_LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class SpatialGrid(NamedTuple):
    """The division of feature maps among the ranks of a group: ``grid`` parts along each spatial dim."""

    group: RankGroup
    grid: tuple[int, ...]

    def halo(self, layer: HaloLayer) -> Halo:
        """Return the boxes that this rank owns, needs, sends and receives in ``layer``."""
        return compute_halo(layer, self.grid, self.group.place)


def box_view(tensor: Tensor, box: Box, origin: Box) -> Tensor:
    """Return the view of ``box`` in ``tensor``: [n, channels, *extents of origin] -> [n, channels, *extents of box].

    ``origin`` is the box that ``tensor`` holds; it contains ``box``.
    """
    for dim, (target, source) in enumerate(zip(box, origin, strict=True), start=2):
        tensor = tensor.narrow(dim, target.start - source.start, len(target))
    return tensor


def empty_box(like: Tensor, box: Box, channels: int | None = None) -> Tensor:
    """Return an uninitialised tensor [n, channels, *extents of box] in the memory format of ``like``."""
    shape = (like.shape[0], channels or like.shape[1], *map(len, box))
    layout = _CHANNELS_LAST_FORMATS[like.dim()]
    if like.is_contiguous() or not like.is_contiguous(memory_format=layout):
        layout = torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def check_own_extents(x: Tensor, own_box: Box) -> None:
    """Raise ``WorkerError`` (``unsupported``) unless ``x`` is [n, channels, *extents of own_box]."""
    expected = tuple(map(len, own_box))
    if tuple(x.shape[2:]) != expected:
        raise unsupported(
            f"a layer that is cut got {list(x.shape)}, not {list(expected)} positions: the model moves them between "
            "its layers",
            "let options.until end the cut part before that block",
        )


class HaloExchange:
    """Point-to-point messages in flight. Call ``wait`` before reading what was received.

    Each message is a tensor of its own, because a receive fills a whole buffer.

    The backward pass sends the gradient of what was received, and receives that of what was sent.

    Args:
        grid: The ranks of the exchange.
        source: Tensor [n, channels, *extents of origin] that contains what is sent.
        origin: The box of ``source``.
        sends: Destination rank (within the group) and box of every message to send.
        receives: Source rank and box of every message to receive.
    """

    def __init__(
        self,
        grid: SpatialGrid,
        source: Tensor,
        origin: Box,
        sends: Sequence[HaloMessage],
        receives: Sequence[HaloMessage],
    ) -> None:
        self.received = [source.new_empty((*source.shape[:2], *map(len, message.box))) for message in receives]
        # Kept until the end: a message may leave after this call.
        self._sent = [box_view(source, message.box, origin).contiguous() for message in sends]
        sent, received = (
            [point_to_point.Message(tensor, message.rank) for message, tensor in zip(halos, tensors, strict=True)]
            for halos, tensors in ((sends, self._sent), (receives, self.received))
        )
        self._transfers = [
            each for part in point_to_point.exchange(sent, received, grid.group.members()) for each in part
        ]

    def wait(self) -> list[Tensor]:
        """Return the received tensors in the order of ``receives``, each [n, channels, *extents of its box]."""
        for transfer in self._transfers:
            transfer.wait()
        self._transfers, self._sent = [], []
        return self.received


def assemble_input(x: Tensor, received: Sequence[Tensor], halo: Halo, box: Box, image: Box, fill: float) -> Tensor:
    """Return ``box`` of the input, [n, channels, *extents of box].

    Args:
        x: This rank's part, [n, channels, *extents of ``halo.own``].
        received: The tensors of ``halo.receives``, each [n, channels, *extents of its box].
        halo: The boxes of this rank.
        box: Positions to assemble; may extend beyond the image.
        image: All positions of the image.
        fill: Value of positions outside the image (padding).
    """
    if box == halo.own:
        return x
    assembled = empty_box(x, box)
    if box_intersection(box, image) != box:
        assembled.fill_(fill)
    boxes = [halo.own, *(message.box for message in halo.receives)]
    for source, tensor in zip(boxes, [x, *received], strict=True):
        overlap = box_intersection(source, box)
        if box_volume(overlap):
            box_view(assembled, overlap, box).copy_(box_view(tensor, overlap, source))
    return assembled


def assemble_own_gradient(halo: Halo, gradient: Tensor, exchange: HaloExchange | None) -> Tensor:
    """Return the gradient of the own part: from the own outputs plus those of the ranks that it was sent to.

    [n, channels, *extents of halo.needed] -> [n, channels, *extents of halo.own].

    Args:
        halo: The boxes of this rank.
        gradient: Gradient of the needed part.
        exchange: The exchange that receives the other ranks' gradients; ``None`` if there are none to add.
    """
    if halo.own == halo.needed and not halo.sends:
        own_gradient = gradient
    else:
        own_gradient = empty_box(gradient, halo.own).zero_()
        overlap = box_intersection(halo.own, halo.needed)
        if box_volume(overlap):
            box_view(own_gradient, overlap, halo.own).copy_(box_view(gradient, overlap, halo.needed))
    if exchange is not None:
        for message, tensor in zip(halo.sends, exchange.wait(), strict=True):
            box_view(own_gradient, message.box, halo.own).add_(tensor)
    return own_gradient


class _GatherFunction(torch.autograd.Function):
    """Assembles all ranks' parts; keeps nothing for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boxes: list[Box], image: Box, group: RankGroup) -> Tensor:
        ctx.own, ctx.image = boxes[group.place], image
        # The first rank has the largest part in every dim; all parts are padded to it.
        largest = _at_origin(boxes[0])
        padded = x.contiguous()
        if box_volume(ctx.own) < box_volume(largest):
            padded = x.new_zeros((*x.shape[:2], *map(len, largest)))
            box_view(padded, _at_origin(ctx.own), largest).copy_(x)
        whole = x.new_empty((*x.shape[:2], *map(len, image)))
        for box, part in zip(boxes, all_gather_equal_parts(padded, group), strict=True):
            box_view(whole, box, image).copy_(box_view(part, _at_origin(box), largest))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return box_view(gradient, ctx.own, ctx.image).contiguous(), None, None, None


def _at_origin(box: Box) -> Box:
    return tuple(range(len(extent)) for extent in box)


class GatherFeatureMaps(nn.Module):
    """[n, channels, *own extents] -> [n, channels, *extents], the same on all ranks."""

    def __init__(self, grid: SpatialGrid, extents: tuple[int, ...]) -> None:
        super().__init__()
        self._boxes = [owned_box(extents, grid.grid, rank) for rank in range(grid.group.size)]
        self._image: Box = tuple(range(extent) for extent in extents)
        self._group = grid.group

    def forward(self, x: Tensor) -> Tensor:
        check_own_extents(x, self._boxes[self._group.place])
        whole: Tensor = _GatherFunction.apply(x, self._boxes, self._image, self._group)  # type: ignore[no-untyped-call]
        return whole


class _GlobalMeanFunction(torch.autograd.Function):
    """The mean over all positions of all parts; keeps nothing for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: RankGroup) -> Tensor:
        ctx.shape, ctx.count = x.shape, count
        dims = tuple(range(2, x.dim()))
        total = x.sum(dims, keepdim=True, dtype=None if x.dtype == torch.float64 else torch.float32)
        dist.all_reduce(total, group=group.members())
        return (total / count).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient / ctx.count).expand(ctx.shape), None, None


class SpatialGlobalPool(nn.Module):
    """Replaces an adaptive average pool to one position: [n, channels, *own extents] -> [n, channels, 1 ...]."""

    def __init__(self, grid: SpatialGrid, extents: tuple[int, ...]) -> None:
        super().__init__()
        self._count = math.prod(extents)
        self._group = grid.group

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = _GlobalMeanFunction.apply(x, self._count, self._group)  # type: ignore[no-untyped-call]
        return mean
