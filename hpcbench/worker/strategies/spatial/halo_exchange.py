"""Halo exchange between the ranks that share feature maps, and the gather into whole feature maps.

All ranks compute the same loss after the gather, so its backward pass needs no communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.errors import WorkerError
from hpcbench.parallel.strategies.halo import (
    Box,
    Halo,
    HaloLayer,
    HaloMessage,
    box_intersection,
    box_volume,
    compute_halo,
    owned_box,
)
from hpcbench.worker.distributed.process_groups import RankGroup

_CHANNELS_LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class SpatialGrid(NamedTuple):
    """How feature maps are shared by the ranks of a group."""

    group: RankGroup
    grid: tuple[int, ...]

    def halo(self, layer: HaloLayer) -> Halo:
        """This rank's part in ``layer``."""
        return compute_halo(layer, self.grid, self.group.place)


def box_view(tensor: Tensor, box: Box, origin: Box) -> Tensor:
    """The view of ``tensor`` [n, channels, *extents of origin] that holds ``box``."""
    for dim, (wanted, held) in enumerate(zip(box, origin, strict=True), start=2):
        tensor = tensor.narrow(dim, wanted.start - held.start, len(wanted))
    return tensor


def empty_box(like: Tensor, box: Box, channels: int | None = None) -> Tensor:
    """[n, channels, *extents of box] in the memory format of ``like``, not filled."""
    shape = (like.shape[0], channels or like.shape[1], *(len(one) for one in box))
    layout = _CHANNELS_LAST_FORMATS[like.dim()]
    is_last = like.is_contiguous(memory_format=layout) and not like.is_contiguous()
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=layout if is_last else torch.contiguous_format
    )


def check_own_extents(x: Tensor, own: Box) -> None:
    """Raise ``WorkerError`` (``unsupported``) where ``x`` is not this rank's part: something moved positions."""
    expected = tuple(len(one) for one in own)
    if tuple(x.shape[2:]) != expected:
        raise WorkerError(
            f"a layer that is cut got {list(x.shape)}, not {list(expected)} positions: the model moves them between "
            "its layers",
            status="unsupported",
            hint="let options.until end the cut part before that block",
        )


def all_gather_equal_parts(own: Tensor, group: RankGroup) -> Tensor:
    """[ranks, *shape of own], every rank's; all of them have one shape."""
    parts = own.new_empty((group.size, *own.shape))
    dist.all_gather(list(parts), own, group=group.members())
    return parts


