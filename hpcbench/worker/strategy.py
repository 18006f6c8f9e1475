"""The interface between the training loop and a strategy, and the step that all data-parallel strategies share."""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, unsupported
from hpcbench.results.probe_records import ProbeResults
from hpcbench.results.schema import PipelinePrediction, TimelineSpan
from hpcbench.strategies import catalog
from hpcbench.worker.data.feed import Batch, DataFeed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.failure import install_hint
from hpcbench.worker.measure.clocks import PhaseMarker, no_marker
from hpcbench.worker.model_execution import (
    MasterWeights,
    MixedPrecision,
    compile_in_place,
    is_host,
    summed_loss,
)


class Strategy(ABC):
    """One way to train on several ranks: the runtime behind a registry entry.

    The loop calls ``setup`` once and then ``step`` for every step. All other members have defaults; a strategy
    overrides the ones it needs. ``R`` replicas train together; a replica takes ``n`` samples per step.

    Example::

        strategy = SingleStrategy()
        strategy.setup(build_model(spec), spec, RankContext(0, 1, torch.device("cpu")))
        loss = strategy.step(make_feed(spec, torch.device("cpu")), 0)  # scalar
    """

    replica: int
    """Number of the data-parallel replica that this rank belongs to, 0 to R - 1. Set by ``setup``."""
    module: nn.Module
    """This rank's weights in callable form, [n, *sample shape] -> outputs; for evaluation. Set by ``setup``."""
    arithmetic: MixedPrecision
    """Autocast and loss scaling of the run. Set by ``setup``."""
    forward_is_collective: ClassVar[bool] = False
    """Whether ``module`` can only be called by all ranks together."""
    measures_machine: ClassVar[bool] = False
    """Whether ``measure`` is called after the steps (calibration runs)."""
    reference: ClassVar[str] = "data_parallel"
    """Key of ``REFERENCE_TRAINERS``: the training in one process that a verified run is compared with."""
    widest: ClassVar[str] = "fp64"
    """The most exact precision in which the strategy can be verified."""
    lossy: ClassVar[float] = 0.0
    """The largest difference that ``verify`` accepts, for a strategy that is inexact with any options."""
    traffic_is_recorded: bool = True
    """Whether all communication passes torch's operators, on threads that a recorder follows."""
    phases: PhaseMarker = staticmethod(no_marker)
    """Called with a phase name, returns the context of that part of a step; the profiler replaces it."""
    predicted: PipelinePrediction | None = None
    """The step that measured block times predict, if the stages were balanced by them."""
    optimizer: torch.optim.Optimizer | None = None
    """The optimizer of this rank's weights; ``None``: the strategy updates them in another way. Set by ``setup``."""

    @classmethod
    def library_facts(cls, _spec: RunSpec) -> dict[str, Any] | None:
        """Return facts about the strategy's library for the provenance of a result; nothing by default."""
        return None

    @abstractmethod
    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        """Split or wrap the model and create the optimizer. May communicate.

        Args:
            model: The whole model on the host, with the same weights on every rank.
            spec: The run.
            context: This rank, its device and the group of all ranks.

        Raises:
            WorkerError: ``unsupported`` if the strategy cannot train this model with these options.
        """

    @classmethod
    def steps_until_steady(cls, spec: RunSpec) -> int:  # noqa: ARG003 - overridden
        """Return the number of steps of which the last one does what all later ones do.

        By default the first one creates the optimizer's state and learns the order of gradients.
        """
        return 2

    def announce(self, steps: Sequence[int]) -> None:  # noqa: B027 - optional
        """Receive the numbers of the coming steps, before the first one, if they are not 0, 1, 2, ...

        A pipeline that runs across steps begins the next step before the current one has ended.

        Args:
            steps: The numbers that ``step`` will be called with, in order.
        """

    @abstractmethod
    def step(self, feed: DataFeed, step: int) -> Tensor:
        """Run forward, backward and update for step number ``step``.

        Args:
            feed: The samples of the run; a replica takes [n, *sample shape] and targets.
            step: Number of the step, from 0.

        Returns:
            This rank's part of the loss, a detached scalar on the device: the sum over its samples divided by the
            global sample count, so that the parts of all ranks add up to the mean loss.

        Raises:
            WorkerError: Another rank did not answer in time.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the whole model by their single-device names, in their unsplit shapes.

        Collective: all ranks call it together. Complete on rank 0; other ranks may return a part.
        """

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that the last step's update used, in the form of ``weights``. Collective."""

    def progress_report(self) -> str | None:
        """Return one sentence on this rank's progress within the step, for error reports; ``None`` if there is none.

        Called from any thread.
        """
        return None

    def watchdog(self, context: RankContext, abandon: Callable[[BaseException], None]) -> AbstractContextManager[None]:
        """Return a context around all steps that ends the run when a step makes no progress.

        Args:
            context: This rank; its ``wait_s`` is the time limit in seconds.
            abandon: Called from a thread with the error; it ends the process.
        """
        return nullcontext()

    def record_actions(self, feed: DataFeed, step: int, device: torch.device) -> list[TimelineSpan]:
        """Run one step and return when this rank's schedule actions ran, in seconds since a common barrier.

        Called if the registry entry has ``records_timeline``: then it must be overridden.

        Args:
            feed: The samples of the run.
            step: Number of the step.
            device: The rank's device, which is synchronised at the ends of actions.
        """
        raise NotImplementedError

    def measure(self, feed: DataFeed, check: Callable[[], None]) -> ProbeResults:
        """Measure the machine after all steps, on all ranks together; rank 0's result is kept.

        Called if ``measures_machine`` is set: then, and only then, it must be overridden.

        Args:
            feed: Samples to measure kernels on.
            check: Called between measurements; raises if a rank was asked to stop.
        """
        raise NotImplementedError

    @staticmethod  # noqa: B027 - optional
    def close() -> None:
        """Release what the process holds. Called once per process after a run without error, after all instances."""


