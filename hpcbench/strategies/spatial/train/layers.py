"""Convolutions, pools and BatchNorm of feature maps that are split over ranks (Dryden et al. 2019, arXiv:1903.06681).

BatchNorm: Ioffe and Szegedy 2015; variances are combined after Chan et al. 1983.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.strategies.spatial.halo import Box, Halo, HaloLayer, box_difference, box_volume
from hpcbench.strategies.spatial.train.halo_exchange import (
    HaloExchange,
    SpatialGrid,
    assemble_input,
    assemble_own_gradient,
    box_view,
    check_own_extents,
    empty_box,
)
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_parallel_layers import (
    ConvolutionOperation,
    all_gather_equal_parts,
    cast_for_autocast,
    update_running_statistics,
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

    def needed_shape(self, like: Tensor) -> tuple[int, ...]:
        """Return the shape [n, channels, *extents of halo.needed]: the own part with its halo and padding.

        ``like`` is a tensor [n, channels, ...].
        """
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
    """The convolution on an assembled input. Its padding is torch's along dims that are not split and 0 along the
    others, whose padding is part of the assembled input."""
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
        exchange = HaloExchange(plan.grid, x, halo.own, halo.sends, halo.receives)
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
            exchange = HaloExchange(plan.grid, grad_needed, halo.needed, halo.receives, halo.sends)
            if not plan.overlap:
                exchange.wait()
        if wants_weight or wants_bias:
            wanted = (False, wants_weight, wants_bias)
            _, grad_weight, grad_bias = plan.operation.backward(gradient, assembled, weight, wanted)
        del assembled
        grad_x = None if grad_needed is None else assemble_own_gradient(halo, grad_needed, exchange)
        return grad_x, grad_weight, grad_bias if ctx.has_bias else None, None


class SpatialConvolution(nn.Module):
    """Replaces a ``Conv2d`` or ``Conv3d``: the same parameters, on a rank's own part of the feature maps.

    A pass exchanges halos over ``grid.group``: [n, in, *own input extents] -> [n, out, *own output extents].
    """

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


def _ones_convolution(x: Tensor, plan: SpatialPlan) -> tuple[ConvolutionOperation, Tensor]:
    windows, channels = plan.layer.windows, x.shape[1]
    stride = tuple(window.stride for window in windows)
    ones = x.new_ones((channels, 1, *(window.kernel for window in windows)))
    return ConvolutionOperation(stride, (0,) * len(windows), (1,) * len(windows), channels), ones


class _SpatialPoolFunction(torch.autograd.Function):
    """A pool with its halo exchange; keeps what ``pool.forward_needed`` asks for, and no input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: _SpatialPool) -> Tensor:
        ctx.pool, plan = pool, pool.plan
        halo = plan.halo()
        check_own_extents(x, halo.own)
        received = HaloExchange(plan.grid, x, halo.own, halo.sends, halo.receives).wait()
        out, *saved = pool.forward_needed(assemble_input(x, received, halo, halo.needed, plan.image(), pool.fill))
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        plan: SpatialPlan = ctx.pool.plan
        halo, grad_needed = plan.halo(), ctx.pool.backward_needed(gradient, *ctx.saved_tensors)
        exchange = HaloExchange(plan.grid, grad_needed, halo.needed, halo.receives, halo.sends)
        return assemble_own_gradient(halo, grad_needed, exchange), None


class _SpatialPool(nn.Module):
    """A pool of a rank's own part with its halo and padding."""

    fill: float
    """Value of padding."""

    def __init__(self, grid: SpatialGrid, windows: HaloLayer) -> None:
        super().__init__()
        self.plan = SpatialPlan(grid, windows)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own input extents] -> [n, channels, *own output extents]."""
        out: Tensor = _SpatialPoolFunction.apply(x, self)  # type: ignore[no-untyped-call]
        return out

    @abstractmethod
    def forward_needed(self, needed: Tensor) -> list[Tensor]:
        """Return the output for the needed part of the input, and the tensors to keep for the backward pass.

        ``needed`` is [n, channels, *extents of halo.needed], the output [n, channels, *own output extents].
        """

    @abstractmethod
    def backward_needed(self, gradient: Tensor, *saved: Tensor) -> Tensor:
        """Return the gradient of the needed part: [n, channels, *own output extents] -> [n, channels, *needed extents].

        ``saved`` are the tensors that ``forward_needed`` keeps.
        """


class SpatialMaxPool(_SpatialPool):
    """Replaces a ``MaxPool2d`` or ``MaxPool3d``; keeps the positions of the maxima."""

    fill = -torch.inf

    def forward_needed(self, needed: Tensor) -> list[Tensor]:
        windows = self.plan.layer.windows
        kernel, stride, _, dilation, _ = (list(values) for values in zip(*windows, strict=True))
        pool: Any = {2: F.max_pool2d, 3: F.max_pool3d}[len(windows)]
        return list(pool(needed, kernel, stride, dilation=dilation, return_indices=True))

    def backward_needed(self, gradient: Tensor, *saved: Tensor) -> Tensor:
        grad_needed = gradient.new_zeros(self.plan.needed_shape(gradient))
        grad_needed.flatten(2).scatter_add_(2, saved[0].flatten(2), gradient.flatten(2))
        return grad_needed


class SpatialAveragePool(_SpatialPool):
    """Replaces an ``AvgPool2d`` or ``AvgPool3d``: the sum in every window, by a depthwise convolution with ones."""

    fill = 0.0

    def __init__(self, layer: nn.AvgPool2d | nn.AvgPool3d, grid: SpatialGrid, windows: HaloLayer) -> None:
        super().__init__(grid, windows)
        outputs = self.plan.halo().outputs
        divisor = layer.divisor_override
        factors = torch.full([len(extent) for extent in outputs], 1.0 / (divisor or 1), dtype=torch.float64)
        if not divisor:
            factors = 1.0 / _window_sizes(windows, outputs, layer.count_include_pad)
        self.register_buffer("_factors", factors, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own input extents] -> [n, channels, *own output extents]."""
        summed = super().forward(x)
        return summed * self.get_buffer("_factors").to(summed.dtype)

    def forward_needed(self, needed: Tensor) -> list[Tensor]:
        operation, ones = _ones_convolution(needed, self.plan)
        return [operation.forward(needed, ones, None)]

    def backward_needed(self, gradient: Tensor, *saved: Tensor) -> Tensor:
        needed = gradient.new_empty(1).expand(self.plan.needed_shape(gradient))
        operation, ones = _ones_convolution(needed, self.plan)
        grad_needed = operation.backward(gradient, needed, ones, (True, False, False))[0]
        assert grad_needed is not None
        return grad_needed


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