class HaloExchange:
    """Messages under way; ``wait`` before what was received is read.

    Each message is a tensor of its own, because a receive writes all of a buffer.
    """

    def __init__(
        self, cut: SpatialGrid, like: Tensor, sent: Sequence[tuple[int, Tensor]], wanted: Sequence[HaloMessage]
    ) -> None:
        channels = like.shape[1]
        self.received = [
            torch.empty(
                (like.shape[0], channels, *(len(one) for one in message.box)), dtype=like.dtype, device=like.device
            )
            for message in wanted
        ]
        group = cut.group.members()
        # Kept until the end: a message may leave after this call.
        self._sent = [(place, tensor.contiguous()) for place, tensor in sent]
        calls = [
            *(dist.P2POp(dist.isend, tensor, cut.group.global_rank(place), group) for place, tensor in self._sent),
            *(
                dist.P2POp(dist.irecv, tensor, cut.group.global_rank(message.place), group)
                for message, tensor in zip(wanted, self.received, strict=True)
            ),
        ]
        self._works = dist.batch_isend_irecv(calls) if calls else []

    def wait(self) -> list[Tensor]:
        """What came in, in the order of what was wanted."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self.received


def send_halo(cut: SpatialGrid, needs: Halo, own: Tensor) -> HaloExchange:
    """Ask for what is needed of others, and give them what they need."""
    return HaloExchange(
        cut, own, [(one.place, box_view(own, one.box, needs.own)) for one in needs.sends], needs.receives
    )


def send_halo_gradient(cut: SpatialGrid, needs: Halo, gradient: Tensor) -> HaloExchange:
    """The way back: gradients of what was received go to its owner. ``gradient`` is that of what is needed."""
    sent = [(one.place, box_view(gradient, one.box, needs.needed)) for one in needs.receives]
    return HaloExchange(cut, gradient, sent, needs.sends)


def assemble_input(own: Tensor, received: Sequence[Tensor], needs: Halo, box: Box, image: Box, fill: float) -> Tensor:
    """What is needed of ``box``, side by side: own, received, and ``fill`` beyond the image."""
    if box == needs.own:
        return own
    whole = empty_box(own, box)
    if box_intersection(box, image) != box:
        whole.fill_(fill)
    parts = [(needs.own, own), *((one.box, tensor) for one, tensor in zip(needs.receives, received, strict=True))]
    for at, tensor in parts:
        both = box_intersection(at, box)
        if box_volume(both):
            box_view(whole, both, box).copy_(box_view(tensor, both, at))
    return whole


def assemble_own_gradient(needs: Halo, gradient: Tensor, exchange: HaloExchange | None) -> Tensor:
    """The gradient of what is owned: from the own outputs, and from those of the ranks that it was sent to."""
    if needs.own == needs.needed and not needs.sends:
        found = gradient
    else:
        found = empty_box(gradient, needs.own).zero_()
        both = box_intersection(needs.own, needs.needed)
        if box_volume(both):
            box_view(found, both, needs.own).copy_(box_view(gradient, both, needs.needed))
    if exchange is not None:
        for message, tensor in zip(needs.sends, exchange.wait(), strict=True):
            box_view(found, message.box, needs.own).add_(tensor)
    return found


class _GatherFunction(torch.autograd.Function):
    """All parts side by side; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boxes: list[Box], image: Box, group: RankGroup) -> Tensor:
        ctx.own, ctx.image = boxes[group.place], image
        # The first place has the largest share of every dim; all send as much.
        widest = tuple(range(len(one)) for one in boxes[0])
        sent = x.contiguous()
        if box_volume(ctx.own) < box_volume(widest):
            sent = x.new_zeros((*x.shape[:2], *(len(one) for one in widest)))
            box_view(sent, tuple(range(len(one)) for one in ctx.own), widest).copy_(x)
        parts = all_gather_equal_parts(sent, group)
        whole = x.new_empty((*x.shape[:2], *(len(one) for one in image)))
        for box, received in zip(boxes, parts, strict=True):
            box_view(whole, box, image).copy_(box_view(received, tuple(range(len(one)) for one in box), widest))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return box_view(gradient, ctx.own, ctx.image).contiguous(), None, None, None


class GatherFeatureMaps(nn.Module):
    """[n, channels, *own extents] -> [n, channels, *extents], the same on all ranks."""

    def __init__(self, cut: SpatialGrid, extents: tuple[int, ...]) -> None:
        super().__init__()
        self._boxes = [owned_box(extents, cut.grid, place) for place in range(cut.group.size)]
        self._image: Box = tuple(range(extent) for extent in extents)
        self._group = cut.group

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        check_own_extents(x, self._boxes[self._group.place])
        whole: Tensor = _GatherFunction.apply(x, self._boxes, self._image, self._group)  # type: ignore[no-untyped-call]
        return whole


class _GlobalMeanFunction(torch.autograd.Function):
    """The mean over all positions of all parts; keeps nothing."""

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
    """In place of an adaptive average pool to one position: [n, channels, *own extents] -> [n, channels, 1 ...]."""

    def __init__(self, cut: SpatialGrid, extents: tuple[int, ...]) -> None:
        super().__init__()
        self._count = box_volume(tuple(range(extent) for extent in extents))
        self._group = cut.group

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        mean: Tensor = _GlobalMeanFunction.apply(x, self._count, self._group)  # type: ignore[no-untyped-call]
        return mean
