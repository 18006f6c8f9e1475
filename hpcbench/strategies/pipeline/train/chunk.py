"""A model chunk with its in-flight micro-batches, the shapes and types of the activations between chunks, and the
backward pass in two halves.

The shapes are computed beforehand with fake tensors, so that messages contain tensor data only.

Zero bubble computes input gradients first and weight gradients later (Qi et al. 2023, section 2). Linear layers and
convolutions are split; the weights of all other layers get their gradients in the first half::

    1f1b         | F | B = input and weight gradients |
    zero bubble  | F | B input |  ... other work ...  | W weight |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError, unsupported
from hpcbench.worker.layers import allocate_fake_storage, zero_batch
from hpcbench.worker.model_execution import MixedPrecision, checkpoint_block, disable_inplace_first_op, storage_dtype
from hpcbench.worker.model_parallel_layers import ConvolutionOperation, cast_for_autocast
from hpcbench.worker.models.build import copy_to_meta

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


class TensorMeta(NamedTuple):
    """Shape, dtype and memory format of one activation tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor [*sizes] of this form."""
        return torch.empty(self.sizes, dtype=self.dtype, device=device, memory_format=self.layout)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the elements in the memory order of this layout: [*sizes] -> [numel]; a view unless it must copy."""
        dense = tensor.contiguous(memory_format=self.layout)
        return dense.as_strided((dense.numel(),), (1,))


class ActivationMeta(NamedTuple):
    """The output of a chunk: one tensor, or several if its last block returns a tuple (for skip connections)."""

    shapes: tuple[TensorMeta, ...]
    treespec: TreeSpec

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Indices of the tensors whose gradients are sent back."""
        return tuple(index for index, shape in enumerate(self.shapes) if shape.dtype.is_floating_point)


class ActivationMetaCache:
    """The form of every chunk's output by number of samples, each computed once with fake tensors.

    Args:
        model: The whole model on the host; only its shapes are kept.
        blocks: The blocks of every chunk.
        spec: The run.
        device: The device of the activations.
    """

    def __init__(self, model: nn.Sequential, blocks: Sequence[range], spec: RunSpec, device: torch.device) -> None:
        self._model = copy_to_meta(model)
        self._blocks = blocks
        self._spec = spec
        self.device = device
        self._outputs: dict[int, list[ActivationMeta]] = {}

    @property
    def chunks(self) -> int:
        """Number of chunks of the whole model."""
        return len(self._blocks)

    def outputs_of(self, chunk: int, samples: int) -> ActivationMeta:
        """Return the form of ``chunk``'s output for a micro-batch of ``samples``.

        Raises:
            WorkerError: ``unsupported`` if the model cannot run with fake tensors.
        """
        if samples not in self._outputs:
            # A dry run's own fake tensors are others.
            with _disable_current_modes():
                self._outputs[samples] = self._trace(samples)
        return self._outputs[samples][chunk]

    def _trace(self, samples: int) -> list[ActivationMeta]:
        spec, outputs = self._spec, list[ActivationMeta]()
        arithmetic = MixedPrecision(spec.precision, self.device)
        try:
            model = copy.deepcopy(self._model)
            with torch.random.fork_rng(devices=[]), FakeTensorMode(), torch.no_grad():
                allocate_fake_storage(model, self.device)
                x: Any = in_run_format(zero_batch(spec, samples)[0].to(self.device), spec)
                with arithmetic.autocast():
                    for blocks in self._blocks:
                        for block in list(model)[blocks.start : blocks.stop]:
                            x = block(x)
                        outputs.append(activation_meta_of(x))
        except HpcbenchError:
            raise
        except Exception as error:
            raise unsupported(
                f"the stages of {spec.model} cannot be tried with fake tensors on a micro-batch of {samples}: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                "a pipeline needs blocks whose shapes do not depend on values; BatchNorm needs two values",
            ) from error
        return outputs


def in_run_format(inputs: Tensor, spec: RunSpec) -> Tensor:
    """Return ``inputs`` [n, *sample shape] in the dtype and memory format in which the run's feed hands them out."""
    x = inputs.to(storage_dtype(spec.precision)) if inputs.is_floating_point() else inputs
    if spec.channels_last and x.dim() in (4, 5):
        x = x.contiguous(memory_format=_MEMORY_FORMATS[x.dim() - 3])
    return x


