"""One rank of a run on fake tensors, among ranks that do not exist.

The strategy's ``setup`` begins on the meta device. When it moves its part of the model to the device, the tensors
become fake ones and the recorder starts: tensors of the host before that point are not counted. torch's process group
"fake" answers every call at once.

The fake tensors are on the cpu: torch's build without CUDA cannot run a backward pass on others. A device differs from
the host by its index: ``cpu:0`` is the GPU of a cluster with GPUs, ``cpu`` its host. Bytes, operators and collectives
do not depend on that, and a strategy asks whether its device is the host.

Its feed has full batches of fake tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.probe_records import DryRunTask, StepFigures
from hpcbench.strategies.catalog import get_strategy, options_with_defaults
from hpcbench.strategies.data import train as data
from hpcbench.strategies.pipeline.train.p2p import MessageTransport
from hpcbench.strategies.sharded.train import TRAINS_ON_CPUS
from hpcbench.worker.data.feed import Batch, DataFeed
from hpcbench.worker.distributed import process_groups
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.dry_run.modelled_ddp import ModelledDdp
from hpcbench.worker.dry_run.step_recorder import StepRecorder
from hpcbench.worker.layers import zero_batch
from hpcbench.worker.model_execution import avoid_cumulative_averages, wrap_blocks
from hpcbench.worker.models.build import build_meta_model
from hpcbench.worker.strategy import Strategy, resolve_runtime
from hpcbench.workloads.datasets import BATCH_SLOTS, DATASETS, LARGE_SAMPLE_NUMBERS, is_resident

_FAKE_DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cpu", 0)}
"""Device of the fake tensors by the kind of the run's device. Real tensors lose the index, fake ones keep it."""

_COLLECTIVES = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
"""Collectives of fake tensors, where this torch has none: the fake process group answers them as those of real ones."""
if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::send", "Meta"):
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            operator = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
            on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            _COLLECTIVES.impl(name, partial(operator.redispatch, on_cpu), "Meta")  # type: ignore[no-untyped-call]
if not TRAINS_ON_CPUS:
    # A cpu stands for the GPU, whose streams have these methods in every release.
    torch.cpu.Stream.record_event = torch.cpu.Stream.wait_event = lambda *_arguments: None  # type: ignore[assignment]


class NotFakeableError(Exception):
    """A part of the run needs a real device or real values; the message names it."""


def dry_run_rank(task: DryRunTask, rank: int) -> StepFigures:
    """Return the figures of a step of ``rank``; raises as ``record_step``."""
    recorder = record_step(task, rank)
    return StepFigures(
        peak_memory_bytes=recorder.peak_bytes,
        peak_layer=recorder.peak_layer,
        running_layer=recorder.peak.running,
        operators=recorder.operators,
        collectives=len(recorder.calls),
        host_syncs=recorder.host_syncs,
        host_sync_sites=list(recorder.host_sync_sites),
        modelled=sorted(recorder.modelled),
    )


def record_step(task: DryRunTask, rank: int) -> StepRecorder:
    """Build the strategy of ``task`` on ``rank``, run a few steps and return the record of the last one.

    Raises:
        Exception: Whatever the run would raise, and torch's errors about values that fake tensors do not have.
    """
    recorder = StepRecorder(_FAKE_DEVICES[task.device])
    with built_rank(task, rank, recorder) as (strategy, feed):
        steps = range(steps_until_steady(task.spec))
        strategy.announce(steps)
        for step in steps:
            recorder.begin_step()
            strategy.step(feed, step)
        return recorder


def steps_until_steady(spec: RunSpec) -> int:
    """Return the number of steps of which the last one does what all later ones do."""
    return resolve_runtime(spec.strategy).steps_until_steady(spec)


@contextmanager
def built_rank(task: DryRunTask, rank: int, recorder: StepRecorder) -> Iterator[tuple[Strategy, FakeFeed]]:
    """Build the strategy of ``task`` on ``rank``; within the context it can step, among fake tensors and ranks.

    Args:
        task: The run.
        rank: One of its ranks.
        recorder: Records from the end of the model's construction on. Its device is that of the fake tensors: one that
            stands for the run's, or one of torch's build for CUDA itself, of which nothing is imitated.

    Raises:
        Exception: Whatever the run would raise.
    """
    spec = task.spec
    if spec.compile:
        recorder.modelled.add("eager")
        spec = msgspec.structs.replace(spec, compile=False)
    options = options_with_defaults(spec)
    if options.get("balance") == "measured" and not options.get("cuts"):
        raise NotFakeableError('options.balance = "measured" measures the blocks on a device')
    strategy = resolve_runtime(spec.strategy)()
    model = wrap_blocks(build_meta_model(spec, task.model_folder), spec)
    avoid_cumulative_averages(model)
    recorder.layers.name_modules(model)
    with (
        fake_world(spec, rank, recorder.device) as context,
        _stand_ins(recorder),
        ExitStack() as fakes,
        patch.object(nn.Module, "to", _become_fake(model, strategy, recorder, fakes)),
    ):
        strategy.setup(model, spec, context)
        del model
        recorder.layers.name_modules(strategy.module)
        recorder.assign_owned(strategy.module)
        if task.device == "cuda":
            _update_as_on_cuda(strategy, spec, recorder)
        strategy.phases = recorder.layers.in_phase
        yield strategy, FakeFeed(spec, recorder.device)


@contextmanager
def fake_world(spec: RunSpec, rank: int, device: torch.device) -> Iterator[RankContext]:
    """Make this process ``rank`` of the run, within a process group whose other ranks answer at once with nothing."""
    context = RankContext(rank, spec.ranks, device)
    if spec.ranks == 1 and get_strategy(spec.strategy).own_degree is None:
        yield context
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.ranks)
    try:
        yield context
    finally:
        process_groups.clear_group_cache()
        dist.destroy_process_group()


