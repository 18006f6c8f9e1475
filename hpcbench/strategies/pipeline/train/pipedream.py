"""PipeDream: an asynchronous pipeline with weight stashing and an update per minibatch.

Two stages. Stage 0 is one minibatch ahead, so its backward pass of minibatch m uses the weights that its forward pass
of m used, one update older than the newest (``v``: version)::

    stage 0   F0 v0   F1 v0   B0 v0 U   F2 v1   B1 v0 U   F3 v2   B2 v1 U
    stage 1           F0 v0 B0 U        F1 v1 B1 U        F2 v2 B2 U

Source: Narayanan et al. 2019 (SOSP).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.pipeline.entry import pipedream_staleness
from hpcbench.strategies.pipeline.schedules import BACKWARD, UPDATE, Action
from hpcbench.strategies.pipeline.train.pipeline_runtime import ActionHooks, PipelineBatch
from hpcbench.strategies.pipeline.train.pipeline_strategy import PipelineStrategy
from hpcbench.strategies.pipeline.weight_versions import Staleness, stage_step_actions
from hpcbench.worker.data.feed import DataFeed, MinibatchSequence
from hpcbench.worker.distributed.process_groups import RankContext


class WeightStash:
    """The weight versions of ``module``, stage number ``stage``, for the minibatches in flight.

    The parameters themselves are the newest version, which the optimizer changes in place; before it does, their
    memory is kept if an older minibatch still needs it, and the parameters move to a copy. So there are never more
    versions than the schedule requires. Buffers have no versions: statistics follow the order of the forward passes.
    """

    def __init__(self, module: nn.Module, staleness: Staleness, stage: int) -> None:
        self._staleness, self._stage = staleness, stage
        self._parameters = list(module.parameters())
        index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._slots = [
            (owner, name, index_of[id(parameter)])
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._older: dict[int, list[Tensor]] = {}
        self._in_use: dict[int, list[Tensor]] = {}
        self.updates = 0
        """Updates so far."""

    @property
    def versions(self) -> int:
        """Number of versions in memory, including the newest."""
        return len(self._older) + 1

    @contextmanager
    def installed(self, number: int, update: int) -> Iterator[None]:
        """Let ``module`` compute minibatch ``number`` with its weight version.

        ``update`` is the update that its gradient contributes to. Every call for one minibatch installs the same
        tensors, so that a block recomputed in the backward pass uses the weights of the forward pass.
        """
        if number not in self._in_use:
            version = self._staleness.version(self._stage, update)
            weights = self._parameters if version == self.updates else self._older[version]
            # Not detach(): its result shares the parameter's version counter, and autograd would refuse the old memory
            # as soon as the optimizer writes into the new one.
            self._in_use[number] = [
                weight.data.requires_grad_(parameter.requires_grad)
                for weight, parameter in zip(weights, self._parameters, strict=True)
            ]
        for owner, name, index in self._slots:
            owner._parameters[name] = self._in_use[number][index]  # type: ignore[assignment]
        try:
            yield
        finally:
            for owner, name, index in self._slots:
                owner._parameters[name] = self._parameters[index]

    def collect(self, number: int) -> None:
        """Add the gradients of minibatch ``number``, after its backward pass, to those of the parameters."""
        for parameter, leaf in zip(self._parameters, self._in_use.pop(number), strict=True):
            if leaf.grad is not None:
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad.add_(leaf.grad)

    def before_update(self) -> None:
        """Free versions that no minibatch needs any more, and keep the one that the optimizer will overwrite."""
        oldest = self._staleness.version(self._stage, self.updates + 1)
        self._older = {version: weights for version, weights in self._older.items() if version >= oldest}
        if oldest <= self.updates:
            self._older[self.updates] = [parameter.data for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()
        self.updates += 1


class PipedreamStrategy(PipelineStrategy):
    """Every micro-batch is a minibatch with its own update; with double buffers there is one update per step.

    A step is the window from one update of a stage to the same update of the next step: it has as many forward as
    backward passes, but the forward passes of stage ``s`` of ``n`` are ``n - 1 - s`` minibatches ahead, in later steps.
    After a step all stages have made the same updates, and the last one has computed the step's losses.
    """

    reference = "pipedream"

    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        super().setup(model, spec, context)
        if self._ties:
            raise unsupported(
                f"pipedream on {spec.pp_degree} stages: {spec.model} has weights that two stages share, "
                f"{self._ties[0].name}, and each would have versions of its own",
                "a model without tied weights, or 1f1b",
            )
        self._staleness: Staleness = pipedream_staleness(spec)
        self._stash = WeightStash(self.module.chunk(self.group.place), self._staleness, self.group.place)
        self._step_order: Sequence[int] = ()
        self._steps_done = 0
        self.peak_versions = 1
        """Largest number of weight versions of this stage so far."""
        self.runtime.reducers = {}
        self.runtime.hooks = ActionHooks(self._before, self._after)

    def announce(self, steps: Sequence[int]) -> None:
        self._step_order = steps

    def step(self, feed: DataFeed, step: int) -> Tensor:
        if self._steps_done == 0:
            self._minibatches = MinibatchSequence(feed, self._step_order)
        minibatches, index = self._minibatches, self._steps_done
        expected = minibatches.step(index)
        assert expected == step, f"step {step} where {expected} was forwarded already"
        self._steps_done += 1
        self.clear_gradients()
        self.runtime.phases = self.phases
        windows = [self._window(minibatches, index, stage) for stage in range(self.layout.stages)]
        self.runtime.begin(windows, self._batch(feed, minibatches, index, windows))
        self.runtime.execute()
        return self.runtime.end()

    def _window(self, minibatches: MinibatchSequence, index: int, stage: int) -> list[Action]:
        """Return the actions of ``stage`` in step ``index``, with micro-batches numbered over all steps."""
        count, next_count = minibatches.count(index), minibatches.count(index + 1)
        actions = stage_step_actions(self.layout, self._staleness, stage, count, next_count, index == 0)
        first = minibatches.first(index)
        return [action._replace(micro_batch=action.micro_batch + first) for action in actions]

    def _batch(
        self, feed: DataFeed, minibatches: MinibatchSequence, index: int, windows: list[list[Action]]
    ) -> PipelineBatch:
        """Return the inputs of the first stage's forward passes and the targets of the last stage's."""
        first, count = minibatches.first(index), minibatches.count(index)
        numbers = range(first, 1 + max(action.micro_batch for window in windows for action in window))
        entries = {number: minibatches.at(number) for number in numbers}
        sizes = {number: entry.sizes[self.replica] for number, entry in entries.items()}
        self._prepare_boundaries(feed, sizes.values())
        total = minibatches.samples(index)
        divisors = {number: entry.samples for number, entry in entries.items()}
        if self._staleness.double_buffered:
            divisors = dict.fromkeys(numbers, total)
        loss_weights = {number: divisor / total for number, divisor in divisors.items()}
        with self.phases("data"):
            is_first, is_last = self.group.place == 0, self.group.place == self.layout.stages - 1
            inputs = {number: minibatches.batch(number, self.replica)[0] for number in numbers if is_first}
            targets = {number: minibatches.batch(number, self.replica)[1] for number in numbers[:count] if is_last}
        return PipelineBatch(inputs, targets, sizes, divisors, loss_weights)

    def _before(self, action: Action) -> None:
        if action.kind != UPDATE:
            number = action.micro_batch
            update = self._minibatches.at(number).step if self._staleness.double_buffered else number
            self._installed_weights = self._stash.installed(number, update)
            self._installed_weights.__enter__()

    def _after(self, action: Action) -> None:
        if action.kind == UPDATE:
            self._update(action.micro_batch)
            return
        self._installed_weights.__exit__(None, None, None)
        if action.kind == BACKWARD:
            self._stash.collect(action.micro_batch)

    def _update(self, number: int) -> None:
        with self.phases("backward"):
            self.finish_gradient_reduction()
        with self.phases("optimizer"):
            self._stash.before_update()
            self.peak_versions = max(self.peak_versions, self._stash.versions)
            self.update()
            step, position, _ = self._minibatches.at(number)
            if position + 1 < self._minibatches.count(step):
                # The gradients of the step's last update stay, for ``gradients``.
                self.clear_gradients()
