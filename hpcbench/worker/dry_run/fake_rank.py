"""One rank of a run on fake tensors, among ranks that do not exist.

The strategy's ``setup`` begins on the meta device. When it moves its part of the model to the device, the tensors
become fake ones and the recorder starts: tensors of the host before that point are not counted. torch's process group
"fake" answers every call at once.

The fake tensors are on the cpu: torch's build without CUDA cannot run a backward pass on others. A device differs from
the host by its index: ``cpu:0`` is the GPU of a cluster with GPUs, ``cpu`` its host. Bytes, operators and collectives
do not depend on that; what a strategy decides by the type of its device is replaced here.

Its feed has full batches of fake tensors, in fewer micro-batches where a step only makes state.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import get_strategy, load_object, options_with_defaults
from hpcbench.parallel.workloads import BATCH_SLOTS, DATASETS, LARGE_SAMPLE_NUMBERS, is_resident
from hpcbench.results.probe_records import DryRunTask, StepFigures
from hpcbench.worker.data.feed import Batch, DataFeed
from hpcbench.worker.distributed import process_groups
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.dry_run.modelled_libraries import ModelledDdp
from hpcbench.worker.dry_run.repeated_passes import RepeatedPasses, SteadyWindow
from hpcbench.worker.dry_run.shared_forms import forms_of_model, shared_meta_model, trace_once
from hpcbench.worker.dry_run.step_recorder import StepRecorder
from hpcbench.worker.layers import zero_batch
from hpcbench.worker.model_execution import MixedPrecision, avoid_cumulative_averages, wrap_blocks
from hpcbench.worker.strategies.base import DataParallelStrategy, Strategy, resolve_runtime
from hpcbench.worker.strategies.data import DdpStrategy
from hpcbench.worker.strategies.fsdp import TRAINS_ON_CPUS
from hpcbench.worker.strategies.pipeline import stage_assignment
from hpcbench.worker.strategies.pipeline.strategy import PipelineStrategy

_FAKE_DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cpu", 0)}
"""Device of the fake tensors by the kind of the run's device. Real tensors lose the index, fake ones keep it."""

_WINDOWS = (2, 3)
"""Micro-batches of the last two steps of an asynchronous pipeline."""


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


def record_step(task: DryRunTask, rank: int, *, repeats: bool = True) -> StepRecorder:
    """Build the strategy of ``task`` on ``rank``, run a few steps and return the record of the last one.

    Args:
        task: The run.
        rank: One of its ranks.
        repeats: Whether passes of a pipeline's micro-batches that do the same are stepped once.

    Raises:
        Exception: Whatever the run would raise, and torch's errors about values that fake tensors do not have.
    """
    spec, recorder = task.spec, StepRecorder(_FAKE_DEVICES[task.device])
    with built_rank(task, rank, recorder) as (strategy, feed):
        steps, window = steps_until_steady(spec), None
        if repeats and isinstance(strategy, PipelineStrategy) and spec.options.get("batch_norm") != "deferred":
            RepeatedPasses(strategy, recorder)
            window = shorten_steps(feed, strategy)
            steps = len(feed.step_lengths) + (window is None)
        elif repeats and strategy.warm_up == "micro_batch":
            feed.step_lengths = {0: 1}
        elif strategy.warm_up == "optimizer_state":
            assert isinstance(strategy, DataParallelStrategy), "only an unwrapped model keeps no more"
            _create_optimizer_state(strategy)
            steps = 1
        strategy.announce(range(steps))
        for step in range(steps):
            recorder.begin_step()
            strategy.step(feed, step)
            if window is not None:
                window.add_step(recorder)
        if window is not None:
            window.extrapolate(recorder)
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
    options = options_with_defaults(spec)
    if options.get("balance") == "measured" and not options.get("cuts"):
        raise NotFakeableError('options.balance = "measured" measures the blocks on a device')
    strategy = resolve_runtime(spec.strategy)()
    model = wrap_blocks(shared_meta_model(spec, task.model_folder), spec)
    avoid_cumulative_averages(model)
    recorder.layers.name_modules(model)
    with (
        fake_world(spec, rank, recorder.device) as context,
        _stand_ins(task, recorder),
        ExitStack() as fakes,
        patch.object(nn.Module, "to", _become_fake(model, strategy, recorder, fakes)),
    ):
        strategy.setup(model, spec, context)
        del model
        recorder.layers.name_modules(strategy.module)
        recorder.assign_owned(strategy.module)
        _use_foreach_updates(strategy, task.device)
        strategy.phases = recorder.layers.in_phase
        yield strategy, FakeFeed(spec, recorder.device)


