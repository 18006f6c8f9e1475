"""BatchNorm over feature maps that are split over ranks (Ioffe and Szegedy 2015; variances combined after Chan et al.

1983).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.strategies.spatial.halo_exchange import all_gather_equal_parts


class _BatchStatistics(NamedTuple):
    """Per channel, over all parts."""

    mean: Tensor
    variance: Tensor
    """Biased: of these values, not of what they were drawn from."""


def group_statistics(x: Tensor, positions: tuple[int, ...], group: RankGroup) -> _BatchStatistics:
    """Of ``x`` [n, channels, *own extents], the part of one rank; ``positions`` are those of every rank.

    Means and variances are combined, not sums of squares: of those little is left where the mean is large.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    # Row by row first: a reduction over the innermost dims is fast on a cpu.
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
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, scale, mean, variance, None, None, False, ctx.eps, (False, True, True)
        )
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_weight, of_bias]).to(mean.dtype)
            dist.all_reduce(sums, group=ctx.group.members())
            of_x = _input_gradient(gradient, x, scale, _BatchStatistics(mean, variance), ctx.eps, sums / ctx.count)
        return of_x, None if weight is None else of_weight, None if weight is None else of_bias, None, None, None


def _input_gradient(
    gradient: Tensor, x: Tensor, scale: Tensor, statistics: _BatchStatistics, eps: float, means: Tensor
) -> Tensor:
    """scale / std * (gradient - mean of gradient - x^ * mean of gradient * x^), x^ being x normalised."""
    inverse = torch.rsqrt(statistics.variance + eps)
    factor = scale.to(inverse.dtype) * inverse
    of_x = -factor * inverse * means[0]
    constant = -factor * means[1] - of_x * statistics.mean

    def along(one: Tensor) -> Tensor:
        return one.view(1, -1, *[1] * (x.dim() - 2))

    found = (x * along(of_x)).add_(along(constant)).addcmul_(gradient.to(inverse.dtype), along(factor))
    return found.to(x.dtype)


class SpatialBatchNorm(nn.modules.batchnorm._BatchNorm):
    """In place of a ``BatchNorm2d`` or ``BatchNorm3d``: what it sees of a batch is what all ranks hold together.

    In eval mode running statistics are used and nothing is sent.
    """

    def __init__(self, whole: nn.modules.batchnorm._BatchNorm, positions: tuple[int, ...], group: RankGroup) -> None:
        super().__init__(whole.num_features, whole.eps, whole.momentum, whole.affine, whole.track_running_stats)
        for name, parameter in whole._parameters.items():
            self._parameters[name] = parameter
        for name, buffer in whole._buffers.items():
            self._buffers[name] = buffer
        self._positions, self._group = positions, group
        self.train(whole.training)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, *own extents] -> the same."""
        if not self.training and self.track_running_stats:
            return super().forward(x)
        out, mean, variance = _SpatialBatchNormFunction.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self._positions, self._group
        )
        if self.training and self.track_running_stats:
            self._note(mean, variance, x.shape[0] * sum(self._positions))
        normalised: Tensor = out
        return normalised

    def _check_input_dim(self, x: Tensor) -> None:
        assert x.dim() in (4, 5), f"{x.dim()} dims"

    @torch.no_grad()
    def _note(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            assert self.num_batches_tracked is not None, "a cumulative average without a count"
            momentum = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), momentum)
