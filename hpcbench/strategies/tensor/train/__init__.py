"""Tensor parallelism of transformers (Megatron), including the vocabulary.

Sources: Shoeybi et al. 2019, Korthikanti et al. 2022.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.mesh import even_ranges
from hpcbench.strategies.tensor.train import layers as tensor_layers
from hpcbench.worker import model_parallel_layers as model_parallel
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankGroup, make_group
from hpcbench.worker.model_execution import summed_loss
from hpcbench.worker.models.decoder import Embedding, TokenHead
from hpcbench.worker.models.transformer import TransformerBlock


def _local_words(words: Tensor, own_words: range) -> tuple[Tensor, Tensor]:
    """Return the index of each word within ``own_words`` (0 for others) and a mask of the others."""
    index = words - own_words.start
    is_foreign = (index < 0) | (index >= len(own_words))
    return index.masked_fill(is_foreign, 0), is_foreign


class WordEmbeddingShard(nn.Embedding):
    """The vectors of this rank's words, zero for all others."""

    def __init__(self, embedding: nn.Embedding, ranges: list[range], rank: int) -> None:
        self.own_words = ranges[rank]
        super().__init__(len(self.own_words), embedding.embedding_dim, device="meta")
        self.shards = {"weight": model_parallel.sharding_along(0, ranges)}
        self.weight = model_parallel.own_shard(embedding.weight, self.shards["weight"], rank)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """[n, tokens] -> [n, tokens, width], to be summed over the ranks."""
        index, is_foreign = _local_words(input, self.own_words)
        return F.embedding(index, self.weight).masked_fill(is_foreign.unsqueeze(-1), 0.0)


class VocabularyParallelEmbedding(Embedding):
    """An embedding split by words: [n, tokens] -> [n, tokens or own tokens, width]."""

    def __init__(self, embedding: Embedding, comm: tensor_layers.TensorParallelComm) -> None:
        nn.Module.__init__(self)
        self.comm = comm
        ranges = even_ranges(embedding.tokens.num_embeddings, comm.group.size)
        self.tokens = WordEmbeddingShard(embedding.tokens, ranges, comm.group.place)
        self.positions = embedding.positions
        self.dropout = embedding.dropout
        if comm.by_tokens:
            if self.positions is not None:
                tensor_layers.mark_partial_gradients(self.positions, "weight")
            self.dropout = tensor_layers.RankLocalDropout(embedding.dropout, comm.group.place)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens] -> [n, tokens or own tokens, width]; one collective after the look-up of the words."""
        self.comm.tokens = x.shape[1]
        vectors = self.comm.leave(self.tokens(x))
        if self.positions is not None:
            positions = self.comm.own_tokens if self.comm.by_tokens else range(x.shape[1])
            vectors = vectors + self.positions.weight[positions.start : positions.stop]
        return self.dropout(vectors)  # type: ignore[no-any-return]


class VocabularyParallelHead(TokenHead):
    """An output layer split by words: [n, tokens or own tokens, width] -> [n, tokens, own words].

    In eval mode it returns the scores of all words.
    """

    def __init__(self, head: TokenHead, comm: tensor_layers.TensorParallelComm) -> None:
        nn.Module.__init__(self)
        self.comm = comm
        self.ranges = even_ranges(head.output.out_features, comm.group.size)
        self.norm = head.norm
        self.output = tensor_layers.ColumnLinear(head.output, self.ranges, comm.group.place)
        if comm.by_tokens:
            tensor_layers.mark_partial_gradients(self.norm, "weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens or own tokens, width] -> [n, tokens, own words], in eval mode [n, tokens, words].

        One collective before the output layer, in eval mode another one after it.
        """
        scores: Tensor = self.output(self.comm.enter(self.norm(x)))
        if self.training:
            return scores
        return model_parallel.gather_shards(
            scores, model_parallel.sharding_along(scores.dim() - 1, self.ranges), self.comm.group
        )


def vocabulary_parallel_losses(outputs: Tensor, targets: Tensor, own_words: range, group: RankGroup) -> Tensor:
    """Return the sum of the samples' cross-entropy losses, from scores that are split by words.

    No rank holds the scores of all words: the ranks exchange, for every position, the largest score, the sum of the
    exponentials, and the target's score.

    Args:
        outputs: Scores [n, length, own words].
        targets: Words [n, length].
        own_words: The words of this rank.
        group: The ranks that hold the other words.
    """
    scores = outputs if outputs.dtype == torch.float64 else outputs.float()
    losses: Tensor = _VocabularyParallelCrossEntropy.apply(scores.flatten(0, 1), targets.flatten(), own_words, group)  # type: ignore[no-untyped-call]
    return losses.sum() / targets.shape[1]


