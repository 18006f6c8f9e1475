"""Convolutions and pools of feature maps that are split over ranks (Dryden et al. 2019, arXiv:1903.06681)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.parallel.strategies.halo import Box, Halo, HaloLayer, box_difference, box_volume
from hpcbench.worker.strategies.model_parallel import ConvolutionOperation, cast_for_autocast
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


@dataclass(frozen=True)
class SpatialPlan:
    """This rank's part in a layer with sliding windows."""

    grid: SpatialGrid
    layer: HaloLayer

    def halo(self) -> Halo:
        """Return the boxes that this rank owns, needs, sends and receives."""
        return self.grid.halo(self.layer)

    def image(self) -> Box:
        """Return all positions of the layer's input."""
        return tuple(range(extent) for extent in self.layer.extents)

    def gather_input(self, x: Tensor, fill: float) -> Tensor:
        """Return the own part with its halo and padding."""
        halo = self.halo()
        check_own_extents(x, halo.own)
        return assemble_input(x, send_halo(self.grid, halo, x).wait(), halo, halo.needed, self.image(), fill)

    def return_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the own part, from the gradient of the needed part."""
        halo = self.halo()
        return assemble_own_gradient(halo, gradient, send_halo_gradient(self.grid, halo, gradient))

    def needed_shape(self, like: Tensor) -> tuple[int, ...]:
        """Return the shape of the own part with its halo and padding."""
        return (*like.shape[:2], *map(len, self.halo().needed))


@dataclass(frozen=True)
class SpatialConvolutionPlan(SpatialPlan):
    """This rank's part in a convolution.

    With ``overlap`` the interior, whose windows need no halo, is computed while messages are in flight::

        +--------------------+
        | strip              |  <- needs the neighbour's rows, computed last
        |--------------------|
        | interior           |  <- computed during the exchange
        |                    |
        +--------------------+
    """

    operation: ConvolutionOperation
    """With torch's padding along dims that are not split; along the others it is part of the assembled input."""
    overlap: bool

    def input_box(self, halo: Halo, outputs: Box) -> Box:
        """Return the input positions that ``outputs`` depend on."""
        return tuple(
            needed if parts == 1 else window.input_range(extent)
            for needed, parts, window, extent in zip(
                halo.needed, self.grid.grid, self.layer.windows, outputs, strict=True
            )
        )


class _SpatialConvolutionFunction(torch.autograd.Function):
    """Keeps the own part and the received halo, not a second copy of the two assembled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: SpatialConvolutionPlan) -> Tensor:
        halo = plan.halo()
        exchange = send_halo(plan.grid, halo, x)
        if plan.overlap and (halo.sends or halo.receives) and box_volume(halo.interior):
            out = empty_box(x, halo.outputs, weight.shape[0])
            interior_input = box_view(x, plan.input_box(halo, halo.interior), halo.own)
            box_view(out, halo.interior, halo.outputs).copy_(plan.operation.forward(interior_input, weight, bias))
            received = exchange.wait()
            for box in box_difference(halo.outputs, halo.interior):
                strip = assemble_input(x, received, halo, plan.input_box(halo, box), plan.image(), 0.0)
                box_view(out, box, halo.outputs).copy_(plan.operation.forward(strip, weight, bias))
        else:
            received = exchange.wait()
            assembled = assemble_input(x, received, halo, halo.needed, plan.image(), 0.0)
            out = plan.operation.forward(assembled, weight, bias)
        ctx.plan, ctx.has_bias = plan, bias is not None
        ctx.save_for_backward(x, weight, *received)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        plan: SpatialConvolutionPlan = ctx.plan
        x, weight, *received = ctx.saved_tensors
        halo = plan.halo()
        assembled = assemble_input(x, received, halo, halo.needed, plan.image(), 0.0)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_needed = exchange = grad_weight = grad_bias = None
        if wants_x:
            grad_needed = plan.operation.backward(gradient, assembled, weight, (True, False, False))[0]
            assert grad_needed is not None
            exchange = send_halo_gradient(plan.grid, halo, grad_needed)
            if not plan.overlap:
                exchange.wait()
        if wants_weight or wants_bias:
            wanted = (False, wants_weight, wants_bias)
            _, grad_weight, grad_bias = plan.operation.backward(gradient, assembled, weight, wanted)
        del assembled
        grad_x = None if grad_needed is None else assemble_own_gradient(halo, grad_needed, exchange)
        return grad_x, grad_weight, grad_bias if ctx.has_bias else None, None


class SpatialConvolution(nn.Module):
    """Replaces a ``Conv2d`` or ``Conv3d``: the same parameters, on a rank's own part of the feature maps."""

    def __init__(self, layer: nn.Conv2d | nn.Conv3d, grid: SpatialGrid, windows: HaloLayer, overlap: bool) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        padding = tuple(
            0 if parts > 1 else window.padding for parts, window in zip(grid.grid, windows.windows, strict=True)
        )
        operation = ConvolutionOperation(layer.stride, padding, layer.dilation, layer.groups)
        self.plan = SpatialConvolutionPlan(grid, windows, operation, overlap)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """[n, in channels, *own input extents] -> [n, out channels, *own output extents]."""
        check_own_extents(x, self.plan.halo().own)
        weight, bias = cast_for_autocast(self.weight), None if self.bias is None else cast_for_autocast(self.bias)
        x = cast_for_autocast(x)
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _SpatialConvolutionFunction.apply(x, weight, bias, self.plan)  # type: ignore[no-untyped-call]
        return out


