"""Tensor parallelism of transformers after Megatron (Shoeybi et al. 2019, Korthikanti et al. 2022)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.mesh import Mesh
from hpcbench.worker.groups import make_group
from hpcbench.worker.losses import sample_losses
from hpcbench.worker.models.gpt import Embedding, TokenHead
from hpcbench.worker.models.transformer import TransformerBlock
from hpcbench.worker.reducer import GradientReducer
from hpcbench.worker.strategies.base import Place
from hpcbench.worker.strategies.model_parallel import ModelParallel
from hpcbench.worker.tensor.collectives import Sharing
from hpcbench.worker.tensor.draws import OwnDropout
from hpcbench.worker.tensor.layers import SplitAttention, SplitMlp
from hpcbench.worker.tensor.vocabulary import SplitEmbedding, SplitTokenHead, split_losses


class TensorParallel(ModelParallel):
    """Heads, inner features and words are shared by the ranks along ``tp``.

    A module whose parameters get the gradients of the rank's own tokens alone names them in ``partial_gradients``.
    """

    axis = "tp"

    def setup(self, model: nn.Sequential, spec: RunSpec, place: Place) -> None:
        """Partial gradients are summed over the ranks of a replica and over replicas at once."""
        self.everyone = make_group(Mesh.of(spec), place, "dp", "tp")
        super().setup(model, spec, place)

    def divide(self, model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
        """Raises ``WorkerError`` (``unsupported``) for a user's own model without, or with too small, blocks."""
        self.sharing = Sharing(self.own, bool(self.options["sequence_parallel"]) and self.own.size > 1)
        self.head: SplitTokenHead | None = None
        blocks = [block for block in model if isinstance(block, TransformerBlock)]
        _check(blocks, spec)
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
            return sample_losses(outputs, targets)
        return split_losses(outputs, targets, self.head.ranges[self.own.place], self.own)

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
        embedding, self.head = SplitEmbedding(first, self.sharing), SplitTokenHead(last, self.sharing)
        if is_tied:
            self.head.output.weight = embedding.tokens.weight
        model[0], model[-1] = embedding, self.head

    def _split_block(self, block: TransformerBlock) -> None:
        block.attention = SplitAttention(block.attention, self.sharing)
        block.mlp = SplitMlp(block.mlp, self.sharing)
        if self.sharing.by_tokens:
            for norm in (block.norm1, block.norm2):
                norm.partial_gradients = ("weight", "bias")  # type: ignore[assignment]
            block.dropout1 = OwnDropout(block.dropout1, self.own.place)
            block.dropout2 = OwnDropout(block.dropout2, self.own.place)

    def _part_and_join(self, model: nn.Sequential) -> None:
        """Around every run of transformer blocks whose neighbours work on all tokens."""
        modules = [None, *model, None]
        for before, module, after in zip(modules, modules[1:], modules[2:], strict=False):
            if not isinstance(module, TransformerBlock):
                continue
            if not isinstance(before, TransformerBlock | SplitEmbedding):
                module.register_forward_pre_hook(self._part)
            if not isinstance(after, TransformerBlock | SplitTokenHead):
                module.register_forward_hook(self._join)

    def _part(self, _module: nn.Module, given: Any) -> Tensor:
        return self.sharing.part(given[0])

    def _join(self, _module: nn.Module, _given: Any, output: Tensor) -> Tensor:
        return self.sharing.join(output)


def _check(blocks: list[TransformerBlock], spec: RunSpec) -> None:
    heads = [block.attention.query.out_features // block.attention.head_width for block in blocks]
    if not heads or min(heads) < spec.tp_degree:
        has = f"one with {min(heads)} heads" if heads else "none"
        raise WorkerError(
            f"tensor splits the TransformerBlocks in a model's sequence by their heads: {spec.model} has {has}, "
            f"tp_degree is {spec.tp_degree}",
            status="unsupported",
            hint=f"set tp_degree to at most {min(heads)}" if heads else "build it of TransformerBlocks",
        )
