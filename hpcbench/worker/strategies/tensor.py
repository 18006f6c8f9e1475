"""Tensor parallelism of transformers after Megatron (Shoeybi et al. 2019, Korthikanti et al.

2022), vocabulary included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.mesh import RankMesh, even_ranges
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankContext, RankGroup, make_group
from hpcbench.worker.model_execution import summed_loss
from hpcbench.worker.models.gpt import Embedding, TokenHead
from hpcbench.worker.models.transformer import TransformerBlock
from hpcbench.worker.strategies.model_parallel import ModelParallelStrategy, TensorSharding, gather_shards
from hpcbench.worker.strategies.tensor_layers import (
    ColumnLinear,
    RankLocalDropout,
    TensorParallelAttention,
    TensorParallelComm,
    TensorParallelMlp,
    range_lengths,
    slice_parameter,
)


class WordEmbeddingShard(nn.Embedding):
    """The vectors of some words, zero for all others."""

    def __init__(self, whole: nn.Embedding, ranges: list[range], place: int) -> None:
        self.own = ranges[place]
        super().__init__(len(self.own), whole.embedding_dim, device="meta")
        self.weight = slice_parameter(whole.weight, 0, self.own)
        self.shards = {"weight": TensorSharding(0, range_lengths(ranges))}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """[n, tokens] -> [n, tokens, width], to be summed over the ranks."""
        place = input - self.own.start
        is_foreign = (place < 0) | (place >= len(self.own))
        vectors = F.embedding(place.masked_fill(is_foreign, 0), self.weight)
        return vectors.masked_fill(is_foreign.unsqueeze(-1), 0.0)


class VocabularyParallelEmbedding(Embedding):
    """[n, tokens] -> [n, tokens or own tokens, width]."""

    def __init__(self, whole: Embedding, sharing: TensorParallelComm) -> None:
        nn.Module.__init__(self)
        self.sharing = sharing
        ranges = even_ranges(whole.tokens.num_embeddings, sharing.group.size)
        self.tokens = WordEmbeddingShard(whole.tokens, ranges, sharing.group.place)
        self.positions = whole.positions
        self.dropout = whole.dropout
        if sharing.by_tokens:
            self.positions.partial_gradients = ("weight",)  # type: ignore[assignment]
            self.dropout = RankLocalDropout(whole.dropout, sharing.group.place)

    def forward(self, x: Tensor) -> Tensor:
        """One collective after the words."""
        self.sharing.tokens = x.shape[1]
        own = self.sharing.own_tokens if self.sharing.by_tokens else range(x.shape[1])
        vectors = self.sharing.leave(self.tokens(x))
        return self.dropout(vectors + self.positions.weight[own.start : own.stop])  # type: ignore[no-any-return]


class VocabularyParallelHead(TokenHead):
    """The scores of some words: [n, tokens or own tokens, width] -> [n, tokens, own words].

    In eval mode the scores of all words.
    """

    def __init__(self, whole: TokenHead, sharing: TensorParallelComm) -> None:
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
        return gather_shards(scores, TensorSharding(scores.dim() - 1, range_lengths(self.ranges)), self.sharing.group)


def vocabulary_parallel_losses(outputs: Tensor, targets: Tensor, own: range, group: RankGroup) -> Tensor:
    """As ``losses.sample_losses`` of tokens, from the scores of the ``own`` words: [n, length, own words].

    Nobody holds the scores of all words: the ranks share, for every position, the largest one, the sum of the
    exponentials, and the target's.
    """
    wide = outputs if outputs.dtype == torch.float64 else outputs.float()
    each: Tensor = _VocabularyParallelCrossEntropy.apply(wide.flatten(0, 1), targets.flatten(), own, group)  # type: ignore[no-untyped-call]
    return each.sum() / targets.shape[1]


class _VocabularyParallelCrossEntropy(Function):
    """Of scores [positions, own words] and targets [positions]: the loss of every position."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, own: range, group: RankGroup) -> Tensor:
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


