"""From cut feature maps to whole ones: where the layers begin that every rank computes alike.

The loss after it is the same on all ranks, so the way back needs no communication: a rank's gradient of its own part is
already there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.parallel.halo import Box, own_box, volume
from hpcbench.worker.groups import Group
from hpcbench.worker.spatial.exchange import Cut, check, gathered_parts, part


class _Gather(torch.autograd.Function):
    """All parts side by side; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boxes: list[Box], image: Box, group: Group) -> Tensor:
        ctx.own, ctx.image = boxes[group.place], image
        # The first place has the largest share of every dim; all send as much.
        widest = tuple(range(len(one)) for one in boxes[0])
        sent = x.contiguous()
        if volume(ctx.own) < volume(widest):
            sent = x.new_zeros((*x.shape[:2], *(len(one) for one in widest)))
            part(sent, tuple(range(len(one)) for one in ctx.own), widest).copy_(x)
        parts = gathered_parts(sent, group)
        whole = x.new_empty((*x.shape[:2], *(len(one) for one in image)))
        for box, received in zip(boxes, parts, strict=True):
            part(whole, box, image).copy_(part(received, tuple(range(len(one)) for one in box), widest))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return part(gradient, ctx.own, ctx.image).contiguous(), None, None, None


class Gather(nn.Module):
    """[n, channels, *own extents] -> [n, channels, *extents], the same on all ranks."""

    def __init__(self, cut: Cut, extents: tuple[int, ...]) -> None:
        super().__init__()
        self._boxes = [own_box(extents, cut.grid, place) for place in range(cut.group.size)]
        self._image: Box = tuple(range(extent) for extent in extents)
        self._group = cut.group

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        check(x, self._boxes[self._group.place])
        whole: Tensor = _Gather.apply(x, self._boxes, self._image, self._group)  # type: ignore[no-untyped-call]
        return whole


class _GlobalMean(torch.autograd.Function):
    """The mean over all positions of all parts; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: Group) -> Tensor:
        ctx.shape, ctx.count = x.shape, count
        dims = tuple(range(2, x.dim()))
        total = x.sum(dims, keepdim=True, dtype=None if x.dtype == torch.float64 else torch.float32)
        dist.all_reduce(total, group=group.members())
        return (total / count).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient / ctx.count).expand(ctx.shape), None, None


class SplitGlobalPool(nn.Module):
    """In place of an adaptive average pool to one position: [n, channels, *own extents] -> [n, channels, 1 ...]."""

    def __init__(self, cut: Cut, extents: tuple[int, ...]) -> None:
        super().__init__()
        self._count = volume(tuple(range(extent) for extent in extents))
        self._group = cut.group

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        mean: Tensor = _GlobalMean.apply(x, self._count, self._group)  # type: ignore[no-untyped-call]
        return mean
