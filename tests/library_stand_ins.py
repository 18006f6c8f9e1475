"""Stand-ins for Horovod and fairscale on fake tensors, whose threads and subclasses of tensors no recorder follows.

``hpcbench dry-run`` answers ``not_fakeable`` for their strategies. Tests step them: against the oracle's memory, and
under the stub of CUDA.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.catalog import get_strategy, options_with_defaults
from hpcbench.strategies.gradient_buckets import MIB
from hpcbench.strategies.horovod import train as horovod
from hpcbench.strategies.pipeline.train import fairscale_pipe, stage_assignment
from hpcbench.worker.models.build import build_meta_model


@contextmanager
def library_stand_ins(spec: RunSpec, device: torch.device) -> Iterator[None]:
    """Replace the parts of the strategy's library that fake tensors on ``device`` do not pass."""
    library = get_strategy(spec.strategy).library_name
    replacements: list[tuple[Any, str, Any]] = []
    if library == "horovod":
        fusion_bytes = int(float(options_with_defaults(spec)["fusion_threshold_mb"]) * MIB)
        replacements = [
            (horovod, "load_horovod", lambda: ModelledHorovod(fusion_bytes)),
            (horovod, "start_horovod", lambda *_arguments: None),
        ]
    elif library == "fairscale":
        replacements = _fairscale_replacements(spec, device)
    with ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(patch.object(*replacement))
        yield


def _fairscale_replacements(spec: RunSpec, device: torch.device) -> list[tuple[Any, str, Any]]:
    wrapper = importlib.import_module("fairscale.nn.misc.flatten_params_wrapper")
    pipeline = importlib.import_module("fairscale.nn.pipe.pipeline")

    def assign_blocks(_model: nn.Module, *arguments: Any) -> Any:
        with _disable_current_modes():
            return stage_assignment.assign_blocks(build_meta_model(spec, None), *arguments)

    return [
        (fairscale_pipe, "assign_blocks", assign_blocks),
        (wrapper, "FlatParameter", make_flat_parameter(wrapper.FlatParameter)),
        (pipeline, "create_workers", create_inline_workers),
        (pipeline, "join_workers", lambda *_queues: None),
        # It compares values of all ranks, once, on cuda.
        (
            importlib.import_module("fairscale.nn.data_parallel.fully_sharded_data_parallel"),
            "validate_process_group", lambda *_group: None,
        ),
        # Tensors that it keeps for the process would be those of an earlier step.
        (importlib.import_module("fairscale.nn.pipe.phony"), "_phonies", dict[Any, Any]()),
        (importlib.import_module("fairscale.nn.pipe.copy"), "get_device", lambda _stream: device),
    ]  # fmt: skip


class ModelledHorovod:
    """The names of ``horovod.torch`` that the strategy uses; every feature is there.

    Horovod fuses gradients by the time at which they are ready. Here every buffer is filled before it is sent, in the
    order in which the backward pass ends.
    """

    Average, Adasum = "average", "adasum"

    class Compression:
        """The choices of ``options.compression``: the dtype of what is sent."""

        none = None
        fp16 = torch.float16

    def __init__(self, fusion_bytes: int) -> None:
        self._fusion_bytes = fusion_bytes

    mpi_built = nccl_built = staticmethod(lambda: True)

    @staticmethod
    def broadcast_parameters(_state: object, root_rank: int) -> None:
        """All ranks have equal weights already."""
        del root_rank

    def DistributedOptimizer(self, optimizer: Any, **arguments: Any) -> Any:  # noqa: N802 - Horovod's name
        """Let ``optimizer`` reduce gradients before its update."""
        reducer = _HorovodReducer(self._fusion_bytes, **arguments)
        optimizer.synchronize = reducer.synchronize
        optimizer.skip_synchronize = reducer.skipped
        optimizer.register_step_pre_hook(reducer.before_update)
        return optimizer