class TensorParallelStrategy(ModelParallelStrategy):
    """Heads, inner features and words are shared by the ranks along ``tp``.

    A module whose parameters get the gradients of the rank's own tokens alone names them in ``partial_gradients``.
    """

    axis = "tp"

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        """Partial gradients are summed over the ranks of a replica and over replicas at once."""
        self.everyone = make_group(RankMesh.of(spec), place, "dp", "tp")
        super().setup(model, spec, place)

    def divide(self, model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
        """Raises ``WorkerError`` (``unsupported``) for a user's own model without, or with too small, blocks."""
        self.sharing = TensorParallelComm(self.own, bool(self.options["sequence_parallel"]) and self.own.size > 1)
        self.head: VocabularyParallelHead | None = None
        blocks = [block for block in model if isinstance(block, TransformerBlock)]
        _check_head_counts(blocks, spec)
        if self.options["vocabulary_parallel"] and self.own.size > 1:
            self._split_vocabulary(model)
        for block in blocks:
            self._split_block(block)
        if self.sharing.by_tokens:
            self._part_and_join(model)
        return model

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """From the scores of the own words, where these are split."""
        if self.head is None:
            return summed_loss(outputs, targets)
        return vocabulary_parallel_losses(outputs, targets, self.head.ranges[self.own.place], self.own)

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """Gradients of own tokens among all ranks, all others across replicas."""
        partial = {id(getattr(one, name)) for one in module.modules() for name in getattr(one, "partial_gradients", ())}
        parameters = list(module.parameters())
        parts = [
            ([one for one in parameters if id(one) not in partial], self.groups["dp"]),
            ([one for one in parameters if id(one) in partial], self.everyone),
        ]
        return [GradientReducer(some, group.members()) for some, group in parts if some and group.size > 1]

    def _split_vocabulary(self, model: nn.Sequential) -> None:
        """An embedding and the head after it; a weight that they share stays shared."""
        first, last = model[0], model[-1]
        if not (isinstance(first, Embedding) and isinstance(last, TokenHead)):
            return
        is_tied = first.tokens.weight is last.output.weight
        embedding, self.head = (
            VocabularyParallelEmbedding(first, self.sharing),
            VocabularyParallelHead(last, self.sharing),
        )
        if is_tied:
            self.head.output.weight = embedding.tokens.weight
        model[0], model[-1] = embedding, self.head

    def _split_block(self, block: TransformerBlock) -> None:
        block.attention = TensorParallelAttention(block.attention, self.sharing)
        block.mlp = TensorParallelMlp(block.mlp, self.sharing)
        if self.sharing.by_tokens:
            for norm in (block.norm1, block.norm2):
                norm.partial_gradients = ("weight", "bias")  # type: ignore[assignment]
            block.dropout1 = RankLocalDropout(block.dropout1, self.own.place)
            block.dropout2 = RankLocalDropout(block.dropout2, self.own.place)

    def _part_and_join(self, model: nn.Sequential) -> None:
        """Around every run of transformer blocks whose neighbours work on all tokens."""
        modules = [None, *model, None]
        for before, module, after in zip(modules, modules[1:], modules[2:], strict=False):
            if not isinstance(module, TransformerBlock):
                continue
            if not isinstance(before, TransformerBlock | VocabularyParallelEmbedding):
                module.register_forward_pre_hook(self._part)
            if not isinstance(after, TransformerBlock | VocabularyParallelHead):
                module.register_forward_hook(self._join)

    def _part(self, _module: nn.Module, given: Any) -> Tensor:
        return self.sharing.part(given[0])

    def _join(self, _module: nn.Module, _given: Any, output: Tensor) -> Tensor:
        return self.sharing.join(output)


def _check_head_counts(blocks: list[TransformerBlock], spec: RunSpec) -> None:
    heads = [block.attention.query.out_features // block.attention.head_width for block in blocks]
    if not heads or min(heads) < spec.tp_degree:
        has = f"one with {min(heads)} heads" if heads else "none"
        raise WorkerError(
            f"tensor splits the TransformerBlocks in a model's sequence by their heads: {spec.model} has {has}, "
            f"tp_degree is {spec.tp_degree}",
            status="unsupported",
            hint=f"set tp_degree to at most {min(heads)}" if heads else "build it of TransformerBlocks",
        )
