"""Convolutions and pools of feature maps that are split over ranks (Dryden et al. 2019, arXiv:1903.06681)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.parallel.strategies.halo import Box, Halo, HaloLayer, box_difference, box_volume
from hpcbench.worker.strategies.spatial.halo_exchange import (
    SpatialGrid,
    assemble_input,
    assemble_own_gradient,
    box_view,
    check_own_extents,
    empty_box,
    send_halo,
    send_halo_gradient,
)


class SpatialConvolutionPlan(NamedTuple):
    """What a rank does for one convolution."""

    cut: SpatialGrid
    layer: HaloLayer
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


class _SpatialConvolutionFunction(torch.autograd.Function):
    """Keeps the own part and what was received, not a second copy of the two put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: SpatialConvolutionPlan) -> Tensor:
        needs = plan.halo()
        exchange = send_halo(plan.cut, needs, x)
        if plan.overlap and (needs.sends or needs.receives) and box_volume(needs.interior):
            out = empty_box(x, needs.outputs, weight.shape[0])
            inner = plan.convolve(box_view(x, plan.feeds(needs, needs.interior), needs.own), weight, bias)
            box_view(out, needs.interior, needs.outputs).copy_(inner)
            del inner
            received = exchange.wait()
            for box in box_difference(needs.outputs, needs.interior):
                strip = assemble_input(x, received, needs, plan.feeds(needs, box), plan.image(), 0.0)
                box_view(out, box, needs.outputs).copy_(plan.convolve(strip, weight, bias))
        else:
            received = exchange.wait()
            out = plan.convolve(assemble_input(x, received, needs, needs.needed, plan.image(), 0.0), weight, bias)
        ctx.plan, ctx.has_bias = plan, bias is not None
        ctx.save_for_backward(x, weight, *received)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        plan: SpatialConvolutionPlan = ctx.plan
        x, weight, *received = ctx.saved_tensors
        needs = plan.halo()
        whole = assemble_input(x, received, needs, needs.needed, plan.image(), 0.0)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_x = exchange = None
        if wants_x:
            of_x = plan.gradients(gradient, whole, weight, (True, False, False))[0]
            exchange = send_halo_gradient(plan.cut, needs, of_x)
            if not plan.overlap:
                exchange.wait()
        of_weight = of_bias = None
        if wants_weight or wants_bias:
            _, of_weight, of_bias = plan.gradients(gradient, whole, weight, (False, wants_weight, wants_bias))
        del whole
        return (
            None if of_x is None else assemble_own_gradient(needs, of_x, exchange),
            of_weight,
            of_bias if ctx.has_bias else None,
            None,
        )


class SpatialConvolution(nn.Module):
    """In place of a ``Conv2d`` or ``Conv3d``: the same parameters, on a rank's own part of the feature maps."""

    def __init__(self, whole: nn.Conv2d | nn.Conv3d, cut: SpatialGrid, layer: HaloLayer, overlap: bool) -> None:
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias
        padding = tuple(
            0 if parts > 1 else window.padding for parts, window in zip(cut.grid, layer.windows, strict=True)
        )
        self.plan = SpatialConvolutionPlan(cut, layer, whole.stride, padding, whole.dilation, whole.groups, overlap)
        self.train(whole.training)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in channels, *own input extents] -> [n, out channels, *own output extents]."""
        check_own_extents(x, self.plan.halo().own)
        weight, bias = self.weight, self.bias
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            lower = torch.get_autocast_dtype(kind)
            x, weight = x.to(lower), weight.to(lower)
            bias = None if bias is None else bias.to(lower)
        with torch.autocast(kind, enabled=False):
            out: Tensor = _SpatialConvolutionFunction.apply(x, weight, bias, self.plan)  # type: ignore[no-untyped-call]
        return out


_MAX_POOL_FUNCTIONS = {2: F.max_pool2d, 3: F.max_pool3d}


class _SpatialPoolPlan(NamedTuple):
    cut: SpatialGrid
    layer: HaloLayer

    def halo(self) -> Halo:
        return self.cut.halo(self.layer)

    def whole(self, x: Tensor, fill: float) -> Tensor:
        """The own part with its halo and padding."""
        needs = self.halo()
        check_own_extents(x, needs.own)
        received = send_halo(self.cut, needs, x).wait()
        image = tuple(range(extent) for extent in self.layer.extents)
        return assemble_input(x, received, needs, needs.needed, image, fill)

    def returned(self, gradient: Tensor) -> Tensor:
        """The gradient of the own part."""
        needs = self.halo()
        return assemble_own_gradient(needs, gradient, send_halo_gradient(self.cut, needs, gradient))

    def needed_shape(self, like: Tensor) -> tuple[int, ...]:
        return (*like.shape[:2], *(len(one) for one in self.halo().needed))


class _SpatialMaxPoolFunction(torch.autograd.Function):
    """Keeps where the largest were, and no input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _SpatialPoolPlan) -> Tensor:
        windows = plan.layer.windows
        out, places = _MAX_POOL_FUNCTIONS[x.dim() - 2](
            plan.whole(x, -torch.inf),
            [one.kernel for one in windows],
            [one.stride for one in windows],
            dilation=[one.dilation for one in windows],
            return_indices=True,
        )
        ctx.plan = plan
        ctx.save_for_backward(places)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.plan.needed_shape(gradient))
        whole.flatten(2).scatter_add_(2, places.flatten(2), gradient.flatten(2))
        return ctx.plan.returned(whole), None


