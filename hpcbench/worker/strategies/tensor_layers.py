"""Transformer layers split over a tensor-parallel group, their differentiable collectives and rank-local random
numbers.

The collectives are f and g of Shoeybi et al. 2019 (figure 3) and their sequence-parallel counterparts of Korthikanti et
al. 2022 (figure 5). Activations are [n, tokens, width]. In a group of one rank a collective returns its argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.mesh import even_ranges
from hpcbench.parallel.strategies.tensor import head_feature_ranges
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.models.transformer import Attention, Mlp, TransformerBlock
from hpcbench.worker.strategies.model_parallel import TensorSharding, gather_shards

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Torch 2.13 renames it, and warns of the old name."""

_TOKEN_DIM = 1
"""The dim of an activation's tokens."""


@dataclass
class TensorParallelComm:
    """How the ranks of a group share a replica's activations between split layers."""

    group: RankGroup
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
        lower = cast_for_autocast(x)
        return _apply_function(_GatherFromSequence if self.by_tokens else _CopyToModelParallel, lower, self)

    def leave(self, partial: Tensor) -> Tensor:
        """After row layers: the ranks' sum, of the own tokens or of all. ``partial`` is taken over, not copied."""
        return _apply_function(_ReduceScatterToSequence if self.by_tokens else _ReduceFromModelParallel, partial, self)

    def part(self, x: Tensor) -> Tensor:
        """The own tokens of what all ranks hold alike."""
        self.tokens = x.shape[_TOKEN_DIM]
        return _apply_function(_ScatterToSequence, x, self)

    def join(self, x: Tensor) -> Tensor:
        """All tokens, for what all ranks compute alike."""
        return _apply_function(_GatherToReplicated, x, self)