def _create_optimizer_state(strategy: DataParallelStrategy) -> None:
    """Make what the first step of an unwrapped model leaves behind: the optimizer's state."""
    for parameter in strategy.module.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    strategy.update()
    strategy.clear_gradients()


class CudaArithmetic(MixedPrecision):
    """Precisions that only cuda has: tf32 is stored as fp32; fp16's scaler waits for the device once a step."""

    def __init__(self, precision: str, device: torch.device, recorder: StepRecorder) -> None:
        super().__init__("fp32" if precision in ("tf32", "fp16") else precision, device)
        self._recorder = recorder
        self._scales_loss = precision == "fp16"
        if self._scales_loss:
            self._lower = torch.float16

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply an update; it is never left out here."""
        if self._scales_loss:
            self._recorder.host_sync("fp16's loss scaling reads whether a gradient overflowed")
        optimizer.step()


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


def _use_foreach_updates(strategy: Strategy, device: str) -> None:
    """Let torch's optimizers that are not fused update all tensors together if the run does: their default on cuda."""
    optimizer = strategy.optimizer
    if device == "cuda" and isinstance(optimizer, torch.optim.SGD | torch.optim.Adam):
        for group in optimizer.param_groups:
            group["foreach"] = not group["fused"]


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` that works with real (and meta) tensors, also where it is called among fake ones."""

    def called(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **options)

    return called


@contextmanager
def _stand_ins(task: DryRunTask, recorder: StepRecorder) -> Iterator[None]:
    """Replace what does not run on fake tensors or depends on the device; the recorder gets the names of the models."""
    replacements = _own_replacements(task, recorder)
    library_stand_ins = resolve_runtime(task.spec.strategy).stand_ins
    if library_stand_ins is not None:
        make_stand_ins = load_object(library_stand_ins)
        assert callable(make_stand_ins), f"{library_stand_ins} is no function"
        replacements |= make_stand_ins(task.spec, recorder)
    with ExitStack() as stack:
        for target, replacement in replacements.items():
            module, _, path = target.partition(":")
            if module in sys.modules:
                owner, _, name = path.rpartition(".")
                holder = attrgetter(owner)(sys.modules[module]) if owner else sys.modules[module]
                stand_in = _without_modes(getattr(holder, name)) if replacement is None else replacement
                stack.enter_context(patch.object(holder, name, stand_in))
        yield


def _own_replacements(task: DryRunTask, recorder: StepRecorder) -> dict[str, Any]:
    """Return the replacements in hpcbench's own modules; ``None`` stands for the same function without fake tensors."""
    spec, strategies = task.spec, "hpcbench.worker.strategies"

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            recorder.modelled.add(name)
            return function(*arguments, **options)

        return called

    def assign_blocks(_model: nn.Module, *arguments: Any) -> Any:
        with _disable_current_modes():
            return stage_assignment.assign_blocks(shared_meta_model(spec, task.model_folder), *arguments)

    replacements: dict[str, Any] = {
        f"{strategies}.data:DistributedDataParallel": noted("reducer", ModelledDdp),
        f"{strategies}.base:compile_in_place": noted("eager", lambda *_module: None),
        f"{strategies}.base:graphed_step": noted("eager", lambda compute, _spec: compute),
        f"{strategies}.base:graph_stream_context": lambda _device: nullcontext(),
        f"{strategies}.fsdp:make_shard_mesh": None,
        "torch.distributed.fsdp._fully_shard._fully_shard:_get_device_from_mesh": lambda _mesh: recorder.device,
        # The form of a sharded result is computed with fake tensors of its whole size, which no device holds.
        "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached": None,
        "hpcbench.worker.distributed.process_groups:_new_process_group": None,
        f"{strategies}.pipeline.chunk:ActivationMetaCache._trace": trace_once,
        f"{strategies}.pipeline.chunk:copy_to_meta": partial(forms_of_model, spec),
        f"{strategies}.pipeline.fairscale_pipe:assign_blocks": assign_blocks,
        # Works of torch's fake process group are never complete: messages are, when the next one is sent.
        f"{strategies}.pipeline.p2p:MessageTransport._forget_finished_sends": lambda transport: transport._sent.clear(),
    }
    if task.device != recorder.device.type:
        # The cpu stands for cuda.
        arithmetic = partial(CudaArithmetic, recorder=recorder)
        replacements[f"{strategies}.base:MixedPrecision"] = arithmetic
        replacements[f"{strategies}.pipeline.chunk:MixedPrecision"] = arithmetic
        for pool in ("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d"):
            replacements[f"torch.nn.functional:{pool}"] = _without_autocast(getattr(torch.nn.functional, pool))
        replacements[f"{strategies}.base:prefers_fused_updates"] = lambda _device: True
        # DDP's bf16 compression is offered on cuda only.
        replacements[f"{strategies}.data:DdpStrategy._register_compression_hook"] = _register_hook_of_cuda
    return replacements


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return 3-D pooling in the dtype of its input, as on cuda; a cpu's autocast computes it in fp32."""

    def called(*arguments: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(*arguments, **options)

    return called


def _register_hook_of_cuda(strategy: Any, runner: Any, context: RankContext) -> None:
    cuda = dataclasses.replace(context, device=torch.device("cuda"))
    _REGISTER_HOOK(strategy, runner, cuda)


_REGISTER_HOOK = DdpStrategy._register_compression_hook


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
        self.is_held = not self._is_resident and not self._copies
        """Whether batches are made once."""
        self.step_lengths: dict[int, int] = {}
        """Micro-batches of a step, where they are fewer than the run's."""
        self._held: list[Batch] = []
        if self._is_resident:
            count = DATASETS[spec.dataset].samples + DATASETS[spec.dataset].held_out
            self._held = [self._make(count)]
            self._indices = torch.zeros(spec.batch_size, dtype=torch.int64, device=device)
        elif not self._copies:
            self._held = [self._make(spec.batch_size) for _ in range(slots)]

    def prepare(self, replica: int) -> None:
        """All batches exist."""

    def micro_batch_ranges(self, step: int, replica: int) -> list[range]:
        ranges = super().micro_batch_ranges(step, replica)
        return ranges[: self.step_lengths.get(step, len(ranges))]

    def batch(self, step: int, replica: int) -> Batch:
        if self._copies:
            inputs, targets = self._make(self.batch_size)
        else:
            inputs, targets = self._held[step % len(self._held)]
        if self._is_resident:
            inputs, targets = inputs[self._indices], targets[self._indices]
        if step not in self.step_lengths:
            return inputs, targets
        count = self.micro_batch_ranges(step, replica)[-1].stop
        return inputs[:count], targets[:count]

    def _make(self, count: int) -> Batch:
        inputs, targets = zero_batch(self._spec, count)
        if self._copies and self.device != torch.device("cpu"):
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return self.to_device(inputs), targets.to(self.device, non_blocking=True)


def shorten_steps(feed: FakeFeed, strategy: PipelineStrategy) -> SteadyWindow | None:
    """Give the steps before the last one, which only make state and records, few micro-batches.

    The windows of an asynchronous pipeline are equal from the second one on, when all weight versions exist: of those
    two short ones are enough, and what a longer one adds to them is the result.
    """
    runtime, staleness = strategy.runtime, get_strategy(strategy.spec.strategy).staleness
    is_asynchronous = staleness is not None
    double_buffered = staleness is not None and staleness(strategy.spec).double_buffered
    if is_asynchronous and (double_buffered or not feed.is_held or feed.micro_batches <= _WINDOWS[-1]):
        feed.step_lengths = dict.fromkeys(range(1), feed.micro_batches)
        return None
    if is_asynchronous:
        fill = min(feed.micro_batches, runtime.layout.stages)
        feed.step_lengths = dict(enumerate((fill, *_WINDOWS)))
        return SteadyWindow(feed.micro_batches - _WINDOWS[-1])
    # A backward pass that creates gradients, one that adds to them, and one that sends them.
    feed.step_lengths = {0: (3 if runtime.reducers else 2) * max(runtime.layout.stage_sizes)}
    return None