class _HorovodReducer:
    def __init__(
        self, fusion_bytes: int, *, named_parameters: Any, compression: Any, backward_passes_per_step: int, op: str
    ) -> None:
        del op
        self._fusion_bytes, self._dtype, self._passes = max(1, fusion_bytes), compression, backward_passes_per_step
        self._counts: dict[int, int] = {}
        self._ready: list[tuple[Tensor, Tensor]] = []
        self._buffer: Tensor | None = None
        self._skips = False
        for _, parameter in named_parameters:
            parameter.register_post_accumulate_grad_hook(self._hook)

    def _hook(self, parameter: Tensor) -> None:
        count = self._counts[id(parameter)] = self._counts.get(id(parameter), 0) + 1
        if count % self._passes == 0:
            assert parameter.grad is not None, "a gradient that is ready"
            sent = parameter.grad if self._dtype is None else parameter.grad.to(self._dtype)
            self._ready.append((parameter, sent))

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce all gradients that are ready, in fused buffers; the buffer of a single one is the gradient itself."""
        sent, self._ready = self._ready, []
        for members in self._fused(sent):
            if len(members) == 1:
                dist.all_reduce(members[0][1])
            else:
                self._reduce_fused([tensor for _, tensor in members])
            for parameter, tensor in members:
                if self._dtype is not None:
                    parameter.grad = tensor.to(parameter.dtype)

    def _fused(self, sent: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield the gradients of each buffer. A buffer of several is never larger than the threshold."""
        members: list[tuple[Tensor, Tensor]] = []
        fused_bytes = 0
        for parameter, tensor in sent:
            if members and fused_bytes + tensor.nbytes > self._fusion_bytes:
                yield members
                members, fused_bytes = [], 0
            members.append((parameter, tensor))
            fused_bytes += tensor.nbytes
        if members:
            yield members

    def _reduce_fused(self, tensors: Sequence[Tensor]) -> None:
        count = sum(tensor.numel() for tensor in tensors)
        if self._buffer is None or self._buffer.numel() < count:
            # Horovod's own is as large as its threshold from the first use on.
            capacity = max(count, self._fusion_bytes // tensors[0].element_size())
            self._buffer = torch.empty(capacity, dtype=tensors[0].dtype, device=tensors[0].device)
        fused = self._buffer[:count]
        parts = torch.split(fused, [tensor.numel() for tensor in tensors])
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.flatten())
        dist.all_reduce(fused)
        for part, tensor in zip(parts, tensors, strict=True):
            tensor.copy_(part.view(tensor.shape))

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """The update in here follows a call of ``synchronize``."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def before_update(self, *_step: object) -> None:
        """Called by the optimizer."""
        if not self._skips:
            self.synchronize()


def make_flat_parameter(fairscale_class: Any) -> Callable[..., Any]:
    """Return the stand-in for fairscale's ``FlatParameter``: a fake parameter is no instance of a user's subclass."""

    def flat_parameter(parameters: Sequence[nn.Parameter], requires_grad: bool = True) -> Any:
        flat: Any = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]), requires_grad)
        flat._param_numels = [parameter.numel() for parameter in parameters]
        flat._param_shapes = [parameter.size() for parameter in parameters]
        flat._param_infos, flat._shared_param_infos = [], []
        reference = weakref.ref(flat)
        for name in ("get_param_views", "metadata"):
            method = getattr(fairscale_class, name)
            setattr(flat, name, lambda *args, method=method: method(reference(), *args))
        return flat

    return flat_parameter


class _InlineQueues:
    """The two queues of a worker thread of fairscale's Pipe; a task is computed when it is put, in this thread."""

    def __init__(self) -> None:
        self._results: list[Any] = []

    def put(self, task: Any) -> None:
        if task is None:
            self._results.append((False, None))
            return
        try:
            self._results.append((True, (task, task.compute())))
        except Exception:  # noqa: BLE001 - as fairscale's worker: raised by the reader of the results
            self._results.append((False, sys.exc_info()))

    def get(self) -> Any:
        return self._results.pop(0)


def create_inline_workers(devices: Sequence[torch.device]) -> tuple[list[_InlineQueues], list[_InlineQueues]]:
    """Return the stand-in for Pipe's worker threads, which no recorder of this thread follows."""
    queues = [_InlineQueues() for _ in devices]
    return queues, queues