_MAX_POOL_FUNCTIONS = {2: F.max_pool2d, 3: F.max_pool3d}


class _SpatialMaxPoolFunction(torch.autograd.Function):
    """Keeps the positions of the maxima, and no input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: SpatialPlan) -> Tensor:
        windows = plan.layer.windows
        out, positions = _MAX_POOL_FUNCTIONS[x.dim() - 2](
            plan.gather_input(x, -torch.inf),
            [window.kernel for window in windows],
            [window.stride for window in windows],
            dilation=[window.dilation for window in windows],
            return_indices=True,
        )
        ctx.plan = plan
        ctx.save_for_backward(positions)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        grad_needed = gradient.new_zeros(ctx.plan.needed_shape(gradient))
        grad_needed.flatten(2).scatter_add_(2, positions.flatten(2), gradient.flatten(2))
        return ctx.plan.return_gradient(grad_needed), None


class _SpatialSumPoolFunction(torch.autograd.Function):
    """The sum in every window, by a depthwise convolution with ones; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: SpatialPlan) -> Tensor:
        ctx.plan = plan
        needed = plan.gather_input(x, 0.0)
        operation, ones = _ones_convolution(needed, plan)
        return operation.forward(needed, ones, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        plan: SpatialPlan = ctx.plan
        needed = gradient.new_empty(1).expand(plan.needed_shape(gradient))
        operation, ones = _ones_convolution(needed, plan)
        grad_needed = operation.backward(gradient, needed, ones, (True, False, False))[0]
        assert grad_needed is not None
        return plan.return_gradient(grad_needed), None


def _ones_convolution(x: Tensor, plan: SpatialPlan) -> tuple[ConvolutionOperation, Tensor]:
    windows, channels = plan.layer.windows, x.shape[1]
    stride = tuple(window.stride for window in windows)
    ones = x.new_ones((channels, 1, *(window.kernel for window in windows)))
    return ConvolutionOperation(stride, (0,) * len(windows), (1,) * len(windows), channels), ones


class SpatialMaxPool(nn.Module):
    """Replaces a ``MaxPool2d`` or ``MaxPool3d``."""

    def __init__(self, grid: SpatialGrid, windows: HaloLayer) -> None:
        super().__init__()
        self._plan = SpatialPlan(grid, windows)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own input extents] -> [n, channels, *own output extents]."""
        out: Tensor = _SpatialMaxPoolFunction.apply(x, self._plan)  # type: ignore[no-untyped-call]
        return out


class SpatialAveragePool(nn.Module):
    """Replaces an ``AvgPool2d`` or ``AvgPool3d``."""

    def __init__(self, layer: nn.AvgPool2d | nn.AvgPool3d, grid: SpatialGrid, windows: HaloLayer) -> None:
        super().__init__()
        self._plan = SpatialPlan(grid, windows)
        outputs = self._plan.halo().outputs
        divisor = layer.divisor_override
        factors = torch.full([len(extent) for extent in outputs], 1.0 / (divisor or 1), dtype=torch.float64)
        if not divisor:
            factors = 1.0 / _window_sizes(windows, outputs, layer.count_include_pad)
        self.register_buffer("_factors", factors, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own input extents] -> [n, channels, *own output extents]."""
        summed: Tensor = _SpatialSumPoolFunction.apply(x, self._plan)  # type: ignore[no-untyped-call]
        return summed * self.get_buffer("_factors").to(summed.dtype)


def _window_sizes(layer: HaloLayer, outputs: Box, with_padding: bool) -> Tensor:
    """Return the number of positions that each window of ``outputs`` is divided by: torch's rule, dim by dim."""
    counts = torch.ones((), dtype=torch.float64)
    for extent, window, positions in zip(layer.extents, layer.windows, outputs, strict=True):
        margin = window.padding if with_padding else 0
        sizes = []
        for output in positions:
            first = output * window.stride - window.padding
            sizes.append(min(first + window.kernel, extent + margin) - max(first, -margin))
        counts = counts[..., None] * torch.tensor(sizes, dtype=torch.float64)
    assert counts.numel() == box_volume(outputs), "one number per output"
    return counts
