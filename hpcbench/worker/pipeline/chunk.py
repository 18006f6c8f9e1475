"""A piece of the model on one rank, and what is alive of the micro-batches that are within it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from hpcbench.worker.blocks import recomputed, spare_input
from hpcbench.worker.pipeline.boundary import Boundary
from hpcbench.worker.pipeline.deferred import Late, defer_weights


class _Alive(NamedTuple):
    """One micro-batch between its forward and its backward pass."""

    inputs: tuple[Tensor, ...]
    """Leaves of autograd's graph."""
    outputs: tuple[Tensor, ...]
    """Of the last chunk the loss alone."""


class Chunk:
    """Blocks of the model that one rank computes together."""

    def __init__(self, module: nn.Module, splits: bool) -> None:
        """``splits``: its backward passes come in halves."""
        self.module = module
        spare_input(module)
        self._deferral = defer_weights(module) if splits else None
        self._alive: dict[int, _Alive] = {}
        self._late: dict[int, Late] = {}

    def forward(
        self,
        micro_batch: int,
        inputs: tuple[Tensor, ...],
        entry: Boundary | None,
        recompute: bool,
        context: AbstractContextManager[None],
        loss: Callable[[Any], Tensor] | None,
    ) -> tuple[Tensor, ...]:
        """The tensors that the next chunk takes, or what ``loss`` makes of the output.

        ``entry`` is the boundary that ``inputs`` came through, ``None`` for samples; ``context`` that of the
        arithmetic.
        """
        x: Any = inputs[0]
        if entry is not None:
            for place in entry.with_gradient:
                inputs[place].requires_grad_()
            x = tree_unflatten(list(inputs), entry.tree)
        with context:
            output = recomputed(self.module, x) if recompute else self.module(x)
        outputs = tuple(tree_leaves(output)) if loss is None else (loss(output),)
        self._alive[micro_batch] = _Alive(inputs, outputs)
        return outputs

    def loss(self, micro_batch: int) -> Tensor:
        """Of a micro-batch whose backward pass is still to come."""
        return self._alive[micro_batch].outputs[0]

    def backward(self, micro_batch: int, run: Callable[[tuple[Tensor, ...]], None]) -> tuple[Tensor, ...]:
        """Let ``run`` go backward from the outputs; the gradients of all inputs that can have one, in their order.

        In a chunk that splits them, gradients of weights are left to ``finish_weights``.
        """
        inputs, outputs = self._alive.pop(micro_batch)
        if self._deferral is None:
            run(outputs)
        else:
            with self._deferral.collected() as late:
                run(outputs)
            self._late[micro_batch] = late
        leaves = [one for one in inputs if one.requires_grad]
        return tuple(torch.zeros_like(one) if one.grad is None else one.grad for one in leaves)

    def finish_weights(self, micro_batch: int) -> None:
        """The second half of a backward pass."""
        for owed in self._late.pop(micro_batch):
            owed()

    def drop(self) -> None:
        """Forget everything that is alive."""
        self._alive.clear()
        self._late.clear()


def backward_from(outputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
    """Backward from the outputs whose gradients came back; those that nothing was computed for have none to take."""
    pairs = [
        (output, grad)
        for output, grad in zip((one for one in outputs if one.is_floating_point()), grads, strict=True)
        if output.requires_grad
    ]
    torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