def activation_meta_of(output: Any) -> ActivationMeta:
    """Return the form of a chunk's ``output``."""
    leaves, treespec = tree_flatten(output)
    shapes = tuple(TensorMeta(tuple(leaf.shape), leaf.dtype, _memory_format_of(leaf)) for leaf in leaves)
    return ActivationMeta(shapes, treespec)


def _memory_format_of(tensor: Tensor) -> torch.memory_format:
    if tensor.is_contiguous():
        return torch.contiguous_format
    for layout in _MEMORY_FORMATS[1:]:
        if tensor.dim() == 4 + (layout is torch.channels_last_3d) and tensor.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


DeferredWork = list[Callable[[], None]]
"""The second half of a chunk's backward pass: calls that compute weight gradients."""


class WeightGradientQueue:
    """Collects the deferred weight gradients of one chunk; outside of ``collected`` nothing is deferred."""

    def __init__(self) -> None:
        self.deferred: DeferredWork | None = None

    @contextmanager
    def collected(self) -> Iterator[DeferredWork]:
        """Defer weight gradients of backward passes in this context into the returned list."""
        self.deferred = []
        try:
            yield self.deferred
        finally:
            self.deferred = None


class _LinearOperation(NamedTuple):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> list[Tensor | None]:
        flat = grad.reshape(-1, grad.shape[-1])
        return [
            grad @ weight if wanted[0] else None,
            flat.t() @ x.reshape(-1, x.shape[-1]) if wanted[1] else None,
            flat.sum(0) if wanted[2] else None,
        ]


class _SplitBackwardFunction(torch.autograd.Function):
    """A layer's operation whose weight gradients can be computed later."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operation: Any, queue: WeightGradientQueue
    ) -> Tensor:
        # Not saved with x: checkpointing returns a saved weight as another tensor, without its gradient.
        ctx.operation, ctx.queue, ctx.weight, ctx.bias, ctx.x_dtype = operation, queue, weight, bias, x.dtype
        inputs, cast_weight = cast_for_autocast(x), cast_for_autocast(weight)
        cast_bias = None if bias is None else cast_for_autocast(bias)
        ctx.compute_dtype = cast_weight.dtype
        ctx.save_for_backward(inputs)
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = operation.forward(inputs, cast_weight, cast_bias)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight, bias, wanted = ctx.weight, ctx.bias, ctx.needs_input_grad[:3]
        deferred: DeferredWork | None = ctx.queue.deferred

        def compute(wanted: tuple[bool, bool, bool]) -> list[Tensor | None]:
            grads = ctx.operation.backward(gradients[0], x, weight.to(ctx.compute_dtype), wanted)
            dtypes = (ctx.x_dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
            return [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]

        if deferred is None:
            return (*compute(wanted), None, None)
        grad_x = compute((wanted[0], False, False))[0]

        def compute_weight_gradients() -> None:
            with torch.no_grad():
                _, *grads = compute((False, *wanted[1:]))
                for parameter, grad in zip((weight, bias), grads, strict=True):
                    if grad is not None:
                        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

        deferred.append(compute_weight_gradients)
        return grad_x, None, None, None, None


def defer_weight_gradients(chunk: nn.Module) -> WeightGradientQueue:
    """Let the linear layers and convolutions of ``chunk`` defer their weight gradients, in place; names stay."""
    queue = WeightGradientQueue()
    for module in chunk.modules():
        operation = _operation_of(module)
        if operation is not None:
            module.forward = partial(_forward_with_split_backward, module, operation, queue)
    return queue


def _forward_with_split_backward(module: Any, operation: Any, queue: WeightGradientQueue, x: Tensor) -> Tensor:
    out: Tensor = _SplitBackwardFunction.apply(x, module.weight, module.bias, operation, queue)  # type: ignore[no-untyped-call]
    return out


def _operation_of(module: nn.Module) -> _LinearOperation | ConvolutionOperation | None:
    # Exact types only: a subclass may compute something else.
    if type(module) is nn.Linear:
        return _LinearOperation()
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return None
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    return ConvolutionOperation(module.stride, module.padding, module.dilation, module.groups)


class _MicroBatchState(NamedTuple):
    """One micro-batch between its forward and its backward pass."""

    inputs: tuple[Tensor, ...]
    """Leaves of autograd's graph."""
    outputs: tuple[Tensor, ...]
    """Outputs of the blocks; in the last chunk the loss."""