def cast_for_autocast(x: Tensor) -> Tensor:
    """``x`` in the type in which autocast will multiply it, so that it is sent in that, and so is its gradient."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _apply_function(function: type[Function], x: Tensor, sharing: TensorParallelComm) -> Tensor:
    if sharing.group.size == 1:
        return x
    done: Tensor = function.apply(x, sharing)  # type: ignore[no-untyped-call]
    return done


class _CopyToModelParallel(Function):
    """Nothing forward, all_reduce backward: f of Megatron."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: TensorParallelComm) -> Tensor:
        ctx.group = sharing.group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Autograd may hand one gradient to several nodes, so it is not summed in place.
        return _all_reduce_in_place(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromModelParallel(Function):
    """all_reduce forward, nothing backward: g of Megatron."""

    @staticmethod
    def forward(_ctx: Any, partial: Tensor, sharing: TensorParallelComm) -> Tensor:
        return _all_reduce_in_place(partial.detach().contiguous(), sharing.group)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherFromSequence(Function):
    """all_gather forward, reduce_scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: TensorParallelComm) -> Tensor:
        ctx.group, ctx.extents = sharing.group, sharing.extents
        return gather_shards(x, TensorSharding(_TOKEN_DIM, ctx.extents), ctx.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_tokens(gradients[0], ctx.extents, ctx.group), None


class _ReduceScatterToSequence(Function):
    """reduce_scatter forward, all_gather backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, sharing: TensorParallelComm) -> Tensor:
        ctx.group, ctx.extents = sharing.group, sharing.extents
        return _reduce_scatter_tokens(partial, ctx.extents, ctx.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather_shards(gradients[0], TensorSharding(_TOKEN_DIM, ctx.extents), ctx.group), None


class _ScatterToSequence(Function):
    """The own tokens forward, all_gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: TensorParallelComm) -> Tensor:
        ctx.group, ctx.extents = sharing.group, sharing.extents
        own = sharing.own_tokens
        return x.narrow(_TOKEN_DIM, own.start, len(own)).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather_shards(gradients[0], TensorSharding(_TOKEN_DIM, ctx.extents), ctx.group), None


class _GatherToReplicated(Function):
    """all_gather forward, the own tokens backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: TensorParallelComm) -> Tensor:
        ctx.own = sharing.own_tokens
        return gather_shards(x, TensorSharding(_TOKEN_DIM, sharing.extents), sharing.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(_TOKEN_DIM, ctx.own.start, len(ctx.own)).contiguous(), None


def _all_reduce_in_place(own: Tensor, group: RankGroup) -> Tensor:
    """The sum over the group, in place."""
    dist.all_reduce(own, group=group.members())
    return own


def _reduce_scatter_tokens(partial: Tensor, extents: tuple[int, ...], group: RankGroup) -> Tensor:
    """The group's sum of the own tokens; parts are padded to the largest one's extent."""
    widest = max(extents)
    parts = torch.split(partial, list(extents), _TOKEN_DIM)
    if min(extents) == widest:
        stacked = torch.stack(parts)
    else:
        first = parts[0]
        stacked = first.new_zeros(len(parts), *first.shape)
        for row, part in zip(stacked, parts, strict=True):
            row.narrow(_TOKEN_DIM, 0, part.shape[_TOKEN_DIM]).copy_(part)
    own = torch.empty_like(stacked[0])
    _reduce_scatter(own, stacked.flatten(0, 1), group=group.members())
    return own.narrow(_TOKEN_DIM, 0, extents[group.place])


@contextmanager
def rank_local_rng(place: int, device: torch.device) -> Iterator[None]:
    """Within it, the device's generator draws what the rank at ``place`` alone draws.

    Outside the ranks' generators stay alike, which is what makes masks of replicated activations alike. The seed is
    itself drawn, so a recomputation (which begins with the generators as they were) draws the same again.
    """
    seed = int(torch.randint(2**62, ()).item())
    generator = (
        torch.cuda.default_generators[_device_index(device)] if device.type == "cuda" else torch.default_generator
    )
    kept = generator.get_state()
    generator.manual_seed(seed + place)
    try:
        yield
    finally:
        generator.set_state(kept)


def _device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class RankLocalDropout(nn.Dropout):
    """Of activations of which every rank holds its own tokens."""

    def __init__(self, whole: nn.Dropout, place: int) -> None:
        super().__init__(whole.p)
        self.place = place

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """Any shape."""
        if not self.training or self.p == 0:
            return input
        with rank_local_rng(self.place, input.device):
            return F.dropout(input, self.p)


def slice_parameter(whole: Tensor, dim: int, own: range) -> nn.Parameter:
    """A copy of the ``own`` rows or columns, so that the whole can be let go."""
    return nn.Parameter(whole.detach().narrow(dim, own.start, len(own)).clone(), whole.requires_grad)


def range_lengths(ranges: Sequence[range]) -> tuple[int, ...]:
    """Their lengths."""
    return tuple(len(one) for one in ranges)


class ColumnLinear(nn.Linear):
    """Some output features of a linear layer. What goes in is whole; the gradient for it is a partial sum."""

    def __init__(self, whole: nn.Linear, ranges: Sequence[range], place: int) -> None:
        own = ranges[place]
        # On the meta device nothing is drawn: the ranks' generators stay alike, whatever the shapes of their parts.
        super().__init__(whole.in_features, len(own), bias=whole.bias is not None, device="meta")
        self.weight = slice_parameter(whole.weight, 0, own)
        self.shards = {"weight": TensorSharding(0, range_lengths(ranges))}
        if whole.bias is not None:
            self.bias = slice_parameter(whole.bias, 0, own)
            self.shards["bias"] = TensorSharding(0, range_lengths(ranges))


class RowLinear(nn.Linear):
    """Some input features of a linear layer; the bias is added once, to the ranks' sum."""

    def __init__(self, whole: nn.Linear, ranges: Sequence[range], sharing: TensorParallelComm) -> None:
        own = ranges[sharing.group.place]
        super().__init__(len(own), whole.out_features, bias=whole.bias is not None, device="meta")
        self.sharing = sharing
        self.weight = slice_parameter(whole.weight, 1, own)
        self.bias = whole.bias
        self.shards = {"weight": TensorSharding(1, range_lengths(ranges))}
        self.partial_gradients = ("bias",) if sharing.by_tokens and whole.bias is not None else ()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """[n, tokens, own features] -> [n, tokens or own tokens, features]."""
        total = self.sharing.leave(F.linear(input, self.weight))
        return total if self.bias is None else total + self.bias.to(total.dtype)


class TensorParallelAttention(Attention):
    """Some heads of an attention. [n, tokens or own tokens, width] -> the same shape."""

    def __init__(self, whole: Attention, sharing: TensorParallelComm) -> None:
        nn.Module.__init__(self)
        self.sharing = sharing
        self.head_width, self.causal, self.dropout = whole.head_width, whole.causal, whole.dropout
        ranks, place = sharing.group.size, sharing.group.place
        ranges = head_feature_ranges(whole.query.out_features // whole.head_width, whole.head_width, ranks)
        self.query = ColumnLinear(whole.query, ranges, place)
        self.key = ColumnLinear(whole.key, ranges, place)
        self.value = ColumnLinear(whole.value, ranges, place)
        self.output = RowLinear(whole.output, ranges, sharing)

    def forward(self, x: Tensor) -> Tensor:
        """One collective for queries, keys and values together."""
        draws = self.training and self.dropout.p > 0
        with rank_local_rng(self.sharing.group.place, x.device) if draws else nullcontext():
            return super().forward(self.sharing.enter(x))


class TensorParallelMlp(Mlp):
    """Some inner features of an MLP. [n, tokens or own tokens, width] -> the same shape."""

    def __init__(self, whole: Mlp, sharing: TensorParallelComm) -> None:
        nn.Module.__init__(self)
        self.sharing = sharing
        ranges = even_ranges(whole.up.out_features, sharing.group.size)
        self.up = ColumnLinear(whole.up, ranges, sharing.group.place)
        self.down = RowLinear(whole.down, ranges, sharing)

    def forward(self, x: Tensor) -> Tensor:
        """One collective before, one after."""
        return super().forward(self.sharing.enter(x))


def split_transformer_blocks(models: Iterable[nn.Sequential], sharing: TensorParallelComm, spec: RunSpec) -> None:
    """Replace attention and MLP of every transformer block in ``models`` by this rank's part of it.

    ``WorkerError`` (``unsupported``) where a block has fewer heads than there are ranks.
    """
    for block in (block for model in models for block in model):
        if not isinstance(block, TransformerBlock):
            continue
        heads = block.attention.query.out_features // block.attention.head_width
        if heads < sharing.group.size:
            raise WorkerError(
                f"a transformer block of {spec.model} has {heads} heads, tp_degree is {spec.tp_degree}",
                status="unsupported",
                hint=f"set tp_degree to at most {heads}",
            )
        block.attention, block.mlp = (
            TensorParallelAttention(block.attention, sharing),
            TensorParallelMlp(block.mlp, sharing),
        )
