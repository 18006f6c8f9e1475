"""Collectives on activations whose channels (dim 1) are shared by a group.

A rank's part has shape [n, own channels, ...], the whole [n, channels, ...]. Parts may be uneven; what is passed to a
collective is padded to the largest, because gloo takes equal ones only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.worker.groups import Group

# torch 2.13 renamed them and warns of the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Shares(NamedTuple):
    """Which channels of a tensor each rank of a group has: ``extents`` in the group's order."""

    group: Group
    extents: tuple[int, ...]

    @property
    def own(self) -> range:
        """This rank's channels."""
        start = sum(self.extents[: self.group.place])
        return range(start, start + self.extents[self.group.place])

    @property
    def is_even(self) -> bool:
        """Whether all ranks have as many."""
        return min(self.extents) == max(self.extents)


def narrowed(whole: Tensor, shares: Shares) -> Tensor:
    """This rank's part of ``whole``, a view."""
    return whole.narrow(1, shares.own.start, len(shares.own))


def all_gathered(part: Tensor, shares: Shares) -> Tensor:
    """The whole, from everybody's part."""
    size, widest = shares.group.size, max(shares.extents)
    shape = [part.shape[0], widest, *part.shape[2:]]
    padded = part.contiguous()
    if part.shape[1] < widest:
        padded = part.new_zeros(shape)
        padded.narrow(1, 0, part.shape[1]).copy_(part)
    # Of shape [ranks, n, channels, ...]: the ranks' parts lie side by side only after they were copied together.
    gathered = part.new_empty([size * shape[0], *shape[1:]])
    _all_gather(gathered, padded, group=shares.group.members())
    return torch.cat(
        [one.narrow(1, 0, extent) for one, extent in zip(gathered.chunk(size), shares.extents, strict=True)], dim=1
    )


def all_reduced(whole: Tensor, shares: Shares) -> Tensor:
    """The sum of everybody's ``whole``."""
    total = whole.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=shares.group.members())
    return total


def reduce_scattered(whole: Tensor, shares: Shares) -> Tensor:
    """This rank's part of the sum of everybody's ``whole``."""
    size, widest = shares.group.size, max(shares.extents)
    shape = [whole.shape[0], widest, *whole.shape[2:]]
    make = whole.new_empty if shares.is_even else whole.new_zeros
    parts = make([size * shape[0], *shape[1:]])
    for place, part in zip(parts.chunk(size), torch.split(whole, list(shares.extents), dim=1), strict=True):
        place.narrow(1, 0, part.shape[1]).copy_(part)
    own = whole.new_empty(shape)
    _reduce_scatter(own, parts, group=shares.group.members())
    return own if shares.is_even else own.narrow(1, 0, len(shares.own)).contiguous()
