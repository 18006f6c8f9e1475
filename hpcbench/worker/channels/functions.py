"""Autograd functions of the operations in ``parallel.channels.Step``: one collective forward, its adjoint backward.

Where ranks hold a tensor whole, they hold the same gradient of it, too: the gradient of what every rank then computes
alike is never added up over the group. Where each computes its own part of what follows, it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcbench.parallel.channels import Step
from hpcbench.worker.channels.collectives import Shares, all_gathered, all_reduced, narrowed, reduce_scattered

_OPERATIONS: dict[str, Callable[[Tensor, Shares], Tensor]] = {
    # An output of its own, or autograd would take the input itself for it.
    "": lambda tensor, _shares: tensor.view_as(tensor),
    "narrow": narrowed,
    "all_gather": all_gathered,
    "all_reduce": all_reduced,
    "reduce_scatter": reduce_scattered,
}


class _Apply(torch.autograd.Function):
    """One operation forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, step: Step, shares: Shares) -> Tensor:
        ctx.step, ctx.shares = step, shares
        return _OPERATIONS[step.forward](tensor, shares)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return _OPERATIONS[ctx.step.backward](gradient, ctx.shares), None, None


def apply(tensor: Tensor, step: Step, shares: Shares | None) -> Tensor:
    """``tensor`` after ``step``; ``shares`` says whose channels are whose, on the side where they are split."""
    if shares is None or not (step.forward or step.backward):
        return tensor
    moved: Tensor = _Apply.apply(_lowered(tensor), step, shares)  # type: ignore[no-untyped-call]
    return moved


def _lowered(tensor: Tensor) -> Tensor:
    """Under autocast in the type that a convolution would turn it into anyway: half the bytes are sent."""
    kind = tensor.device.type
    if tensor.is_floating_point() and torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor
