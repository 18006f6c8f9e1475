"""PipeDream (Narayanan et al.

2019, SOSP): an asynchronous pipeline with weight stashing and an update per minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, overload

from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.pipeline.schedules import BACKWARD, FORWARD, UPDATE, Action, PipelineMessage, received_messages
from hpcbench.parallel.pipeline.weight_versions import Staleness, stage_step_actions
from hpcbench.parallel.strategies.pipedream import pipedream_staleness
from hpcbench.worker.data.feed import DataFeed, MinibatchSequence
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import summed_loss
from hpcbench.worker.strategies.pipeline.pipeline_runtime import ActionHooks, PipelineBatch, PipelineRuntime
from hpcbench.worker.strategies.pipeline.strategy import PipelineStrategy


class WeightStash:
    """Weights of ``module``, stage number ``stage``, for minibatches that are under way together.

    The parameters themselves are the newest version, which the optimizer changes in place; before it does, their
    memory is kept where an older minibatch still needs it and the parameters move to a copy. So there are never more
    than ``Delay.held`` versions. Buffers have no versions: statistics run on in the order of the forward passes.
    """

    def __init__(self, module: nn.Module, delay: Staleness, stage: int) -> None:
        self._delay, self._stage = delay, stage
        self._parameters = list(module.parameters())
        place = {id(one): number for number, one in enumerate(self._parameters)}
        self._slots = [
            (owner, name, place[id(one)])
            for owner in module.modules()
            for name, one in owner._parameters.items()
            if one is not None
        ]
        self._older: dict[int, list[Tensor]] = {}
        self._in_use: dict[int, list[Tensor]] = {}
        self.updates = 0
        """That were made."""

    @property
    def versions(self) -> int:
        """How many there are now, the parameters among them."""
        return len(self._older) + 1

    @contextmanager
    def installed(self, number: int, update: int) -> Iterator[None]:
        """In here ``module`` computes micro-batch ``number`` with the weights that are right for it.

        ``update`` is that which its gradient goes into. The same tensors are there whenever a micro-batch is asked for
        again: a block that is computed anew in the backward pass finds what it found before.
        """
        if number not in self._in_use:
            self._in_use[number] = self._leaves(update)
        for owner, name, place in self._slots:
            owner._parameters[name] = self._in_use[number][place]  # type: ignore[assignment]
        try:
            yield
        finally:
            for owner, name, place in self._slots:
                owner._parameters[name] = self._parameters[place]

    def collect(self, number: int) -> None:
        """Add the gradients of micro-batch ``number``, whose backward pass is done, to the parameters' own."""
        for parameter, leaf in zip(self._parameters, self._in_use.pop(number), strict=True):
            if leaf.grad is not None:
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad.add_(leaf.grad)

    def before_update(self) -> None:
        """Let go of what no minibatch needs any more, and keep what the optimizer is about to overwrite."""
        oldest = self._delay.version(self._stage, self.updates + 1)
        self._older = {version: held for version, held in self._older.items() if version >= oldest}
        if oldest <= self.updates:
            self._older[self.updates] = [one.data for one in self._parameters]
            for one in self._parameters:
                one.data = one.data.clone()
        self.updates += 1

    def _leaves(self, update: int) -> list[Tensor]:
        version = self._delay.version(self._stage, update)
        held = self._parameters if version == self.updates else self._older[version]
        # Not detach(): its result counts changes together with the parameter, and autograd would refuse the old memory
        # as soon as the optimizer writes into the new one.
        return [one.data.requires_grad_(own.requires_grad) for one, own in zip(held, self._parameters, strict=True)]


T = TypeVar("T")


class OffsetSequence(Sequence[T]):
    """Entries of an endless sequence: those from number ``first`` on."""

    def __init__(self, first: int, entries: Sequence[T]) -> None:
        self._first, self._entries = first, entries

    @overload
    def __getitem__(self, number: int) -> T: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[T]: ...

    def __getitem__(self, number: int | slice) -> T | Sequence[T]:
        assert isinstance(number, int), "an endless sequence has no slices"
        assert self._first <= number < len(self), f"{number} is not among {self._first} to {len(self) - 1}"
        return self._entries[number - self._first]

    def __len__(self) -> int:
        return self._first + len(self._entries)


@dataclass
class AsyncPipelineRuntime(PipelineRuntime):
    """Micro-batches are numbered over all steps, and every one's loss has a divisor of its own.

    A stage is one forward pass further than the next one when a step ends. Its output is taken in there and then, so
    that between steps nothing is under way and other collectives may come.
    """

    divisors: Sequence[int] = ()
    """Per micro-batch: the samples of the update that its gradient goes into."""
    shares: Sequence[float] = ()
    """Per micro-batch: what its loss counts in the step's."""
    early: dict[Action, tuple[Tensor, ...]] = field(default_factory=dict)

    def begin(self, ranks: list[list[Action]], batch: PipelineBatch) -> None:
        """As the base; what has come early is not expected again."""
        super().begin(ranks, batch)
        needed = {one.micro_batch for one in ranks[self.rank] if one.kind == FORWARD}
        coming = received_messages(ranks, self.layout, self.rank)
        self._ahead: list[PipelineMessage] = [
            one for one in coming if one.is_forward and one.action.micro_batch not in needed
        ]

    def end(self) -> Tensor:
        """As the base, once what was sent ahead is here."""
        for message in self._ahead:
            try:
                self.early[message.action] = self.mail.take(message)
            except RuntimeError as error:
                raise self._stuck(f"the result of {message.action} from rank {message.source}", error) from error
        return super().end()

    def _taken(self, source: Action, action: Action) -> tuple[Tensor, ...]:
        return self.early.pop(source) if source in self.early else super()._taken(source, action)

    def _loss_of(self, micro_batch: int, output: Tensor) -> Tensor:
        return summed_loss(output, self._batch.targets[micro_batch]) / self.divisors[micro_batch]

    def _loss_weight(self, micro_batch: int) -> float:
        return self.shares[micro_batch]


