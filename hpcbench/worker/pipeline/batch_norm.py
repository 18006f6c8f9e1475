"""BatchNorm's running statistics of whole mini-batches (torchgpipe's ``DeferredBatchNorm``, Kim et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hpcbench.parallel.schedule import FORWARD, Action

_BatchNorm = nn.modules.batchnorm._BatchNorm


class DeferredStatistics:
    """A micro-batch is still normalised by its own mean and variance; the running ones move once per step.

    Sums are kept in fp32 at least. What a backward pass computes again is not counted twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [one for one in module.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]
        self._sums: dict[_BatchNorm, list[Tensor]] = {}
        self._is_counting = False
        for norm in self._norms:
            norm.register_forward_pre_hook(self._see)

    def before(self, action: Action) -> None:
        """Backward passes compute again what was counted."""
        self._is_counting = action.kind == FORWARD

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all forward and backward passes of a step."""
        kept = [(norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm in self._norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, (momentum, count) in zip(self._norms, kept, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, count
            self._sums, seen = {}, self._sums
        for norm, (total, squares, number) in seen.items():
            _move(norm, total, squares, number)

    def _see(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not (self._is_counting and norm.training):
            return
        assert isinstance(norm, _BatchNorm)
        x: Tensor = inputs[0].detach()
        x = x if x.dtype == torch.float64 else x.float()
        over = [dim for dim in range(x.dim()) if dim != 1]
        new = [x.sum(over), (x * x).sum(over), torch.tensor(float(x.numel() // x.shape[1]))]
        before = self._sums.get(norm)
        self._sums[norm] = new if before is None else [a + b for a, b in zip(before, new, strict=True)]


def _move(norm: _BatchNorm, total: Tensor, squares: Tensor, number: Tensor) -> None:
    """As torch does for one batch of ``number`` values per channel: the unbiased variance."""
    assert norm.running_mean is not None, "running statistics that are not tracked"
    assert norm.running_var is not None, "running statistics that are not tracked"
    assert norm.num_batches_tracked is not None, "running statistics that are not tracked"
    count = number.item()
    mean = total / count
    variance = (squares / count - mean * mean).clamp(min=0.0) * (count / max(count - 1, 1))
    norm.num_batches_tracked += 1
    factor = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked.item()
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), factor)
