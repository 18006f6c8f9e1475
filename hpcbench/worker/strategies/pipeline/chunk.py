"""A model chunk with its in-flight micro-batches, and the shapes and types of the activations between chunks.

The shapes are found beforehand with fake tensors, so that messages hold tensor data alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.worker.layers import allocate_fake_storage, zero_batch
from hpcbench.worker.model_execution import MixedPrecision, checkpoint_block, disable_inplace_first_op
from hpcbench.worker.strategies.pipeline.split_backward import DeferredWork, defer_weight_gradients

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


class TensorMeta(NamedTuple):
    """One tensor of a boundary."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.sizes, dtype=self.dtype, device=device, memory_format=self.layout)

    def flat(self, tensor: Tensor) -> Tensor:
        """``tensor`` in one dimension, in the order in which this layout lies in memory; a copy only if it must be."""
        dense = tensor.contiguous(memory_format=self.layout)
        return dense.as_strided((dense.numel(),), (1,))


class ActivationMeta(NamedTuple):
    """What one chunk hands to the next: one tensor, or (where blocks pass on tuples, such as skips) several."""

    shapes: tuple[TensorMeta, ...]
    tree: TreeSpec

    @property
    def with_gradient(self) -> tuple[int, ...]:
        """Places of the tensors whose gradients come back."""
        return tuple(place for place, one in enumerate(self.shapes) if one.dtype.is_floating_point)


class ActivationMetaCache:
    """The boundaries after every chunk, for any number of samples: found once each by fake tensors.

    ``model`` is whole and on the host; what is kept of it are shapes alone.
    """

    def __init__(self, model: nn.Sequential, blocks: Sequence[range], spec: RunSpec, device: torch.device) -> None:
        self._model = copy_to_meta(model)
        self._blocks = blocks
        self._spec = spec
        self.device = device
        self._known: dict[int, list[ActivationMeta]] = {}

    def after(self, chunk: int, samples: int) -> ActivationMeta:
        """What ``chunk`` hands on for a micro-batch of ``samples``. ``WorkerError`` where fake tensors cannot tell."""
        if samples not in self._known:
            self._known[samples] = self._trace(samples)
        return self._known[samples][chunk]

    def _trace(self, samples: int) -> list[ActivationMeta]:
        spec, found = self._spec, list[ActivationMeta]()
        arithmetic = MixedPrecision(spec.precision, self.device)
        try:
            model = copy.deepcopy(self._model)
            with torch.random.fork_rng(devices=[]), FakeTensorMode(), torch.no_grad():
                allocate_fake_storage(model, self.device)
                x: Any = zero_batch(spec, samples)[0].to(self.device)
                if x.is_floating_point() and spec.precision == "fp64":
                    x = x.double()
                if spec.channels_last and x.dim() in (4, 5):
                    x = x.contiguous(memory_format=_MEMORY_FORMATS[x.dim() - 3])
                with arithmetic.autocast():
                    for blocks in self._blocks:
                        for block in list(model)[blocks.start : blocks.stop]:
                            x = block(x)
                        found.append(activation_meta_of(x))
        except HpcbenchError:
            raise
        except Exception as error:
            raise WorkerError(
                f"the stages of {spec.model} cannot be tried with fake tensors on a micro-batch of {samples}: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                status="unsupported",
                hint="a pipeline needs blocks whose shapes do not depend on values; BatchNorm needs two values",
            ) from error
        return found


def activation_meta_of(output: Any) -> ActivationMeta:
    """The boundary that ``output`` of a chunk passes through."""
    leaves, tree = tree_flatten(output)
    return ActivationMeta(
        tuple(TensorMeta(tuple(one.shape), one.dtype, _memory_format_of(one)) for one in leaves), tree
    )


def _memory_format_of(tensor: Tensor) -> torch.memory_format:
    if tensor.is_contiguous():
        return torch.contiguous_format
    for layout in _MEMORY_FORMATS[1:]:
        if tensor.dim() == 4 + (layout is torch.channels_last_3d) and tensor.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


def copy_to_meta(model: nn.Sequential) -> nn.Sequential:
    """A copy on the meta device, made without copying any number."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        meta = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    return copy.deepcopy(model, memo)


class _MicroBatchState(NamedTuple):
    """One micro-batch between its forward and its backward pass."""

    inputs: tuple[Tensor, ...]
    """Leaves of autograd's graph."""
    outputs: tuple[Tensor, ...]
    """Of the last chunk the loss alone."""


class ModelChunk:
    """Blocks of the model that one rank computes together."""

    def __init__(self, module: nn.Module, splits: bool) -> None:
        """``splits``: its backward passes come in halves."""
        self.module = module
        disable_inplace_first_op(module)
        self._deferral = defer_weight_gradients(module) if splits else None
        self._alive: dict[int, _MicroBatchState] = {}
        self._late: dict[int, DeferredWork] = {}

    def forward(
        self,
        micro_batch: int,
        inputs: tuple[Tensor, ...],
        entry: ActivationMeta | None,
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
            output = checkpoint_block(self.module, x) if recompute else self.module(x)
        outputs = tuple(tree_leaves(output)) if loss is None else (loss(output),)
        self._alive[micro_batch] = _MicroBatchState(inputs, outputs)
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
