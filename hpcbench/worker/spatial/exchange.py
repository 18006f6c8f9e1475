"""Halos on their way: what a rank's own part of a feature map lacks, from those who own it, and gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.errors import WorkerError
from hpcbench.parallel.halo import Box, Halo, Layer, Message, halo, shared, volume
from hpcbench.worker.groups import Group

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Cut(NamedTuple):
    """How feature maps are shared by the ranks of a group."""

    group: Group
    grid: tuple[int, ...]

    def halo(self, layer: Layer) -> Halo:
        """This rank's part in ``layer``."""
        return halo(layer, self.grid, self.group.place)


def part(tensor: Tensor, box: Box, origin: Box) -> Tensor:
    """The view of ``tensor`` [n, channels, *extents of origin] that holds ``box``."""
    for dim, (wanted, held) in enumerate(zip(box, origin, strict=True), start=2):
        tensor = tensor.narrow(dim, wanted.start - held.start, len(wanted))
    return tensor


def empty(like: Tensor, box: Box, channels: int | None = None) -> Tensor:
    """[n, channels, *extents of box] in the memory format of ``like``, not filled."""
    shape = (like.shape[0], channels or like.shape[1], *(len(one) for one in box))
    layout = _CHANNELS_LAST[like.dim()]
    is_last = like.is_contiguous(memory_format=layout) and not like.is_contiguous()
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=layout if is_last else torch.contiguous_format
    )


def check(x: Tensor, own: Box) -> None:
    """Raise ``WorkerError`` (``unsupported``) where ``x`` is not this rank's part: something moved positions."""
    expected = tuple(len(one) for one in own)
    if tuple(x.shape[2:]) != expected:
        raise WorkerError(
            f"a layer that is cut got {list(x.shape)}, not {list(expected)} positions: the model moves them between "
            "its layers",
            status="unsupported",
            hint="let options.until end the cut part before that block",
        )


def gathered_parts(own: Tensor, group: Group) -> Tensor:
    """[ranks, *shape of own], every rank's; all of them have one shape."""
    parts = own.new_empty((group.size, *own.shape))
    dist.all_gather(list(parts), own, group=group.members())
    return parts


class Exchange:
    """Messages under way; ``wait`` before what was received is read.

    Each message is a tensor of its own, because a receive writes all of a buffer.
    """

    def __init__(self, cut: Cut, like: Tensor, sent: Sequence[tuple[int, Tensor]], wanted: Sequence[Message]) -> None:
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


def send_halo(cut: Cut, needs: Halo, own: Tensor) -> Exchange:
    """Ask for what is needed of others, and give them what they need."""
    return Exchange(cut, own, [(one.place, part(own, one.box, needs.own)) for one in needs.sends], needs.receives)


def return_halo(cut: Cut, needs: Halo, gradient: Tensor) -> Exchange:
    """The way back: gradients of what was received go to its owner. ``gradient`` is that of what is needed."""
    sent = [(one.place, part(gradient, one.box, needs.needed)) for one in needs.receives]
    return Exchange(cut, gradient, sent, needs.sends)


def assembled(own: Tensor, received: Sequence[Tensor], needs: Halo, box: Box, image: Box, fill: float) -> Tensor:
    """What is needed of ``box``, side by side: own, received, and ``fill`` beyond the image."""
    if box == needs.own:
        return own
    whole = empty(own, box)
    if shared(box, image) != box:
        whole.fill_(fill)
    parts = [(needs.own, own), *((one.box, tensor) for one, tensor in zip(needs.receives, received, strict=True))]
    for at, tensor in parts:
        both = shared(at, box)
        if volume(both):
            part(whole, both, box).copy_(part(tensor, both, at))
    return whole


def own_gradient(needs: Halo, gradient: Tensor, exchange: Exchange | None) -> Tensor:
    """The gradient of what is owned: from the own outputs, and from those of the ranks that it was sent to."""
    if needs.own == needs.needed and not needs.sends:
        found = gradient
    else:
        found = empty(gradient, needs.own).zero_()
        both = shared(needs.own, needs.needed)
        if volume(both):
            part(found, both, needs.own).copy_(part(gradient, both, needs.needed))
    if exchange is not None:
        for message, tensor in zip(needs.sends, exchange.wait(), strict=True):
            part(found, message.box, needs.own).add_(tensor)
    return found
