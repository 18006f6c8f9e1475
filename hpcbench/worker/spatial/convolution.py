"""Convolutions of feature maps that are cut (Dryden et al. 2019, arXiv:1903.06681)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.parallel.halo import Box, Halo, Layer, around, volume
from hpcbench.worker.spatial.exchange import Cut, assembled, check, empty, own_gradient, part, return_halo, send_halo


class Plan(NamedTuple):
    """What a rank does for one convolution."""

    cut: Cut
    layer: Layer
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """The part of it that torch adds: none along dims that are cut."""
    dilation: tuple[int, ...]
    groups: int
    overlap: bool

    def halo(self) -> Halo:
        """Who needs what."""
        return self.cut.halo(self.layer)

    def image(self) -> Box:
        """All positions of the input."""
        return tuple(range(extent) for extent in self.layer.extents)

    def feeds(self, needs: Halo, outputs: Box) -> Box:
        """What ``outputs`` look at."""
        return tuple(
            needed if parts == 1 else window.needs(wanted)
            for needed, parts, window, wanted in zip(
                needs.needed, self.cut.grid, self.layer.windows, outputs, strict=True
            )
        )

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """torch's convolution of what was put together."""
        dims = len(self.stride)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, [0] * dims, self.groups
        )

    def gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the input, the weight and the bias, as far as they are wanted."""
        dims = len(self.stride)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            gradient, x, weight, [weight.shape[0]] if wanted[2] else None, self.stride, self.padding, self.dilation,
            False, [0] * dims, self.groups, wanted,
        )  # fmt: skip
        return found


class _Convolution(torch.autograd.Function):
    """Keeps the own part and what was received, not a second copy of the two put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        needs = plan.halo()
        exchange = send_halo(plan.cut, needs, x)
        if plan.overlap and (needs.sends or needs.receives) and volume(needs.interior):
            out = empty(x, needs.outputs, weight.shape[0])
            inner = plan.convolve(part(x, plan.feeds(needs, needs.interior), needs.own), weight, bias)
            part(out, needs.interior, needs.outputs).copy_(inner)
            del inner
            received = exchange.wait()
            for box in around(needs.outputs, needs.interior):
                strip = assembled(x, received, needs, plan.feeds(needs, box), plan.image(), 0.0)
                part(out, box, needs.outputs).copy_(plan.convolve(strip, weight, bias))
        else:
            received = exchange.wait()
            out = plan.convolve(assembled(x, received, needs, needs.needed, plan.image(), 0.0), weight, bias)
        ctx.plan, ctx.has_bias = plan, bias is not None
        ctx.save_for_backward(x, weight, *received)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        plan: Plan = ctx.plan
        x, weight, *received = ctx.saved_tensors
        needs = plan.halo()
        whole = assembled(x, received, needs, needs.needed, plan.image(), 0.0)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_x = exchange = None
        if wants_x:
            of_x = plan.gradients(gradient, whole, weight, (True, False, False))[0]
            exchange = return_halo(plan.cut, needs, of_x)
            if not plan.overlap:
                exchange.wait()
        of_weight = of_bias = None
        if wants_weight or wants_bias:
            _, of_weight, of_bias = plan.gradients(gradient, whole, weight, (False, wants_weight, wants_bias))
        del whole
        return (
            None if of_x is None else own_gradient(needs, of_x, exchange),
            of_weight,
            of_bias if ctx.has_bias else None,
            None,
        )


class SplitConvolution(nn.Module):
    """In place of a ``Conv2d`` or ``Conv3d``: the same parameters, on a rank's own part of the feature maps."""

    def __init__(self, whole: nn.Conv2d | nn.Conv3d, cut: Cut, layer: Layer, overlap: bool) -> None:
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias
        padding = tuple(
            0 if parts > 1 else window.padding for parts, window in zip(cut.grid, layer.windows, strict=True)
        )
        self.plan = Plan(cut, layer, whole.stride, padding, whole.dilation, whole.groups, overlap)
        self.train(whole.training)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in channels, *own input extents] -> [n, out channels, *own output extents]."""
        check(x, self.plan.halo().own)
        weight, bias = self.weight, self.bias
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            lower = torch.get_autocast_dtype(kind)
            x, weight = x.to(lower), weight.to(lower)
            bias = None if bias is None else bias.to(lower)
        with torch.autocast(kind, enabled=False):
            out: Tensor = _Convolution.apply(x, weight, bias, self.plan)  # type: ignore[no-untyped-call]
        return out