class _VocabularyParallelCrossEntropy(Function):
    """Scores [positions, own words] and targets [positions] -> the loss of every position."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, own_words: range, group: RankGroup) -> Tensor:
        largest = scores.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group.members())
        index, is_foreign = _local_words(targets, own_words)
        shifted = scores - largest.unsqueeze(1)
        target_scores = shifted.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(is_foreign, 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=1), target_scores])
        dist.all_reduce(sums, group=group.members())
        total, target_scores = sums
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), index, is_foreign)
        losses: Tensor = total.log() - target_scores
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, is_foreign = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(1)
        # In place: the gradient is as large as the scores themselves.
        grad_scores = probabilities.mul_(gradient)
        grad_scores.scatter_add_(1, index.unsqueeze(1), -gradient.masked_fill(is_foreign.unsqueeze(1), 0.0))
        return grad_scores, None, None, None


class TensorParallelStrategy(model_parallel.ModelParallelStrategy):
    """The ranks along ``tp`` divide heads, inner features and words among themselves."""

    axis = "tp"

    def split_model(self, model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
        """Replace embedding, blocks and head by this rank's parts.

        Raises:
            WorkerError: ``unsupported`` for a custom model without transformer blocks, or with too few heads.
        """
        if not any(isinstance(block, TransformerBlock) for block in model):
            raise unsupported(
                f"tensor splits the TransformerBlocks in a model's sequence by their heads: {spec.model} has none, "
                f"tp_degree is {spec.tp_degree}",
                "build it of TransformerBlocks",
            )
        if self.group.size > 1:
            tensor_layers.refuse_shared_layers(model)
        self.comm = tensor_layers.TensorParallelComm(
            self.group, bool(self.options["sequence_parallel"]) and self.group.size > 1
        )
        self.head: VocabularyParallelHead | None = None
        if self.options["vocabulary_parallel"] and self.group.size > 1:
            self._split_vocabulary(model)
        tensor_layers.split_transformer_blocks([model], self.comm, spec)
        if self.comm.by_tokens:
            self._part_and_join(model)
        return model

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.head is None:
            return summed_loss(outputs, targets)
        return vocabulary_parallel_losses(outputs, targets, self.head.ranges[self.group.place], self.group)

    def make_reducers(self, module: nn.Module) -> list[GradientReducer]:
        """Partial gradients are reduced among all ranks, all others across replicas."""
        partial = tensor_layers.partial_gradient_ids(module)
        replicated = [parameter for parameter in module.parameters() if id(parameter) not in partial]
        by_tokens = [parameter for parameter in module.parameters() if id(parameter) in partial]
        all_ranks = make_group(self.mesh, self.context, "dp", "tp")
        return model_parallel.group_reducers((replicated, self.groups["dp"]), (by_tokens, all_ranks))

    def _split_vocabulary(self, model: nn.Sequential) -> None:
        """Split an embedding and the head at the model's end; a weight that they share stays shared."""
        embedding, head = model[0], model[-1]
        if not (isinstance(embedding, Embedding) and isinstance(head, TokenHead)):
            return
        is_tied = embedding.tokens.weight is head.output.weight
        model[0] = split_embedding = VocabularyParallelEmbedding(embedding, self.comm)
        model[-1] = self.head = VocabularyParallelHead(head, self.comm)
        if is_tied:
            self.head.output.weight = split_embedding.tokens.weight

    def _part_and_join(self, model: nn.Sequential) -> None:
        """Divide the tokens before every run of transformer blocks and join them after it.

        Not next to a split embedding or head, which return and take own tokens.
        """
        modules = [None, *model, None]
        for before, module, after in zip(modules, modules[1:], modules[2:], strict=False):
            if not isinstance(module, TransformerBlock):
                continue
            if not isinstance(before, TransformerBlock | VocabularyParallelEmbedding):
                module.register_forward_pre_hook(lambda _module, inputs: self.comm.part(inputs[0]))
            if not isinstance(after, TransformerBlock | VocabularyParallelHead):
                module.register_forward_hook(lambda _module, _inputs, output: self.comm.join(output))


TRAININGS = {
    "tensor": TensorParallelStrategy,
}
"""The training of each strategy."""
