"""The interface between the training loop and a strategy, and the step that all data-parallel strategies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel import catalog
from hpcbench.results.schema import ProbeResults
from hpcbench.worker.data.feed import Batch, DataFeed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.clocks import PhaseMarker, no_marker
from hpcbench.worker.model_execution import MixedPrecision, compile_in_place, summed_loss


class Strategy(Protocol):
    """One way to train. The loop calls ``setup`` once, then ``step`` for every step, and nothing else."""

    replica: int
    """The data-parallel replica that this rank belongs to."""
    forward_is_collective: bool
    """Whether ``module`` can only be called by all ranks together."""
    phases: PhaseMarker
    """Put around the parts of a step; the loop replaces it in profiled steps."""

    @property
    def module(self) -> nn.Module:
        """The weights that this rank holds, in a form that can be called: for evaluation and comparison."""

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        """Take ``model`` (built on the host, the same on every rank) apart or wrap it. May communicate."""

    def announce(self, steps: Sequence[int]) -> None:
        """Before the first step: the numbers that ``step`` will be called with, where they do not follow one another.

        A pipeline that runs across steps begins the next one before this one has ended.
        """

    def step(self, feed: DataFeed, step: int) -> Tensor:
        """Forward, backward and update for step ``step``.

        Returns this rank's part of the loss, detached, on the device: the sum over its samples divided by the global
        sample count, so that the parts of all replicas add up to the mean loss.
        """

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model by their single-device names, complete on rank 0. Communicates."""

    def gradients(self) -> dict[str, Tensor]:
        """As ``weights``: the gradients that the last step's update used."""

    @staticmethod
    def close() -> None:
        """Called once in every rank's process after all else, when no instance is left; not after an error."""


def resolve_runtime(key: str) -> type[Strategy]:
    """Import the runtime class of strategy ``key``.

    ``tests/test_seams.py`` checks every class of the registry against ``Strategy``, statically and when it runs.
    """
    return cast(type[Strategy], catalog.load_object(catalog.get_strategy(key).runtime))


@runtime_checkable
class ProbingStrategy(Protocol):
    """A strategy that has more to measure than its steps."""

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        """After all steps, on all ranks together; rank 0's counts. ``check`` raises where a rank was told to stop."""


def optimizer_class_and_arguments(spec: RunSpec) -> tuple[type[torch.optim.Optimizer], dict[str, float]]:
    """The class of the run's optimizer and its arguments, for libraries that make their own instances."""
    common = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    if spec.optimizer == "sgd":
        return torch.optim.SGD, {**common, "momentum": spec.momentum}
    return torch.optim.Adam if spec.optimizer == "adam" else torch.optim.AdamW, common


def make_optimizer(spec: RunSpec, module: nn.Module) -> torch.optim.Optimizer:
    """The run's optimizer over the parameters of ``module``."""
    kind, arguments = optimizer_class_and_arguments(spec)
    make: Callable[..., torch.optim.Optimizer] = kind
    return make(list(module.parameters()), **arguments)


def chosen_options(spec: RunSpec) -> dict[str, Any]:
    """The options of the run's strategy, defaults filled in."""
    return catalog.options_with_defaults(spec)


class DataParallelStrategy:
    """A whole model per rank. ``loss_factor`` undoes what the wrapper does to gradients (an average, for DDP)."""

    loss_factor = 1.0
    forward_is_collective = False
    traffic_is_seen = True
    """Whether all that is passed goes through torch's operators, on threads that a recorder follows."""
    phases: PhaseMarker = staticmethod(no_marker)

    def setup(self, model: nn.Sequential, spec: RunSpec, place: RankContext) -> None:
        """Put ``model`` on the device, wrapped by the subclass."""
        self.spec = spec
        self.replica = place.rank if spec.dp_degree > 1 else 0
        self.arithmetic = MixedPrecision(spec.precision, place.device)
        self.module: nn.Module = self.own_part(model, spec).to(place.device).train()
        if spec.compile:
            compile_in_place(self.module)
        self.runner = self.wrap(self.module, spec, place)
        self.optimizer = self.make_optimizer(spec, place)

    def own_part(self, model: nn.Sequential, spec: RunSpec) -> nn.Module:
        """What this rank holds of ``model``, still on the host: all of it where only the batch is shared."""
        return model

    def wrap(self, module: nn.Module, spec: RunSpec, place: RankContext) -> nn.Module:
        """What is called instead of ``module``."""
        return module

    def make_optimizer(self, spec: RunSpec, place: RankContext) -> torch.optim.Optimizer:
        """Who updates the weights, made after ``wrap``."""
        return make_optimizer(spec, self.module)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the samples' losses; another form of it where ``outputs`` are another form of the model's."""
        return summed_loss(outputs, targets)

    def clear_gradients(self) -> None:
        """Before each step."""
        self.optimizer.zero_grad()

    def without_sync(self) -> AbstractContextManager[None]:
        """The context of all micro-batches but the last."""
        return nullcontext()

    def step(self, feed: DataFeed, step: int) -> Tensor:
        """See ``Strategy.step``. Micro-batches accumulate gradients."""
        global_count = feed.global_count(step)
        with self.phases("data"):
            inputs, labels = self.batch(feed, step)
        self.clear_gradients()
        parts = feed.micro_shares(step, self.replica)
        for part in parts[:-1]:
            with self.without_sync():
                self._accumulate(inputs, labels, part, global_count)
        self._accumulate(inputs, labels, parts[-1], global_count)
        with self.phases("backward"):
            self.finish_backward()
        with self.phases("optimizer"):
            self.update()
        return self._take_loss()

    def announce(self, steps: Sequence[int]) -> None:
        """Every step is complete in itself."""

    def batch(self, feed: DataFeed, step: int) -> Batch:
        """What this rank keeps of its replica's samples for the length of a step."""
        return feed.batch(step, self.replica)

    def finish_backward(self) -> None:
        """Between the last backward pass of a step and its update."""

    def update(self) -> None:
        """Let the optimizer use the gradients of the step."""
        self.arithmetic.update(self.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """Every rank holds all of them."""
        return {name: tensor.detach() for name, tensor in self.module.state_dict().items()}

    def gradients(self) -> dict[str, Tensor]:
        """Every rank holds all of them."""
        named = self.module.named_parameters()
        return {name: parameter.grad.detach() for name, parameter in named if parameter.grad is not None}

    @staticmethod
    def close() -> None:
        """Nothing is left to do."""

    def _accumulate(self, inputs: Tensor, labels: Tensor, part: range, global_count: int) -> None:
        chosen = slice(part.start, part.stop)
        with self.phases("forward"):
            loss = self._forward(inputs[chosen], labels[chosen]) / global_count
        with self.phases("backward"):
            # DDP averages over replicas; the sum of shares that were divided by the true count is what is wanted.
            self.arithmetic.backward(loss * self.loss_factor)
        kept = loss.detach()
        self._loss = kept if self._loss is None else self._loss + kept

    def _forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The sum of the samples' losses. The outputs end here: autograd keeps what it needs of them."""
        with self.arithmetic.autocast():
            outputs = self.runner(inputs)
        return self.losses(outputs, labels)

    _loss: Tensor | None = None

    def _take_loss(self) -> Tensor:
        assert self._loss is not None, "a step without micro-batches"
        taken, self._loss = self._loss, None
        return taken


class SingleStrategy(DataParallelStrategy):
    """The model as it is: the reference of every speed-up."""