class PipedreamStrategy(PipelineStrategy):
    """Every micro-batch is a minibatch with an update of its own; with double buffers there is one for a step.

    A step is the window from one update of its own to the next step's: as many forward and backward passes, but the
    forward passes of stage ``s`` of ``n`` are ``n - 1 - s`` minibatches further, in the steps to come. After a step all
    stages have made the same updates, and the last one has computed the step's losses.
    """

    runtime: AsyncPipelineRuntime
    runtime_kind = AsyncPipelineRuntime

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        """As the base; then the versions of this stage's weights."""
        super().setup(model, spec, place)
        if self._ties:
            raise WorkerError(
                f"pipedream on {spec.pp_degree} stages: {spec.model} has weights that two stages share, "
                "and each would have versions of its own",
                status="unsupported",
                hint="a model without tied weights, or 1f1b",
            )
        self._delay: Staleness = pipedream_staleness(spec)
        self._stash = WeightStash(self.module.chunk(self.own.place), self._delay, self.own.place)
        self._order: Sequence[int] = ()
        self._known: MinibatchSequence | None = None
        self._steps_made = 0
        self.peak_versions = 1
        """Of this stage's weights, so far."""
        self.runtime.reducers = {}
        self.runtime.hooks = ActionHooks(self._before, self._after)

    def announce(self, steps: Sequence[int]) -> None:
        """See ``Strategy.announce``."""
        self._order = steps

    def step(self, feed: DataFeed, step: int) -> Tensor:
        """See ``Strategy.step``: the loss is the last stage's to tell."""
        known = self._known = self._known or MinibatchSequence(feed, self._order)
        place = self._steps_made
        assert known.step(place) == step, f"step {step} where {known.step(place)} was forwarded already"
        self._steps_made += 1
        self.clear_gradients()
        runtime = self.runtime
        runtime.phases = self.phases
        windows = [self._window(known, place, stage) for stage in range(self.layout.stages)]
        runtime.begin(windows, self._batch(feed, known, place, windows))
        runtime.execute()
        return runtime.end()

    def _window(self, known: MinibatchSequence, place: int, stage: int) -> list[Action]:
        """What ``stage`` does in the step at ``place``, in numbers over all steps."""
        count, following = known.count(place), known.count(place + 1)
        found = stage_step_actions(self.layout, self._delay, stage, count, following, place == 0)
        first = known.first(place)
        return [one._replace(micro_batch=one.micro_batch + first) for one in found]

    def _batch(
        self, feed: DataFeed, known: MinibatchSequence, place: int, windows: list[list[Action]]
    ) -> PipelineBatch:
        """Inputs of what the first stage forwards, targets of what the last one does."""
        first, count = known.first(place), known.count(place)
        last = 1 + max(one.micro_batch for window in windows for one in window)
        found = [known.at(number) for number in range(first, last)]
        sizes = [one.sizes[self.replica] for one in found]
        self._know_shapes(feed, sizes)
        runtime, total = self.runtime, known.samples(place)
        own = [one.samples for one in found]
        runtime.divisors = OffsetSequence(first, [total] * len(found) if self._delay.double_buffered else own)
        runtime.shares = OffsetSequence(first, [runtime.divisors[first + at] / total for at in range(count)])
        inputs: Sequence[Tensor] = []
        targets: Sequence[Tensor] = []
        stage = self.own.place
        with self.phases("data"):
            if stage == 0:
                inputs = OffsetSequence(first, [known.batch(number, self.replica)[0] for number in range(first, last)])
            if stage == self.layout.stages - 1:
                numbers = range(first, first + count)
                targets = OffsetSequence(first, [known.batch(number, self.replica)[1] for number in numbers])
        return PipelineBatch(inputs, targets, OffsetSequence(first, sizes), total)

    def _before(self, action: Action) -> None:
        if action.kind != UPDATE:
            self._weights = self._installed(action.micro_batch)
            self._weights.__enter__()

    def _after(self, action: Action) -> None:
        if action.kind == UPDATE:
            self._update(action.micro_batch)
            return
        self._weights.__exit__(None, None, None)
        if action.kind == BACKWARD:
            self._stash.collect(action.micro_batch)

    def _installed(self, number: int) -> AbstractContextManager[None]:
        assert self._known is not None, "an action before a step"
        return self._stash.installed(number, self._known.at(number).step if self._delay.double_buffered else number)

    def _update(self, number: int) -> None:
        assert self._known is not None, "an action before a step"
        with self.phases("backward"):
            self.finish_backward()
        with self.phases("optimizer"):
            self._stash.before_update()
            self.peak_versions = max(self.peak_versions, self._stash.versions)
            self.update()
            found = self._known.at(number)
            if found.place + 1 < self._known.count(found.step):
                # The last update's gradients are left for those who ask for them.
                self.clear_gradients()
