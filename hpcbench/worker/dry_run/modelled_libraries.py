"""Stand-ins for parts of Horovod and fairscale that cannot run on fake tensors: background threads and C++ classes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.parallel.gradient_buckets import fill_buckets


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
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in reversed(sent)]
        for places in fill_buckets(sizes, self._fusion_bytes, self._fusion_bytes):
            members = [sent[len(sent) - 1 - place] for place in places]
            if len(members) == 1:
                dist.all_reduce(members[0][1])
            else:
                self._reduce_fused([tensor for _, tensor in members])
            for parameter, tensor in members:
                if self._dtype is not None:
                    parameter.grad = tensor.to(parameter.dtype)

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
