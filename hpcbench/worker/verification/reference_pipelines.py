"""The reference trainings of pipelines in one process.

A synchronous pipeline trains as data parallelism does, with its own running statistics of BatchNorm. PipeDream applies
delayed gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.pipeline.entry import pipedream_staleness, pipeline_layout
from hpcbench.strategies.pipeline.schedules import PipelineLayout
from hpcbench.strategies.pipeline.stage_partition import block_ranges
from hpcbench.strategies.pipeline.train.stage_assignment import assign_blocks
from hpcbench.strategies.pipeline.weight_versions import forwards_ahead_at_step_end
from hpcbench.worker.data.feed import DataFeed, MinibatchSequence
from hpcbench.worker.model_execution import MixedPrecision, summed_loss
from hpcbench.worker.strategy import make_optimizer, resolve_runtime
from hpcbench.worker.verification.reference import ReferenceTrainer, TrainingRecord, restored_buffers, train_reference

_BatchNorm = nn.modules.batchnorm._BatchNorm


def train_pipeline_reference(
    model: nn.Module, spec: RunSpec, feed: DataFeed, steps: Iterable[int], tick: Callable[[], None] = lambda: None
) -> TrainingRecord:
    """Train the reference in one process (see ``train_reference``), with the pipeline's BatchNorm statistics.

    With ``batch_norm = "deferred"`` running statistics are those of replica 0's whole batch.
    """
    if spec.options.get("stage_replicas"):
        assert isinstance(model, nn.Sequential), "a pipeline of no sequence"
        begin_step = _keep_first_replica_statistics(model, spec)

        def after_step() -> None:
            begin_step()
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


def _keep_first_replica_statistics(model: nn.Sequential, spec: RunSpec) -> Callable[[], None]:
    """Let only every ``n``-th micro-batch of a stage with ``n`` replicas move running statistics: the first replica's.

    Returns the function to call before each further step.
    """
    layout = pipeline_layout(spec)
    forwards: Counter[nn.Module] = Counter()
    saved: dict[nn.Module, list[Tensor]] = {}

    def before(block: nn.Module, _inputs: Any) -> None:
        saved[block] = [buffer.clone() for buffer in block.buffers()]

    def after(replicas: int, block: nn.Module, _inputs: Any, _output: Any) -> None:
        if forwards[block] % replicas:
            for buffer, value in zip(block.buffers(), saved[block], strict=True):
                buffer.data.copy_(value)
        forwards[block] += 1

    for replicas, held in zip(
        layout.stage_sizes, assign_blocks(model, spec, options_with_defaults(spec), layout), strict=True
    ):
        for block in list(model)[held.start : held.stop]:
            block.register_forward_pre_hook(before)
            block.register_forward_hook(partial(after, replicas))
    return forwards.clear


class _WholeBatchStatistics:
    """Keeps every layer's inputs, and computes its running statistics once from all of them."""

    def __init__(self, norms: list[_BatchNorm]) -> None:
        self._inputs: dict[_BatchNorm, list[Tensor]] = {norm: [] for norm in norms}
        self._before = {norm: [tensor.clone() for tensor in _running_statistics(norm)] for norm in norms}
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
            self._before[norm] = [tensor.clone() for tensor in _running_statistics(norm)]


def _running_statistics(norm: _BatchNorm) -> list[Tensor]:
    return [each for each in (norm.running_mean, norm.running_var, norm.num_batches_tracked) if each is not None]


def train_pipedream_reference(
    model: nn.Sequential, spec: RunSpec, feed: DataFeed, steps: Iterable[int], tick: Callable[[], None] = lambda: None
) -> TrainingRecord:
    """``train_delayed`` with the stages that the run itself would have."""
    blocks = assign_blocks(model, spec, options_with_defaults(spec), PipelineLayout(spec.pp_degree))
    return train_delayed(model, spec, feed, steps, [stage.start for stage in blocks[1:]], tick)


def train_delayed(
    model: nn.Sequential, spec: RunSpec, feed: DataFeed, steps: Iterable[int], cuts: Sequence[int],
    tick: Callable[[], None] = lambda: None,
) -> TrainingRecord:  # fmt: skip
    """Train ``model`` in place on the steps numbered ``steps`` as a pipeline cut at ``cuts`` would.

    Every minibatch is forwarded by itself through all stages, each with the version of its weights that ``Staleness``
    says; the optimizer applies the gradient to the newest ones. Running statistics are those of replica 0, after as
    many forward passes as its stage has made when the last step ends.
    """
    steps = list(steps)
    simulated = _DelayedTraining(model, spec, feed, MinibatchSequence(feed, steps), cuts)
    trained = TrainingRecord()
    for position in range(len(steps)):
        trained.add_step(simulated.step(position, tick), model)
    simulated.run_ahead(len(steps))
    return trained.finish(model)


