"""Collectives that gradients pass, too: each is one direction's operation and the other's in one function.

The pairs are f and g of Shoeybi et al. 2019 (figure 3), and their counterparts over tokens of Korthikanti et al. 2022
(figure 5). Activations are [n, tokens, width]. Without a second rank all of them hand their argument on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hpcbench.parallel.shard import even_ranges
from hpcbench.worker.groups import Group
from hpcbench.worker.strategies.model_parallel import Shard, gathered

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Torch 2.13 renames it, and warns of the old name."""

_TOKENS = 1
"""The dim of an activation's tokens."""


@dataclass
class Sharing:
    """How the ranks of a group share a replica's activations between split layers."""

    group: Group
    by_tokens: bool
    """Each holds its own tokens (sequence parallelism); otherwise all hold all."""
    tokens: int = 0
    """Of the samples that are under way: what the parts add up to. Set where they are parted."""

    @property
    def extents(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(len(one) for one in even_ranges(self.tokens, self.group.size))

    @property
    def own_tokens(self) -> range:
        """Of this rank."""
        return even_ranges(self.tokens, self.group.size)[self.group.place]

    def enter(self, x: Tensor) -> Tensor:
        """Before column layers: whole activations, whose gradients are partial sums."""
        lower = lowered(x)
        return _apply(_GatherToPartial if self.by_tokens else _CopyToPartial, lower, self)

    def leave(self, partial: Tensor) -> Tensor:
        """After row layers: the ranks' sum, of the own tokens or of all. ``partial`` is taken over, not copied."""
        return _apply(_ScatterSum if self.by_tokens else _Sum, partial, self)

    def part(self, x: Tensor) -> Tensor:
        """The own tokens of what all ranks hold alike."""
        self.tokens = x.shape[_TOKENS]
        return _apply(_Part, x, self)

    def join(self, x: Tensor) -> Tensor:
        """All tokens, for what all ranks compute alike."""
        return _apply(_Join, x, self)


def lowered(x: Tensor) -> Tensor:
    """``x`` in the type in which autocast will multiply it, so that it is sent in that, and so is its gradient."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _apply(function: type[Function], x: Tensor, sharing: Sharing) -> Tensor:
    if sharing.group.size == 1:
        return x
    done: Tensor = function.apply(x, sharing)  # type: ignore[no-untyped-call]
    return done


class _CopyToPartial(Function):
    """Nothing forward, all_reduce backward: f of Megatron."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing) -> Tensor:
        ctx.group = sharing.group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Autograd may hand one gradient to several nodes, so it is not summed in place.
        return _summed(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _Sum(Function):
    """all_reduce forward, nothing backward: g of Megatron."""

    @staticmethod
    def forward(_ctx: Any, partial: Tensor, sharing: Sharing) -> Tensor:
        return _summed(partial.detach().contiguous(), sharing.group)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherToPartial(Function):
    """all_gather forward, reduce_scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing) -> Tensor:
        ctx.group, ctx.extents = sharing.group, sharing.extents
        return gathered(x, Shard(_TOKENS, ctx.extents), ctx.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _scattered_sum(gradients[0], ctx.extents, ctx.group), None


class _ScatterSum(Function):
    """reduce_scatter forward, all_gather backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, sharing: Sharing) -> Tensor:
        ctx.group, ctx.extents = sharing.group, sharing.extents
        return _scattered_sum(partial, ctx.extents, ctx.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], Shard(_TOKENS, ctx.extents), ctx.group), None


class _Part(Function):
    """The own tokens forward, all_gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing) -> Tensor:
        ctx.group, ctx.extents = sharing.group, sharing.extents
        own = sharing.own_tokens
        return x.narrow(_TOKENS, own.start, len(own)).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], Shard(_TOKENS, ctx.extents), ctx.group), None


class _Join(Function):
    """all_gather forward, the own tokens backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing) -> Tensor:
        ctx.own = sharing.own_tokens
        return gathered(x, Shard(_TOKENS, sharing.extents), sharing.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(_TOKENS, ctx.own.start, len(ctx.own)).contiguous(), None


def _summed(own: Tensor, group: Group) -> Tensor:
    """The sum over the group, in place."""
    dist.all_reduce(own, group=group.members())
    return own


def _scattered_sum(partial: Tensor, extents: tuple[int, ...], group: Group) -> Tensor:
    """The group's sum of the own tokens; parts are padded to the largest one's extent."""
    widest = max(extents)
    parts = torch.split(partial, list(extents), _TOKENS)
    if min(extents) == widest:
        stacked = torch.stack(parts)
    else:
        first = parts[0]
        stacked = first.new_zeros(len(parts), *first.shape)
        for row, part in zip(stacked, parts, strict=True):
            row.narrow(_TOKENS, 0, part.shape[_TOKENS]).copy_(part)
    own = torch.empty_like(stacked[0])
    _reduce_scatter(own, stacked.flatten(0, 1), group=group.members())
    return own.narrow(_TOKENS, 0, extents[group.place])
