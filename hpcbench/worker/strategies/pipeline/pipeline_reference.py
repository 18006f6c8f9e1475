"""The single-process reference of a pipeline run: the data-parallel reference with the run's BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.strategies.pipeline import pipeline_layout
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.strategies.base import chosen_options
from hpcbench.worker.strategies.pipeline.stage_assignment import assign_blocks
from hpcbench.worker.verification.reference import TrainingRecord, train_reference

_BatchNorm = nn.modules.batchnorm._BatchNorm


def train_pipeline_reference(
    model: nn.Module, spec: RunSpec, feed: DataFeed, steps: Iterable[int], tick: Callable[[], None] = lambda: None
) -> TrainingRecord:
    """As ``train_reference``; with ``batch_norm = "deferred"`` running statistics are of replica 0's whole share."""
    if spec.options.get("stage_replicas"):
        assert isinstance(model, nn.Sequential), "a pipeline of no sequence"
        first = _FirstReplicaStatistics(model, spec)

        def after_step() -> None:
            first.begin()
            tick()

        return train_reference(model, spec, feed, steps, after_step)
    if spec.options.get("batch_norm") != "deferred":
        return train_reference(model, spec, feed, steps, tick)
    norms = [one for one in model.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]
    whole = _WholeBatchStatistics(norms)
    replica = 0

    def after_replica() -> None:
        nonlocal replica
        whole.finish(counts=replica == 0)
        replica = (replica + 1) % feed.replicas
        tick()

    return train_reference(model, spec, feed, steps, after_replica)


class _FirstReplicaStatistics:
    """Of a stage with ``n`` replicas every ``n``-th micro-batch alone moves running statistics: the first one's."""

    def __init__(self, model: nn.Sequential, spec: RunSpec) -> None:
        layout = pipeline_layout(spec)
        self._seen: dict[nn.Module, int] = {}
        self._kept: list[Tensor] = []
        for stage, held in enumerate(assign_blocks(model, spec, chosen_options(spec), layout)):
            for block in list(model)[held.start : held.stop]:
                block.register_forward_pre_hook(self._before)
                block.register_forward_hook(partial(self._after, layout.stage_sizes[stage]))
        self.begin()

    def begin(self) -> None:
        """The next micro-batch is a step's first."""
        self._seen.clear()

    def _before(self, block: nn.Module, _given: Any) -> None:
        self._kept = [one.clone() for one in block.buffers()]

    def _after(self, width: int, block: nn.Module, _given: Any, _output: Any) -> None:
        seen = self._seen[block] = self._seen.get(block, -1) + 1
        if seen % width:
            for buffer, kept in zip(block.buffers(), self._kept, strict=True):
                buffer.data.copy_(kept)


class _WholeBatchStatistics:
    """Keeps what every layer is given, and replaces what the micro-batches made of its running statistics."""

    def __init__(self, norms: list[_BatchNorm]) -> None:
        self._given: dict[_BatchNorm, list[Tensor]] = {one: [] for one in norms}
        self._before = {one: _copy_running_statistics(one) for one in norms}
        for norm in norms:
            norm.register_forward_pre_hook(self._see)

    def _see(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        self._given[norm].append(inputs[0].detach())

    def finish(self, counts: bool) -> None:
        """A share is through; that of a replica which does not count leaves no trace."""
        for norm, given in self._given.items():
            for now, before in zip(_running_statistics(norm), self._before[norm], strict=True):
                now.copy_(before)
            if counts:
                with torch.no_grad():
                    # The layer's own rule, once over everything: its output is of no use.
                    norm.forward(torch.cat(given))
            given.clear()
            self._before[norm] = _copy_running_statistics(norm)


def _running_statistics(norm: _BatchNorm) -> list[Tensor]:
    return [one for one in (norm.running_mean, norm.running_var, norm.num_batches_tracked) if one is not None]


def _copy_running_statistics(norm: _BatchNorm) -> list[Tensor]:
    return [one.clone() for one in _running_statistics(norm)]
