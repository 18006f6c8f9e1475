"""The backward pass in two halves: input gradients first, weight gradients later (zero bubble, Qi et al.

2023, section 2).

Linear layers and convolutions are split. The weights of all other layers get their gradients in the first half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DeferredWork = list[Callable[[], None]]
"""What the second half of one chunk's backward pass has to do."""


class WeightGradientQueue:
    """Where the layers of one chunk put off what they owe; outside of ``collected`` they owe nothing."""

    def __init__(self) -> None:
        self.late: DeferredWork | None = None

    @contextmanager
    def collected(self) -> Iterator[DeferredWork]:
        """Backward passes in here leave gradients of weights to the calls in the list that is given."""
        self.late = []
        try:
            yield self.late
        finally:
            self.late = None


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


class _ConvolutionOperation(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups
        )

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> list[Tensor | None]:
        found = torch.ops.aten.convolution_backward(
            grad, x, weight, [weight.shape[0]] if wanted[2] else None, self.stride, self.padding, self.dilation, False,
            [0] * len(self.stride), self.groups, list(wanted),
        )  # fmt: skip
        return list(found)


class _SplitBackwardFunction(torch.autograd.Function):
    """A layer's operation whose gradients of weights can be computed later."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operation: Any, deferral: WeightGradientQueue
    ) -> Tensor:
        # Not saved with x: what checkpointing hands back of a saved weight is another tensor, without its gradient.
        ctx.operation, ctx.deferral, ctx.weight, ctx.bias = operation, deferral, weight, bias
        device = x.device.type
        lower = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        ctx.lower = lower
        cast = x if lower is None else x.to(lower)
        ctx.save_for_backward(cast)
        ctx.types = x.dtype
        with torch.autocast(device, enabled=False):
            out: Tensor = operation.forward(cast, *(_cast_to(one, lower) for one in (weight, bias)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        is_wanted = ctx.needs_input_grad[:3]
        late: DeferredWork | None = ctx.deferral.late
        operation, lower = ctx.operation, ctx.lower
        if late is None:
            first = operation.backward(grad, x, _cast_to(weight, lower), is_wanted)
            return (
                _cast_gradient(first[0], x, ctx.types),
                _cast_gradient(first[1], weight),
                _cast_gradient(first[2], bias),
                None,
                None,
            )
        (of_input, _, _) = operation.backward(grad, x, _cast_to(weight, lower), (is_wanted[0], False, False))

        def owed() -> None:
            with torch.no_grad():
                found = operation.backward(grad, x, _cast_to(weight, lower), (False, *is_wanted[1:]))
                for parameter, part in zip((weight, bias), found[1:], strict=True):
                    if part is not None:
                        _accumulate_gradient(parameter, part)

        late.append(owed)
        return _cast_gradient(of_input, x, ctx.types), None, None, None, None


def _cast_to(tensor: Tensor | None, lower: torch.dtype | None) -> Tensor | None:
    return tensor if tensor is None or lower is None else tensor.to(lower)


def _cast_gradient(grad: Tensor | None, like: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if grad is None or like is None else grad.to(dtype or like.dtype)


def _accumulate_gradient(parameter: Tensor, part: Tensor) -> None:
    part = part.to(parameter.dtype)
    parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)


def defer_weight_gradients(chunk: nn.Module) -> WeightGradientQueue:
    """Let the linear layers and convolutions of ``chunk`` put off their weights' gradients; names stay."""
    deferral = WeightGradientQueue()
    for module in chunk.modules():
        operation = _operation_of(module)
        if operation is not None:
            module.forward = partial(_forward_with_split_backward, module, operation, deferral)
    return deferral


def _forward_with_split_backward(module: Any, operation: Any, deferral: WeightGradientQueue, x: Tensor) -> Tensor:
    out: Tensor = _SplitBackwardFunction.apply(x, module.weight, module.bias, operation, deferral)  # type: ignore[no-untyped-call]
    return out


def _operation_of(module: nn.Module) -> _LinearOperation | _ConvolutionOperation | None:
    """Exact types alone: a subclass may compute something else."""
    if type(module) is nn.Linear:
        return _LinearOperation()
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return None
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    return _ConvolutionOperation(module.stride, module.padding, module.dilation, module.groups)