def group_statistics(x: Tensor, positions: Tensor, count: int, group: RankGroup) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance [channels] over all ranks' parts. Collective.

    Means and variances are combined, not sums of squares, which lose precision if the mean is large.

    Args:
        x: This rank's part [n, channels, *own extents].
        positions: Number of positions of every rank's part [ranks], on the device of ``x``.
        count: Their sum, which the host need not read from the device.
        group: The ranks that hold the parts.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    # Sample by sample first: a reduction over the innermost dims is fast on a cpu.
    variances, means = torch.var_mean(wide.flatten(2), dim=2, correction=0)
    mean = means.mean(0)
    variance = variances.mean(0) + (means - mean).square().mean(0)
    statistics = torch.stack([mean, variance])
    parts = all_gather_equal_parts(statistics, group)
    weights = positions.to(statistics.dtype)[:, None] / count
    mean = (weights * parts[:, 0]).sum(0)
    return mean, (weights * (parts[:, 1] + (parts[:, 0] - mean).square())).sum(0)


class _SpatialBatchNormFunction(torch.autograd.Function):
    """Output, mean and variance; gradients flow through the output alone, as in torch's own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: SpatialBatchNorm
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = group_statistics(x, norm.get_buffer("_positions"), norm.count, norm.group)
        ctx.eps, ctx.count, ctx.group = norm.eps, x.shape[0] * norm.count, norm.group
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=norm.eps), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_of_statistics: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight
        # torch's own kernel for known statistics: the sums over this part of gradient * normalised x, and of gradient.
        # On cuda statistics that a forward pass has not saved are empty tensors, not absent ones.
        unsaved = mean.new_empty(0)
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, scale, mean, variance, unsaved, unsaved, False, ctx.eps, (False, True, True)
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_weight, grad_bias]).to(mean.dtype)
            dist.all_reduce(sums, group=ctx.group.members())
            # scale / std * (gradient - mean of gradient - x^ * mean of gradient * x^), x^ being x normalised.
            weight_mean, bias_mean = sums / ctx.count
            inverse = torch.rsqrt(variance + ctx.eps)
            factor = scale.to(inverse.dtype) * inverse
            x_factor = -factor * inverse * weight_mean
            constant = -factor * bias_mean - x_factor * mean
            per_channel = (1, -1, *[1] * (x.dim() - 2))
            grad_x = (x * x_factor.view(per_channel)).add_(constant.view(per_channel))
            grad_x = grad_x.addcmul_(gradient.to(inverse.dtype), factor.view(per_channel)).to(x.dtype)
        return grad_x, None if weight is None else grad_weight, None if weight is None else grad_bias, None


class SpatialBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Replaces a ``BatchNorm2d`` or ``BatchNorm3d``: statistics are those of all ranks' parts together.

    In eval mode running statistics are used, without communication.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, positions: tuple[int, ...], group: RankGroup) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self._parameters.update(norm._parameters)
        self._buffers.update(norm._buffers)
        # A copy from the host in every forward pass would wait for the device.
        self.register_buffer("_positions", torch.tensor(positions, dtype=torch.float64), persistent=False)
        self.count, self.group = sum(positions), group
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own extents] -> the same."""
        if not self.training and self.track_running_stats:
            return super().forward(x)
        out, mean, variance = _SpatialBatchNormFunction.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self
        )
        if self.training and self.track_running_stats:
            count = x.shape[0] * self.count
            update_running_statistics(self, mean, variance * (count / (count - 1)))
        normalised: Tensor = out
        return normalised

    def _check_input_dim(self, x: Tensor) -> None:
        assert x.dim() in (4, 5), f"{x.dim()} dims"
