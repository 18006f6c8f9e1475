"""What a pipeline must compute, in one process: the data-parallel reference with BatchNorm as the run asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.worker.compare import Trained
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.reference import train_reference

_BatchNorm = nn.modules.batchnorm._BatchNorm


def train_pipeline(
    model: nn.Module, spec: RunSpec, feed: Feed, steps: Iterable[int], tick: Callable[[], None] = lambda: None
) -> Trained:
    """As ``train_reference``; with ``batch_norm = "deferred"`` running statistics are of replica 0's whole share."""
    if spec.options.get("batch_norm") != "deferred":
        return train_reference(model, spec, feed, steps, tick)
    norms = [one for one in model.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]
    whole = _WholeShares(norms)
    replica = 0

    def after_replica() -> None:
        nonlocal replica
        whole.finish(counts=replica == 0)
        replica = (replica + 1) % feed.replicas
        tick()

    return train_reference(model, spec, feed, steps, after_replica)


class _WholeShares:
    """Keeps what every layer is given, and replaces what the micro-batches made of its running statistics."""

    def __init__(self, norms: list[_BatchNorm]) -> None:
        self._given: dict[_BatchNorm, list[Tensor]] = {one: [] for one in norms}
        self._before = {one: _statistics(one) for one in norms}
        for norm in norms:
            norm.register_forward_pre_hook(self._see)

    def _see(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        self._given[norm].append(inputs[0].detach())

    def finish(self, counts: bool) -> None:
        """A share is through; that of a replica which does not count leaves no trace."""
        for norm, given in self._given.items():
            for now, before in zip(_buffers(norm), self._before[norm], strict=True):
                now.copy_(before)
            if counts:
                with torch.no_grad():
                    # The layer's own rule, once over everything: its output is of no use.
                    norm.forward(torch.cat(given))
            given.clear()
            self._before[norm] = _statistics(norm)


def _buffers(norm: _BatchNorm) -> list[Tensor]:
    return [one for one in (norm.running_mean, norm.running_var, norm.num_batches_tracked) if one is not None]


def _statistics(norm: _BatchNorm) -> list[Tensor]:
    return [one.clone() for one in _buffers(norm)]