def optimizer_class_and_arguments(
    spec: RunSpec, device: torch.device
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the run's optimizer and its arguments, for libraries that create their own instances.

    ``device`` is that of the parameters.
    """
    common: dict[str, Any] = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    # One kernel for all tensors is the fastest of torch's implementations on cuda, by its manual. A fused update takes
    # part in fp16's loss scaling: the host would not know which updates were left out.
    if not is_host(device) and spec.precision != "fp16":
        common["fused"] = True
    if spec.optimizer == "sgd":
        return torch.optim.SGD, {**common, "momentum": spec.momentum}
    return torch.optim.Adam if spec.optimizer == "adam" else torch.optim.AdamW, common


def make_optimizer(spec: RunSpec, module: nn.Module, *, without: Sequence[str] = ()) -> torch.optim.Optimizer:
    """Create the run's optimizer over the parameters of ``module``, without the arguments of these names.

    With ``bf16_params`` it updates fp32 master weights.
    """
    parameters = list(module.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    optimizer_class, arguments = optimizer_class_and_arguments(spec, device)
    create: Callable[..., torch.optim.Optimizer] = optimizer_class
    make = partial(create, **{name: value for name, value in arguments.items() if name not in without})
    # Those of fsdp are shards in fp32.
    has_masters = spec.precision == "bf16_params" and any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    return MasterWeights(parameters, make) if has_masters else make(parameters)


class DataParallelStrategy(Strategy):
    """A whole model per rank; gradients are combined by the wrapper that a subclass returns from ``wrap``.

    A step accumulates the gradients of the micro-batches and communicates with the last one::

        data | forward backward | forward backward | forward backward + reduction | optimizer
               micro-batch 0      micro-batch 1      micro-batch 2
    """

    optimizer: torch.optim.Optimizer
    loss_factor = 1.0
    """Undoes the scaling that the wrapper applies to gradients (DDP averages over replicas)."""
    _loss: Tensor | None = None

    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        self.spec = spec
        self.context = context
        self.options = catalog.options_with_defaults(spec)
        self.replica = context.rank if spec.dp_degree > 1 else 0
        self.arithmetic = MixedPrecision(spec.precision, context.device)
        self.module = self.move_to_device(self.split_model(model, spec), context.device).train()
        if spec.compile:
            compile_in_place(self.module)
        self.runner = self.wrap(self.module, spec, context)
        self.optimizer = self.make_optimizer(spec, context)

    def split_model(self, model: nn.Sequential, spec: RunSpec) -> nn.Module:
        """Return this rank's part of ``model``, still on the host."""
        return model

    def move_to_device(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Return ``module`` on ``device``. Strategies that shard it leave it on the host: ``wrap`` moves its units."""
        return module.to(device)

    def wrap(self, module: nn.Module, spec: RunSpec, context: RankContext) -> nn.Module:
        """Return the module that a step calls instead of ``module``."""
        return module

    def make_optimizer(self, spec: RunSpec, context: RankContext) -> torch.optim.Optimizer:
        """Create the optimizer; called after ``wrap``."""
        return make_optimizer(spec, self.module)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the samples' losses: outputs [n, ...] and targets -> a scalar."""
        return summed_loss(outputs, targets)

    def clear_gradients(self) -> None:
        """Reset gradients before a step."""
        self.optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context of all micro-batches but the last: gradients are accumulated, not communicated."""
        return nullcontext()

    def step(self, feed: DataFeed, step: int) -> Tensor:
        with self.phases("data"):
            inputs, targets = self.batch(feed, step)
        ranges, global_count = feed.micro_batch_ranges(step, self.replica), feed.global_count(step)
        self.clear_gradients()
        *early, last = ranges
        for samples in early:
            with self.no_sync():
                self._accumulate(inputs, targets, samples, global_count)
        self._accumulate(inputs, targets, last, global_count)
        with self.phases("backward"):
            self.finish_gradient_reduction()
        with self.phases("optimizer"):
            self.update()
        return self._take_loss()

    def batch(self, feed: DataFeed, step: int) -> Batch:
        """Return this rank's inputs [n, *sample shape] and targets of the step."""
        return feed.batch(step, self.replica)

    def finish_gradient_reduction(self) -> None:
        """Wait for outstanding gradient communication, between the last backward pass and the update."""

    def update(self) -> None:
        """Apply the step's gradients."""
        self.arithmetic.update(self.optimizer)

    def weights(self) -> dict[str, Tensor]:
        return {name: self.whole_tensor(name, tensor) for name, tensor in self.module.state_dict().items()}

    def gradients(self) -> dict[str, Tensor]:
        named = [(name, parameter.grad) for name, parameter in self.module.named_parameters()]
        return {name: self.whole_tensor(name, gradient) for name, gradient in named if gradient is not None}

    def whole_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return the weight or gradient ``name`` in the shape of the whole model, from this rank's ``tensor`` or shard.

        May be collective: all ranks of a replica call it with the same names in the same order.
        """
        return tensor.detach()

    def _accumulate(self, inputs: Tensor, targets: Tensor, samples: range, global_count: int) -> None:
        rows = slice(samples.start, samples.stop)
        with self.phases("forward"):
            loss = self._forward(inputs[rows], targets[rows]) / global_count
        with self.phases("backward"):
            self.arithmetic.backward(loss * self.loss_factor)
        detached = loss.detach()
        self._loss = detached if self._loss is None else self._loss + detached

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # A function of its own, so that the outputs are released here: autograd keeps the ones it needs.
        with self.arithmetic.autocast():
            outputs = self.runner(inputs)
        return self.loss_sum(outputs, targets)

    def _take_loss(self) -> Tensor:
        assert self._loss is not None, "a step without micro-batches"
        loss, self._loss = self._loss, None
        return loss


def resolve_runtime(key: str) -> type[Strategy]:
    """Import and return the runtime class of strategy ``key``; ``ConfigError`` if the registry has no such key."""
    runtime = catalog.load_member(key, "train", "TRAININGS")
    if not isinstance(runtime, type) or not issubclass(runtime, Strategy):
        raise ConfigError(f"the family of {key}: TRAININGS has {runtime!r} for it, not a subclass of Strategy")
    return runtime


class WrapperStrategy(DataParallelStrategy):
    """A model in a wrapper that averages gradients over replicas and has a ``no_sync`` context (DDP, fairscale)."""

    runner: Any

    def setup(self, model: nn.Sequential, spec: RunSpec, context: RankContext) -> None:
        self.loss_factor = float(spec.dp_degree)
        super().setup(model, spec, context)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.runner.no_sync()  # type: ignore[no-any-return]


def refuse_strided_parameters(module: nn.Module, spec: RunSpec, reason: str) -> None:
    """Raise ``WorkerError`` (``unsupported``) if a parameter is not contiguous; the message begins with ``reason``."""
    for name, parameter in module.named_parameters():
        if not parameter.is_contiguous():
            hint = "set channels_last = false" if spec.channels_last else "build the model with contiguous parameters"
            raise unsupported(f"{reason}, and {name} has the strides {parameter.stride()}", hint)


def untied_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks whose parameters no other block uses, for wrapping one by one.

    Tied weights must stay together in the root's group.
    """
    users = Counter(id(parameter) for block in module.children() for parameter in set(block.parameters()))
    return [
        block
        for block in module.children()
        if (parameters := list(block.parameters())) and all(users[id(parameter)] == 1 for parameter in parameters)
    ]


def import_fairscale(module: str) -> ModuleType:
    """Import ``fairscale.<module>``.

    Raises:
        WorkerError: ``unsupported``, with the command that installs fairscale.
    """
    try:
        with warnings.catch_warnings():
            # Its decorators for autocast have moved since; they still work.
            warnings.simplefilter("ignore", FutureWarning)
            return importlib.import_module(f"fairscale.{module}")
    except Exception as error:
        raise unsupported(
            f"this strategy needs fairscale: {type(error).__name__}: {error}", install_hint("fairscale")
        ) from error
