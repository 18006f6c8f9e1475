"""PipeDream (Narayanan et al. 2019, SOSP): a pipeline that is never emptied, with an update after every minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.schedule import BACKWARD, UPDATE, Action
from hpcbench.parallel.strategies.pipedream import delay_of
from hpcbench.parallel.versions import Delay, step_window
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.minibatches import Minibatches
from hpcbench.worker.pipeline.endless import EndlessRuntime, Numbered
from hpcbench.worker.pipeline.runtime import Batch, Hooks
from hpcbench.worker.pipeline.stash import WeightStash
from hpcbench.worker.strategies.base import Place
from hpcbench.worker.strategies.pipeline import Pipeline


class Pipedream(Pipeline):
    """Every micro-batch is a minibatch with an update of its own; with double buffers there is one for a step.

    A step is the window from one update of its own to the next step's: as many forward and backward passes, but the
    forward passes of stage ``s`` of ``n`` are ``n - 1 - s`` minibatches further, in the steps to come. After a step all
    stages have made the same updates, and the last one has computed the step's losses.
    """

    runtime: EndlessRuntime
    runtime_kind = EndlessRuntime

    def setup(self, model: nn.Sequential, spec: RunSpec, place: Place) -> None:
        """As the base; then the versions of this stage's weights."""
        super().setup(model, spec, place)
        if self._ties:
            raise WorkerError(
                f"pipedream on {spec.pp_degree} stages: {spec.model} has weights that two stages share, "
                "and each would have versions of its own",
                status="unsupported",
                hint="a model without tied weights, or 1f1b",
            )
        self._delay: Delay = delay_of(spec)
        self._stash = WeightStash(self.module.chunk(self.own.place), self._delay, self.own.place)
        self._order: Sequence[int] = ()
        self._known: Minibatches | None = None
        self._steps_made = 0
        self.peak_versions = 1
        """Of this stage's weights, so far."""
        self.runtime.reducers = {}
        self.runtime.hooks = Hooks(self._before, self._after)

    def announce(self, steps: Sequence[int]) -> None:
        """See ``Strategy.announce``."""
        self._order = steps

    def step(self, feed: Feed, step: int) -> Tensor:
        """See ``Strategy.step``: the loss is the last stage's to tell."""
        known = self._known = self._known or Minibatches(feed, self._order)
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

    def _window(self, known: Minibatches, place: int, stage: int) -> list[Action]:
        """What ``stage`` does in the step at ``place``, in numbers over all steps."""
        count, following = known.count(place), known.count(place + 1)
        found = step_window(self.layout, self._delay, stage, count, following, place == 0)
        first = known.first(place)
        return [one._replace(micro_batch=one.micro_batch + first) for one in found]

    def _batch(self, feed: Feed, known: Minibatches, place: int, windows: list[list[Action]]) -> Batch:
        """Inputs of what the first stage forwards, targets of what the last one does."""
        first, count = known.first(place), known.count(place)
        last = 1 + max(one.micro_batch for window in windows for one in window)
        found = [known.at(number) for number in range(first, last)]
        sizes = [one.sizes[self.replica] for one in found]
        self._know_shapes(feed, sizes)
        runtime, total = self.runtime, known.samples(place)
        own = [one.samples for one in found]
        runtime.divisors = Numbered(first, [total] * len(found) if self._delay.double_buffered else own)
        runtime.shares = Numbered(first, [runtime.divisors[first + at] / total for at in range(count)])
        inputs: Sequence[Tensor] = []
        targets: Sequence[Tensor] = []
        stage = self.own.place
        with self.phases("data"):
            if stage == 0:
                inputs = Numbered(first, [known.batch(number, self.replica)[0] for number in range(first, last)])
            if stage == self.layout.stages - 1:
                numbers = range(first, first + count)
                targets = Numbered(first, [known.batch(number, self.replica)[1] for number in numbers])
        return Batch(inputs, targets, Numbered(first, sizes), total)

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