class ModelChunk:
    """Consecutive blocks of the model on one rank, with the activations of micro-batches in flight.

    Args:
        module: The blocks.
        splits: Whether ``backward`` defers weight gradients to ``finish_weights`` (zero bubble).
    """

    def __init__(self, module: nn.Module, splits: bool) -> None:
        self.module = module
        disable_inplace_first_op(module)
        self._queue = defer_weight_gradients(module) if splits else None
        self._in_flight: dict[int, _MicroBatchState] = {}
        self._deferred: dict[int, DeferredWork] = {}

    def forward(
        self,
        micro_batch: int,
        inputs: tuple[Tensor, ...],
        input_meta: ActivationMeta | None,
        recompute: bool,
        context: AbstractContextManager[None],
        loss: Callable[[Any], Tensor] | None,
    ) -> tuple[Tensor, ...]:
        """Run the forward pass of a micro-batch and keep it for ``backward``.

        Args:
            micro_batch: Its number.
            inputs: Samples [n, *sample shape], or the tensors of the previous chunk's output, as ``input_meta``.
            input_meta: The form of the previous chunk's output; ``None`` for samples.
            recompute: Whether activations are freed and recomputed in the backward pass.
            context: Autocast of the run.
            loss: In the last chunk the function of the output that returns the loss.

        Returns:
            The tensors of the output [n, ...], or the loss, a scalar.
        """
        x: Any = inputs[0]
        if input_meta is not None:
            for index in input_meta.differentiable:
                inputs[index].requires_grad_()
            x = tree_unflatten(list(inputs), input_meta.treespec)
        with context:
            output = checkpoint_block(self.module, x) if recompute else self.module(x)
        outputs = tuple(tree_leaves(output)) if loss is None else (loss(output),)
        self._in_flight[micro_batch] = _MicroBatchState(inputs, outputs)
        return outputs

    def backward(self, micro_batch: int, run: Callable[[tuple[Tensor, ...]], None]) -> tuple[Tensor, ...]:
        """Run the backward pass of a micro-batch.

        Args:
            micro_batch: Its number; its forward pass has run.
            run: Runs autograd from the outputs of ``forward`` (``backward_from``, or backward of the loss).

        Returns:
            The gradients of all differentiable inputs, in their order, each in the shape [n, ...] of its input.
        """
        inputs, outputs = self._in_flight.pop(micro_batch)
        if self._queue is None:
            run(outputs)
        else:
            with self._queue.collected() as deferred:
                run(outputs)
            self._deferred[micro_batch] = deferred
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)

    @property
    def splits_backward(self) -> bool:
        """Whether ``backward`` leaves weight gradients to ``finish_weights``."""
        return self._queue is not None

    def finish_weights(self, micro_batch: int) -> None:
        """Compute the deferred weight gradients of a micro-batch."""
        for compute_weight_gradients in self._deferred.pop(micro_batch):
            compute_weight_gradients()


def backward_from(outputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
    """Run autograd from the floating-point ``outputs``; those without a graph are skipped.

    Args:
        outputs: Tensors of a chunk's output, [n, ...] each.
        grads: One gradient per floating-point output, in its shape.
    """
    floating = (output for output in outputs if output.is_floating_point())
    pairs = [(output, grad) for output, grad in zip(floating, grads, strict=True) if output.requires_grad]
    torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
