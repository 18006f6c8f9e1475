"""A model's sequence of blocks as it is to be run: in one graph, or computed again in the backward pass."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError


class Blocks(nn.Sequential):
    """As ``nn.Sequential``, whose own ``forward`` the compiler skips: it would compile every block by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """One block after another."""
        for block in self:
            x = block(x)
        return x


class RecomputedBlocks(Blocks):
    """Keeps the input of every block and computes the block again in the backward pass (Chen et al. 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        """One block after another; dropout draws the same numbers the second time."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        for block in self:
            x = recomputed(block, x)
        return x


def arranged(model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
    """``model`` as the run asks for it: the same modules under the same names, and so is any slice of it.

    Raises ``WorkerError`` (``unsupported``) for a model that does more than to call its blocks in order.
    """
    if not (spec.compile or spec.activation_checkpointing):
        return model
    if type(model).forward is not nn.Sequential.forward:
        raise WorkerError(
            f"compile and activation_checkpointing call the blocks of {spec.model} in order, "
            f"but {type(model).__name__} has a forward of its own",
            status="unsupported",
            hint="put what it does into a block",
        )
    kind = RecomputedBlocks if spec.activation_checkpointing else Blocks
    if spec.activation_checkpointing:
        for block in model:
            spare_input(block)
    return kind(OrderedDict(model.named_children())).train(model.training)


def spare_input(block: nn.Module) -> None:
    """Let ``block`` not begin by writing over its input, which is a leaf of autograd's graph where the block is a cut
    piece of a model: VGG's in-place ReLUs are blocks of their own."""
    for module in block.modules():
        if next(module.children(), None) is None and not isinstance(module, nn.Flatten | nn.Identity):
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]
            return


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    """``block(x)``, of which only ``x`` is kept for the backward pass."""
    if torch.compiler.is_compiling():
        # A compiled graph writes statistics once, in its forward part.
        compiled: Tensor = checkpoint(block, x, use_reentrant=False)
        return compiled
    output: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=partial(_contexts, block))
    return output


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), kept_statistics(block)


@contextlib.contextmanager
def kept_statistics(block: nn.Module) -> Iterator[None]:
    """BatchNorm computes as in training, but its running statistics stay: the first pass has counted the batch."""
    norms = [
        module
        for module in block.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.track_running_stats
    ]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # Not track_running_stats = False: the operator would save other tensors than in the first pass.
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
