"""Pools of feature maps that are cut. Padding is a pool's own: never the largest, and not always counted."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.parallel.halo import Box, Halo, Layer, volume
from hpcbench.worker.spatial.exchange import Cut, assembled, check, own_gradient, return_halo, send_halo

_MAX = {2: F.max_pool2d, 3: F.max_pool3d}


class _Plan(NamedTuple):
    cut: Cut
    layer: Layer

    def halo(self) -> Halo:
        return self.cut.halo(self.layer)

    def whole(self, x: Tensor, fill: float) -> Tensor:
        """The own part with its halo and padding."""
        needs = self.halo()
        check(x, needs.own)
        received = send_halo(self.cut, needs, x).wait()
        image = tuple(range(extent) for extent in self.layer.extents)
        return assembled(x, received, needs, needs.needed, image, fill)

    def returned(self, gradient: Tensor) -> Tensor:
        """The gradient of the own part."""
        needs = self.halo()
        return own_gradient(needs, gradient, return_halo(self.cut, needs, gradient))

    def needed_shape(self, like: Tensor) -> tuple[int, ...]:
        return (*like.shape[:2], *(len(one) for one in self.halo().needed))


class _MaxPool(torch.autograd.Function):
    """Keeps where the largest were, and no input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan) -> Tensor:
        windows = plan.layer.windows
        out, places = _MAX[x.dim() - 2](
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


class _SumPool(torch.autograd.Function):
    """The sum in every window, by a depthwise convolution with ones; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        whole = plan.whole(x, 0.0)
        return torch.convolution(whole, *_ones(whole, plan))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        plan: _Plan = ctx.plan
        whole = gradient.new_empty(1).expand(plan.needed_shape(gradient))
        weight, bias, *rest = _ones(whole, plan)
        found = torch.ops.aten.convolution_backward(gradient, whole, weight, bias, *rest, (True, False, False))[0]
        return plan.returned(found), None


def _ones(x: Tensor, plan: _Plan) -> tuple[Any, ...]:
    windows, channels = plan.layer.windows, x.shape[1]
    none = [0] * len(windows)
    weight = x.new_ones((channels, 1, *(one.kernel for one in windows)))
    return weight, None, [one.stride for one in windows], none, [1] * len(windows), False, none, channels


class SplitMaxPool(nn.Module):
    """In place of a ``MaxPool2d`` or ``MaxPool3d``."""

    def __init__(self, cut: Cut, layer: Layer) -> None:
        super().__init__()
        self._plan = _Plan(cut, layer)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own input extents] -> [n, channels, *own output extents]."""
        out: Tensor = _MaxPool.apply(x, self._plan)  # type: ignore[no-untyped-call]
        return out


class SplitAveragePool(nn.Module):
    """In place of an ``AvgPool2d`` or ``AvgPool3d``."""

    def __init__(self, whole: nn.AvgPool2d | nn.AvgPool3d, cut: Cut, layer: Layer) -> None:
        super().__init__()
        self._plan = _Plan(cut, layer)
        outputs = self._plan.halo().outputs
        divisor = whole.divisor_override
        shares = torch.full([len(one) for one in outputs], 1.0 / (divisor or 1), dtype=torch.float64)
        if not divisor:
            shares = 1.0 / _counted(layer, outputs, whole.count_include_pad)
        self.register_buffer("_shares", shares, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own input extents] -> [n, channels, *own output extents]."""
        summed: Tensor = _SumPool.apply(x, self._plan)  # type: ignore[no-untyped-call]
        return summed * self.get_buffer("_shares").to(summed.dtype)


def _counted(layer: Layer, outputs: Box, with_padding: bool) -> Tensor:
    """How many positions each window of ``outputs`` is divided by: torch's rule, dim by dim."""
    counts = torch.ones((), dtype=torch.float64)
    for extent, window, wanted in zip(layer.extents, layer.windows, outputs, strict=True):
        beyond = window.padding if with_padding else 0
        along = []
        for output in wanted:
            first = output * window.stride - window.padding
            along.append(min(first + window.kernel, extent + beyond) - max(first, -beyond))
        counts = counts[..., None] * torch.tensor(along, dtype=torch.float64)
    assert counts.numel() == volume(outputs), "one number per output"
    return counts