class _SpatialSumPoolFunction(torch.autograd.Function):
    """The sum in every window, by a depthwise convolution with ones; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _SpatialPoolPlan) -> Tensor:
        ctx.plan = plan
        whole = plan.whole(x, 0.0)
        return torch.convolution(whole, *_ones_convolution_arguments(whole, plan))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        plan: _SpatialPoolPlan = ctx.plan
        whole = gradient.new_empty(1).expand(plan.needed_shape(gradient))
        weight, bias, *rest = _ones_convolution_arguments(whole, plan)
        found = torch.ops.aten.convolution_backward(gradient, whole, weight, bias, *rest, (True, False, False))[0]
        return plan.returned(found), None


def _ones_convolution_arguments(x: Tensor, plan: _SpatialPoolPlan) -> tuple[Any, ...]:
    windows, channels = plan.layer.windows, x.shape[1]
    none = [0] * len(windows)
    weight = x.new_ones((channels, 1, *(one.kernel for one in windows)))
    return weight, None, [one.stride for one in windows], none, [1] * len(windows), False, none, channels


class SpatialMaxPool(nn.Module):
    """In place of a ``MaxPool2d`` or ``MaxPool3d``."""

    def __init__(self, cut: SpatialGrid, layer: HaloLayer) -> None:
        super().__init__()
        self._plan = _SpatialPoolPlan(cut, layer)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own input extents] -> [n, channels, *own output extents]."""
        out: Tensor = _SpatialMaxPoolFunction.apply(x, self._plan)  # type: ignore[no-untyped-call]
        return out


class SpatialAveragePool(nn.Module):
    """In place of an ``AvgPool2d`` or ``AvgPool3d``."""

    def __init__(self, whole: nn.AvgPool2d | nn.AvgPool3d, cut: SpatialGrid, layer: HaloLayer) -> None:
        super().__init__()
        self._plan = _SpatialPoolPlan(cut, layer)
        outputs = self._plan.halo().outputs
        divisor = whole.divisor_override
        shares = torch.full([len(one) for one in outputs], 1.0 / (divisor or 1), dtype=torch.float64)
        if not divisor:
            shares = 1.0 / _window_sizes(layer, outputs, whole.count_include_pad)
        self.register_buffer("_shares", shares, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own input extents] -> [n, channels, *own output extents]."""
        summed: Tensor = _SpatialSumPoolFunction.apply(x, self._plan)  # type: ignore[no-untyped-call]
        return summed * self.get_buffer("_shares").to(summed.dtype)


def _window_sizes(layer: HaloLayer, outputs: Box, with_padding: bool) -> Tensor:
    """How many positions each window of ``outputs`` is divided by: torch's rule, dim by dim."""
    counts = torch.ones((), dtype=torch.float64)
    for extent, window, wanted in zip(layer.extents, layer.windows, outputs, strict=True):
        beyond = window.padding if with_padding else 0
        along = []
        for output in wanted:
            first = output * window.stride - window.padding
            along.append(min(first + window.kernel, extent + beyond) - max(first, -beyond))
        counts = counts[..., None] * torch.tensor(along, dtype=torch.float64)
    assert counts.numel() == box_volume(outputs), "one number per output"
    return counts
