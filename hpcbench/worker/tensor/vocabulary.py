"""Embedding, output layer and loss of which a rank has some words (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.autograd import Function

from hpcbench.parallel.shard import even_ranges
from hpcbench.worker.groups import Group
from hpcbench.worker.models.gpt import Embedding, TokenHead
from hpcbench.worker.strategies.model_parallel import Shard, gathered
from hpcbench.worker.tensor.collectives import Sharing
from hpcbench.worker.tensor.draws import OwnDropout
from hpcbench.worker.tensor.layers import ColumnLinear, extents, part_of


class SplitWords(nn.Embedding):
    """The vectors of some words, zero for all others."""

    def __init__(self, whole: nn.Embedding, ranges: list[range], place: int) -> None:
        self.own = ranges[place]
        super().__init__(len(self.own), whole.embedding_dim, device="meta")
        self.weight = part_of(whole.weight, 0, self.own)
        self.shards = {"weight": Shard(0, extents(ranges))}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """[n, tokens] -> [n, tokens, width], to be summed over the ranks."""
        place = input - self.own.start
        is_foreign = (place < 0) | (place >= len(self.own))
        vectors = F.embedding(place.masked_fill(is_foreign, 0), self.weight)
        return vectors.masked_fill(is_foreign.unsqueeze(-1), 0.0)


class SplitEmbedding(Embedding):
    """[n, tokens] -> [n, tokens or own tokens, width]."""

    def __init__(self, whole: Embedding, sharing: Sharing) -> None:
        nn.Module.__init__(self)
        self.sharing = sharing
        ranges = even_ranges(whole.tokens.num_embeddings, sharing.group.size)
        self.tokens = SplitWords(whole.tokens, ranges, sharing.group.place)
        self.positions = whole.positions
        self.dropout = whole.dropout
        if sharing.by_tokens:
            self.positions.partial_gradients = ("weight",)  # type: ignore[assignment]
            self.dropout = OwnDropout(whole.dropout, sharing.group.place)

    def forward(self, x: Tensor) -> Tensor:
        """One collective after the words."""
        self.sharing.tokens = x.shape[1]
        own = self.sharing.own_tokens if self.sharing.by_tokens else range(x.shape[1])
        vectors = self.sharing.leave(self.tokens(x))
        return self.dropout(vectors + self.positions.weight[own.start : own.stop])  # type: ignore[no-any-return]


class SplitTokenHead(TokenHead):
    """The scores of some words: [n, tokens or own tokens, width] -> [n, tokens, own words].

    In eval mode the scores of all words.
    """

    def __init__(self, whole: TokenHead, sharing: Sharing) -> None:
        nn.Module.__init__(self)
        self.sharing = sharing
        self.ranges = even_ranges(whole.output.out_features, sharing.group.size)
        self.norm = whole.norm
        self.output = ColumnLinear(whole.output, self.ranges, sharing.group.place)
        if sharing.by_tokens:
            self.norm.partial_gradients = ("weight", "bias")  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """One collective before the output layer."""
        scores: Tensor = self.output(self.sharing.enter(self.norm(x)))
        if self.training:
            return scores
        return gathered(scores, Shard(scores.dim() - 1, extents(self.ranges)), self.sharing.group)


def split_losses(outputs: Tensor, targets: Tensor, own: range, group: Group) -> Tensor:
    """As ``losses.sample_losses`` of tokens, from the scores of the ``own`` words: [n, length, own words].

    Nobody holds the scores of all words: the ranks share, for every position, the largest one, the sum of the
    exponentials, and the target's.
    """
    wide = outputs if outputs.dtype == torch.float64 else outputs.float()
    each: Tensor = _SplitCrossEntropy.apply(wide.flatten(0, 1), targets.flatten(), own, group)  # type: ignore[no-untyped-call]
    return each.sum() / targets.shape[1]


class _SplitCrossEntropy(Function):
    """Of scores [positions, own words] and targets [positions]: the loss of every position."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, own: range, group: Group) -> Tensor:
        largest = scores.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group.members())
        place = targets - own.start
        is_foreign = (place < 0) | (place >= len(own))
        place = place.masked_fill(is_foreign, 0)
        shifted = scores - largest.unsqueeze(1)
        of_target = shifted.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(is_foreign, 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=1), of_target])
        dist.all_reduce(sums, group=group.members())
        total, of_target = sums
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), place, is_foreign)
        losses: Tensor = total.log() - of_target
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, place, is_foreign = ctx.saved_tensors
        each = gradients[0].unsqueeze(1)
        # As large as the scores themselves: the gradient takes their place.
        found = probabilities.mul_(each)
        found.scatter_add_(1, place.unsqueeze(1), -each.masked_fill(is_foreign.unsqueeze(1), 0.0))
        return found, None, None, None
