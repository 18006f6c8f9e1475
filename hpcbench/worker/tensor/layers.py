"""Attention and MLP of which a rank has some heads and features (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.shard import even_ranges
from hpcbench.parallel.tensor import head_ranges
from hpcbench.worker.models.transformer import Attention, Mlp, TransformerBlock
from hpcbench.worker.strategies.model_parallel import Shard
from hpcbench.worker.tensor.collectives import Sharing
from hpcbench.worker.tensor.draws import own_draws


def part_of(whole: Tensor, dim: int, own: range) -> nn.Parameter:
    """A copy of the ``own`` rows or columns, so that the whole can be let go."""
    return nn.Parameter(whole.detach().narrow(dim, own.start, len(own)).clone(), whole.requires_grad)


def extents(ranges: Sequence[range]) -> tuple[int, ...]:
    """Their lengths."""
    return tuple(len(one) for one in ranges)


class ColumnLinear(nn.Linear):
    """Some output features of a linear layer. What goes in is whole; the gradient for it is a partial sum."""

    def __init__(self, whole: nn.Linear, ranges: Sequence[range], place: int) -> None:
        own = ranges[place]
        # On the meta device nothing is drawn: the ranks' generators stay alike, whatever the shapes of their parts.
        super().__init__(whole.in_features, len(own), bias=whole.bias is not None, device="meta")
        self.weight = part_of(whole.weight, 0, own)
        self.shards = {"weight": Shard(0, extents(ranges))}
        if whole.bias is not None:
            self.bias = part_of(whole.bias, 0, own)
            self.shards["bias"] = Shard(0, extents(ranges))


class RowLinear(nn.Linear):
    """Some input features of a linear layer; the bias is added once, to the ranks' sum."""

    def __init__(self, whole: nn.Linear, ranges: Sequence[range], sharing: Sharing) -> None:
        own = ranges[sharing.group.place]
        super().__init__(len(own), whole.out_features, bias=whole.bias is not None, device="meta")
        self.sharing = sharing
        self.weight = part_of(whole.weight, 1, own)
        self.bias = whole.bias
        self.shards = {"weight": Shard(1, extents(ranges))}
        self.partial_gradients = ("bias",) if sharing.by_tokens and whole.bias is not None else ()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """[n, tokens, own features] -> [n, tokens or own tokens, features]."""
        total = self.sharing.leave(F.linear(input, self.weight))
        return total if self.bias is None else total + self.bias.to(total.dtype)


class SplitAttention(Attention):
    """Some heads of an attention. [n, tokens or own tokens, width] -> the same shape."""

    def __init__(self, whole: Attention, sharing: Sharing) -> None:
        nn.Module.__init__(self)
        self.sharing = sharing
        self.head_width, self.causal, self.dropout = whole.head_width, whole.causal, whole.dropout
        ranks, place = sharing.group.size, sharing.group.place
        ranges = head_ranges(whole.query.out_features // whole.head_width, whole.head_width, ranks)
        self.query = ColumnLinear(whole.query, ranges, place)
        self.key = ColumnLinear(whole.key, ranges, place)
        self.value = ColumnLinear(whole.value, ranges, place)
        self.output = RowLinear(whole.output, ranges, sharing)

    def forward(self, x: Tensor) -> Tensor:
        """One collective for queries, keys and values together."""
        draws = self.training and self.dropout.p > 0
        with own_draws(self.sharing.group.place, x.device) if draws else nullcontext():
            return super().forward(self.sharing.enter(x))


class SplitMlp(Mlp):
    """Some inner features of an MLP. [n, tokens or own tokens, width] -> the same shape."""

    def __init__(self, whole: Mlp, sharing: Sharing) -> None:
        nn.Module.__init__(self)
        self.sharing = sharing
        ranges = even_ranges(whole.up.out_features, sharing.group.size)
        self.up = ColumnLinear(whole.up, ranges, sharing.group.place)
        self.down = RowLinear(whole.down, ranges, sharing)

    def forward(self, x: Tensor) -> Tensor:
        """One collective before, one after."""
        return super().forward(self.sharing.enter(x))


def split_blocks(models: Iterable[nn.Sequential], sharing: Sharing, spec: RunSpec) -> None:
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
        block.attention, block.mlp = SplitAttention(block.attention, sharing), SplitMlp(block.mlp, sharing)