def _become_fake(
    model: nn.Module, strategy: Strategy, recorder: StepRecorder, fakes: ExitStack
) -> Callable[..., nn.Module]:
    """Return a ``Module.to``: each part of ``model`` becomes fake when it is moved, all that follows with the first."""
    replacer = _TensorReplacer(strategy, recorder.device)
    parts = set(model.modules())

    def to(module: nn.Module, *_device: Any, **_options: Any) -> nn.Module:
        if not replacer.is_used:
            recorder.fake_mode = fakes.enter_context(FakeTensorMode())
            fakes.enter_context(recorder)
            fakes.enter_context(recorder.host_copies)
            recorder.layers.name_modules(module)
            replacer.replace(module)
            # Strategies that move the model block by block leave its own parameters to a library.
            replacer.replace_own_tensors(model)
        elif module in parts:
            replacer.replace(module)
        return module

    return to


class _TensorReplacer:
    """Replaces the tensors of modules, and those that ``strategy`` refers to, by fake ones of the same form."""

    def __init__(self, strategy: Strategy, device: torch.device) -> None:
        self.is_used = False
        self._strategy, self._device = strategy, device
        self._replaced: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        """The fake, which a strategy may free, and the tensor, by the tensor's identity."""

    def replace(self, module: nn.Module) -> None:
        """Replace the tensors of ``module`` and of its parts."""
        for owner in module.modules():
            self.replace_own_tensors(owner)
        for name, value in list(vars(self._strategy).items()):
            if isinstance(value, list | tuple | dict) and any(
                id(leaf) in self._replaced for leaf in tree_leaves(value)
            ):
                setattr(self._strategy, name, tree_map(self._fake_or_same, value))

    def replace_own_tensors(self, owner: nn.Module) -> None:
        """Replace the tensors of ``owner``, without its parts."""
        self.is_used = True
        holders: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, vars(owner))
        for held in holders:
            for name, value in list(held.items()):
                if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                    held[name] = self._fake_of(value)

    def _fake_or_same(self, leaf: Any) -> Any:
        return self._fake_of(leaf) if id(leaf) in self._replaced else leaf

    def _fake_of(self, tensor: Tensor) -> Tensor:
        known = self._replaced[id(tensor)][0]() if id(tensor) in self._replaced else None
        if known is not None:
            return known
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        fake = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        self._replaced[id(tensor)] = (weakref.ref(fake), tensor)
        return fake


def _update_as_on_cuda(strategy: Strategy, spec: RunSpec, recorder: StepRecorder) -> None:
    """Let optimizers that are not fused update all tensors together, torch's default on cuda; fp16's scaler waits."""
    optimizer = strategy.optimizer
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Adam):
        for group in optimizer.param_groups:
            group["foreach"] = not group["fused"]
    if spec.precision == "fp16" and recorder.device.type == "cpu" and optimizer is not None:
        wait = "fp16's loss scaling reads whether a gradient overflowed"
        optimizer.register_step_pre_hook(lambda *_step: recorder.host_sync(wait))


@contextmanager
def _stand_ins(recorder: StepRecorder) -> Iterator[None]:
    """Replace what does not run on fake tensors; the recorder gets the names of the models."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def make_ddp(*arguments: Any, **options: Any) -> ModelledDdp:
        recorder.modelled.add("reducer")
        return ModelledDdp(*arguments, **options)

    def propagate_without_modes(*arguments: Any, **options: Any) -> Any:
        # The form of a sharded result is computed with fake tensors of its whole size, which no device holds.
        with _disable_current_modes():
            return propagate(*arguments, **options)

    def forget_sends(transport: MessageTransport) -> None:
        # Works of torch's fake process group are never complete: messages are, when the next one is sent.
        transport._sent.clear()

    with (
        patch.object(data, "DistributedDataParallel", make_ddp),
        patch.object(_fully_shard, "_get_device_from_mesh", lambda _mesh: recorder.device),
        patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_without_modes),
        patch.object(MessageTransport, "_forget_finished_sends", forget_sends),
    ):
        yield


class FakeFeed(DataFeed):
    """Full batches of the run's shapes, held where the run's own feed holds them."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._spec = spec
        # Every step has a full batch.
        self.samples, self.steps_per_epoch = self.global_batch_size * 2**20, 2**20
        self._is_resident = is_resident(spec.dataset, spec.data)
        self._copies = spec.data != "device" and not self._is_resident
        sample_numbers = torch.Size(self.shape).numel()
        slots = 1 if sample_numbers >= LARGE_SAMPLE_NUMBERS else BATCH_SLOTS
        self._held: list[Batch] = []
        if self._is_resident:
            count = DATASETS[spec.dataset].samples + DATASETS[spec.dataset].held_out
            self._held = [self._make(count)]
            self._indices = torch.zeros(spec.batch_size, dtype=torch.int64, device=device)
        elif not self._copies:
            self._held = [self._make(spec.batch_size) for _ in range(slots)]

    def prepare(self, replica: int) -> None:
        """All batches exist."""

    def batch(self, step: int, replica: int) -> Batch:
        if self._copies:
            inputs, targets = self._make(self.batch_size)
        else:
            inputs, targets = self._held[step % len(self._held)]
        if self._is_resident:
            inputs, targets = inputs[self._indices], targets[self._indices]
        return inputs, targets

    def _make(self, count: int) -> Batch:
        inputs, targets = zero_batch(self._spec, count)
        if self._copies and self.device != torch.device("cpu"):
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return self.to_device(inputs), targets.to(self.device, non_blocking=True)