class _DelayedTraining:
    def __init__(
        self, model: nn.Sequential, spec: RunSpec, feed: DataFeed, minibatches: MinibatchSequence, cuts: Sequence[int]
    ) -> None:
        self._model = model.to(feed.device).train()
        self._stages = [model[part.start : part.stop] for part in block_ranges(cuts, len(model))]
        self._optimizer = make_optimizer(spec, model)
        self._arithmetic = MixedPrecision(spec.precision, feed.device)
        self._feed, self._minibatches = feed, minibatches
        self._delay = pipedream_staleness(spec)
        self._versions: list[dict[int, dict[str, Tensor]]] = [{} for _ in self._stages]
        self._updates = 0
        self._keep()

    def step(self, position: int, tick: Callable[[], None]) -> float:
        """All minibatches of a step and their updates; the step's loss."""
        first, count = self._minibatches.first(position), self._minibatches.count(position)
        total = self._minibatches.samples(position)
        summed = 0.0
        self._optimizer.zero_grad(set_to_none=True)
        for number in range(first, first + count):
            share = total if self._delay.double_buffered else self._minibatches.at(number).samples
            for replica in range(self._feed.replicas):
                summed += self._backward(number, replica, share)
                tick()
            is_last = number == first + count - 1
            if is_last or not self._delay.double_buffered:
                self._arithmetic.update(self._optimizer)
                self._updates += 1
                self._keep()
            if not is_last and not self._delay.double_buffered:
                self._optimizer.zero_grad(set_to_none=True)
        self._feed.free()
        return summed / total

    def run_ahead(self, position: int) -> None:
        """The forward passes that stages have made of the steps from ``position`` on, for the running statistics."""
        done, following = self._minibatches.first(position), self._minibatches.count(position)
        most = [forwards_ahead_at_step_end(self._delay, stage, following) for stage in range(len(self._stages))]
        with torch.no_grad():
            for number in range(done, done + max(most)):
                x, _ = self._minibatches.batch(number, 0)
                for stage, ahead in enumerate(most):
                    if number < done + ahead:
                        x = self._forward(stage, self._weights(stage, number), x)

    def _backward(self, number: int, replica: int, share: int) -> float:
        """Add the gradients of a minibatch to what there is; the sum of its samples' losses."""
        x, targets = self._minibatches.batch(number, replica)
        stage_weights = []
        with restored_buffers(self._model, restore=replica > 0):
            for stage in range(len(self._stages)):
                versioned = self._weights(stage, number)
                weights = {
                    name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in versioned.items()
                }
                stage_weights.append(weights)
                x = self._forward(stage, weights, x)
        loss = summed_loss(x, targets)
        self._arithmetic.backward(loss / share)
        for module, weights in zip(self._stages, stage_weights, strict=True):
            for name, parameter in module.named_parameters():
                gradient = weights[name].grad
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss.item()

    def _forward(self, stage: int, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        with self._arithmetic.autocast():
            output: Tensor = functional_call(self._stages[stage], weights, (x,))
        return output

    def _keep(self) -> None:
        """Copy what the last update has made; forget what no later minibatch is computed with."""
        for stage, (module, versions) in enumerate(zip(self._stages, self._versions, strict=True)):
            versions[self._updates] = {
                name: weight.detach().clone().requires_grad_(weight.requires_grad)
                for name, weight in module.named_parameters()
            }
            for old in [version for version in versions if version < self._delay.version(stage, self._updates)]:
                del versions[old]

    def _weights(self, stage: int, number: int) -> dict[str, Tensor]:
        update = self._minibatches.at(number).step if self._delay.double_buffered else number
        return self._versions[stage][self._delay.version(stage, update)]


REFERENCE_TRAINERS: dict[str, ReferenceTrainer] = {
    "data_parallel": train_reference, "pipeline": train_pipeline_reference, "pipedream": train_pipedream_reference,
}  # fmt: skip
"""Trainings in one process that strategies are compared with, by the name that reports of verification have."""


def resolve_reference_trainer(key: str) -> ReferenceTrainer:
    """Return the function that trains the reference of strategy ``key``."""
    return REFERENCE_TRAINERS[resolve_runtime(key).reference]
