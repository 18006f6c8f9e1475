"""BatchNorm over feature maps that are split over ranks.

Sources: Ioffe and Szegedy 2015; variances are combined after Chan et al. 1983.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.strategies.model_parallel import all_gather_equal_parts, update_running_statistics


class _BatchStatistics(NamedTuple):
    """Statistics [channels] over all parts."""

    mean: Tensor
    variance: Tensor
    """Biased: divided by the number of values."""


def group_statistics(x: Tensor, positions: tuple[int, ...], group: RankGroup) -> _BatchStatistics:
    """Return mean and variance of every channel over all ranks' parts. Collective.

    Means and variances are combined, not sums of squares, which lose precision if the mean is large.

    Args:
        x: This rank's part [n, channels, *own extents].
        positions: Number of positions of every rank's part.
        group: The ranks that hold the parts.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    # Sample by sample first: a reduction over the innermost dims is fast on a cpu.
    variances, means = torch.var_mean(wide.flatten(2), dim=2, correction=0)
    mean = means.mean(0)
    variance = variances.mean(0) + (means - mean).square().mean(0)
    own = torch.stack([mean, variance])
    parts = all_gather_equal_parts(own, group)
    weights = own.new_tensor(positions)[:, None] / sum(positions)
    mean = (weights * parts[:, 0]).sum(0)
    return _BatchStatistics(mean, (weights * (parts[:, 1] + (parts[:, 0] - mean).square())).sum(0))


class _SpatialBatchNormFunction(torch.autograd.Function):
    """Output, mean and variance; gradients flow through the output alone, as in torch's own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, positions: Any, group: RankGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = group_statistics(x, positions, group)
        ctx.eps, ctx.count, ctx.group = eps, x.shape[0] * sum(positions), group
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_of_statistics: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight
        # torch's own kernel for known statistics: the sums over this part of gradient * normalised x, and of gradient.
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, scale, mean, variance, None, None, False, ctx.eps, (False, True, True)
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_weight, grad_bias]).to(mean.dtype)
            dist.all_reduce(sums, group=ctx.group.members())
            grad_x = _input_gradient(gradient, x, scale, _BatchStatistics(mean, variance), ctx.eps, sums / ctx.count)
        return grad_x, None if weight is None else grad_weight, None if weight is None else grad_bias, None, None, None


def _input_gradient(
    gradient: Tensor, x: Tensor, scale: Tensor, statistics: _BatchStatistics, eps: float, means: Tensor
) -> Tensor:
    """scale / std * (gradient - mean of gradient - x^ * mean of gradient * x^), x^ being x normalised."""
    inverse = torch.rsqrt(statistics.variance + eps)
    factor = scale.to(inverse.dtype) * inverse
    x_factor = -factor * inverse * means[0]
    constant = -factor * means[1] - x_factor * statistics.mean
    per_channel = (1, -1, *[1] * (x.dim() - 2))
    grad_x = (x * x_factor.view(per_channel)).add_(constant.view(per_channel))
    return grad_x.addcmul_(gradient.to(inverse.dtype), factor.view(per_channel)).to(x.dtype)


class SpatialBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Replaces a ``BatchNorm2d`` or ``BatchNorm3d``: statistics are those of all ranks' parts together.

    In eval mode running statistics are used, without communication.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, positions: tuple[int, ...], group: RankGroup) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self._parameters.update(norm._parameters)
        self._buffers.update(norm._buffers)
        self._positions, self._group = positions, group
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own extents] -> the same."""
        if not self.training and self.track_running_stats:
            return super().forward(x)
        out, mean, variance = _SpatialBatchNormFunction.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self._positions, self._group
        )
        if self.training and self.track_running_stats:
            count = x.shape[0] * sum(self._positions)
            update_running_statistics(self, mean, variance * (count / (count - 1)))
        normalised: Tensor = out
        return normalised

    def _check_input_dim(self, x: Tensor) -> None:
        assert x.dim() in (4, 5), f"{x.dim()} dims"
