"""The backward pass in two halves: input gradients first, weight gradients later (zero bubble).

Linear layers and convolutions are split. The weights of all other layers get their gradients in the first half::

    1f1b         | F | B = input and weight gradients |
    zero bubble  | F | B input |  ... other work ...  | W weight |

Source: Qi et al. 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.worker.strategies.model_parallel import ConvolutionOperation, cast_for_autocast

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
