"""The single-process reference of a pipeline run: the data-parallel reference with the run's BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.strategies.pipeline import pipeline_layout
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.strategies.pipeline.stage_assignment import assign_blocks
from hpcbench.worker.verification.reference import TrainingRecord, train_reference

_BatchNorm = nn.modules.batchnorm._BatchNorm


def train_pipeline_reference(
    model: nn.Module, spec: RunSpec, feed: DataFeed, steps: Iterable[int], tick: Callable[[], None] = lambda: None
) -> TrainingRecord:
    """Train the reference in one process (see ``train_reference``), with the pipeline's BatchNorm statistics.

    With ``batch_norm = "deferred"`` running statistics are those of replica 0's whole batch.
    """
    if spec.options.get("stage_replicas"):
        assert isinstance(model, nn.Sequential), "a pipeline of no sequence"
        first = _FirstReplicaStatistics(model, spec)

        def after_step() -> None:
            first.begin()
            tick()

        return train_reference(model, spec, feed, steps, after_step)
    if spec.options.get("batch_norm") != "deferred":
        return train_reference(model, spec, feed, steps, tick)
    norms = [norm for norm in model.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    whole = _WholeBatchStatistics(norms)
    replica = 0

    def after_replica() -> None:
        nonlocal replica
        whole.finish(counts=replica == 0)
        replica = (replica + 1) % feed.replicas
        tick()

    return train_reference(model, spec, feed, steps, after_replica)


class _FirstReplicaStatistics:
    """Only every ``n``-th micro-batch of a stage with ``n`` replicas moves running statistics: the first replica's."""

    def __init__(self, model: nn.Sequential, spec: RunSpec) -> None:
        layout = pipeline_layout(spec)
        self._seen: dict[nn.Module, int] = {}
        self._kept: list[Tensor] = []
        for stage, held in enumerate(assign_blocks(model, spec, options_with_defaults(spec), layout)):
            for block in list(model)[held.start : held.stop]:
                block.register_forward_pre_hook(self._before)
                block.register_forward_hook(partial(self._after, layout.stage_sizes[stage]))
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._seen.clear()

    def _before(self, block: nn.Module, _inputs: Any) -> None:
        self._kept = [one.clone() for one in block.buffers()]

    def _after(self, width: int, block: nn.Module, _inputs: Any, _output: Any) -> None:
        seen = self._seen[block] = self._seen.get(block, -1) + 1
        if seen % width:
            for buffer, kept in zip(block.buffers(), self._kept, strict=True):
                buffer.data.copy_(kept)


class _WholeBatchStatistics:
    """Keeps every layer's inputs, and computes its running statistics once from all of them."""

    def __init__(self, norms: list[_BatchNorm]) -> None:
        self._inputs: dict[_BatchNorm, list[Tensor]] = {norm: [] for norm in norms}
        self._before = {norm: _copy_running_statistics(norm) for norm in norms}
        for norm in norms:
            norm.register_forward_pre_hook(self._record)

    def _record(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        self._inputs[norm].append(inputs[0].detach())

    def finish(self, counts: bool) -> None:
        """End a replica's batch; unless it ``counts``, the running statistics are restored."""
        for norm, inputs in self._inputs.items():
            for now, before in zip(_running_statistics(norm), self._before[norm], strict=True):
                now.copy_(before)
            if counts:
                with torch.no_grad():
                    # By the layer's own rule, once over the whole batch; the output is not used.
                    norm.forward(torch.cat(inputs))
            inputs.clear()
            self._before[norm] = _copy_running_statistics(norm)


def _running_statistics(norm: _BatchNorm) -> list[Tensor]:
    return [one for one in (norm.running_mean, norm.running_var, norm.num_batches_tracked) if one is not None]


def _copy_running_statistics(norm: _BatchNorm) -> list[Tensor]:
    return [one.clone() for one in _running_statistics(norm)]
