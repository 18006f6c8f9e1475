"""Stand-ins for parts of torch, Horovod and fairscale that cannot run on fake tensors: background threads and C++."""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.gradient_buckets import DEFAULT_BUCKET_CAP_MB, FIRST_BUCKET_CAP_BYTES, MIB, fill_buckets
from hpcbench.worker.dry_run.step_recorder import StepRecorder

_MAX_BROADCAST_BYTES = 250 * MIB

CommHook = Callable[[Any, Any], Any]


class ModelledDdp(nn.Module):
    """The part of DistributedDataParallel that hpcbench's strategies use: torch's reducer asks tensors for their data.

    Buckets are tensors; they are filled, sent and read back in the reducer's order (Li et al. 2020, section 4.2). It
    learns the order of gradients in its first backward pass, as the reducer does, and makes its buckets at the end of
    that pass; the reducer does so at the beginning of the next forward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: object = None,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        del device_ids, static_graph
        self.module = module
        self._reducer = ModelledReducer(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            process_group,
            bucket_cap_mb,
            gradient_as_bucket_view,
        )
        self._group = process_group
        self._is_synchronizing = self._broadcasts_buffers = True

    def forward(self, *inputs: Any) -> Any:
        """Broadcast the buffers of rank 0 if gradients were sent since the last time, and call the module."""
        if self._broadcasts_buffers:
            broadcast_coalesced(list(self.module.buffers()), self._group)
        if torch.is_grad_enabled():
            self._broadcasts_buffers = self._reducer.is_sending = self._is_synchronizing
        return self.module(*inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sending them."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` send the buckets; it returns a future of the reduced buffer."""
        self._reducer.hook = lambda bucket: hook(state, bucket)


class ModelledBucket:
    """A flat buffer and the gradients in it: what a communication hook is called with."""

    def __init__(self, index: int, is_last: bool, parameters: list[Tensor]) -> None:
        self._index, self._is_last, self._parameters = index, is_last, parameters
        self._buffer = torch.zeros(
            sum(parameter.numel() for parameter in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        self.result: Any = None
        self.missing = len(parameters)
        self._views: list[Tensor] | None = None

    def views(self) -> list[Tensor]:
        if self._views is None:
            parts = torch.split(self._buffer, [parameter.numel() for parameter in self._parameters])
            self._views = [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]
        return self._views

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer, self._views = buffer, None

    def gradients(self) -> list[Tensor]:
        return self.views()

    def parameters(self) -> list[Tensor]:
        return self._parameters


class ModelledReducer:
    """Fills buckets as gradients become ready, and reduces them in one order."""

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None, cap_mb: float | None, as_view: bool
    ) -> None:
        self.hook: Callable[[ModelledBucket], Any] | None = None
        self.is_sending = True
        """Whether the next backward pass sends gradients."""
        self._group, self._as_view = group, as_view
        self._cap_bytes = int((DEFAULT_BUCKET_CAP_MB if cap_mb is None else cap_mb) * MIB)
        self._first_cap_bytes = FIRST_BUCKET_CAP_BYTES if cap_mb is None else self._cap_bytes
        self._ready_order: list[nn.Parameter] | None = []
        self._begun = False
        # The first pass has one bucket for all.
        self._make_buckets([parameters] if parameters else [])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _make_buckets(self, assignment: list[list[nn.Parameter]]) -> None:
        self._buckets: list[ModelledBucket] = []
        last = len(assignment) - 1
        self._buckets += [ModelledBucket(index, index == last, list(held)) for index, held in enumerate(assignment)]
        self._place = {
            id(parameter): (bucket, place)
            for bucket, held in enumerate(assignment)
            for place, parameter in enumerate(held)
        }

    def _rebuild_buckets(self, ready_order: list[nn.Parameter]) -> None:
        backwards = ready_order[::-1]
        sizes = [parameter.numel() * parameter.element_size() for parameter in backwards]
        places = fill_buckets(sizes, self._cap_bytes, self._first_cap_bytes)
        self._buckets = []
        self._make_buckets([[backwards[place] for place in bucket] for bucket in places])
        if self._as_view:
            self._point_gradients_at_buckets()

    def _point_gradients_at_buckets(self) -> None:
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters(), bucket.views(), strict=True):
                if parameter.grad is not None:
                    parameter.grad = view

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.is_sending:
            return
        if not self._begun:
            self._begun, self._next = True, 0
            for bucket in self._buckets:
                bucket.missing = len(bucket.parameters())
            # Autograd calls it at the end of the backward pass.
            Variable._execution_engine.queue_callback(self._finalize)
        number, place = self._place[id(parameter)]
        bucket = self._buckets[number]
        self._fill(parameter, bucket.views()[place])
        if self._ready_order is not None:
            self._ready_order.append(parameter)
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send(self._buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _fill(self, parameter: nn.Parameter, view: Tensor) -> None:
        gradient, divisor = parameter.grad, dist.get_world_size(self._group)
        assert gradient is not None, "a gradient that is ready"
        if gradient.untyped_storage()._cdata == view.untyped_storage()._cdata:
            if self.hook is None:
                view.div_(divisor)
        elif self.hook is None:
            torch.mul(gradient, 1.0 / divisor, out=view)
        else:
            view.copy_(gradient)
        if self._as_view:
            parameter.grad = view

    def _send(self, bucket: ModelledBucket) -> None:
        if self.hook is not None:
            with patch.object(dist, "all_reduce", partial(_all_reduce_with_future, dist.all_reduce)):
                bucket.result = self.hook(bucket)
        else:
            bucket.result = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)

    @torch.no_grad()
    def _finalize(self) -> None:
        self._begun = False
        for bucket in self._buckets:
            bucket.result.wait()
            bucket.result = None
            if not self._as_view:
                for parameter, view in zip(bucket.parameters(), bucket.views(), strict=True):
                    assert parameter.grad is not None, "a gradient that was reduced"
                    parameter.grad.copy_(view)
        if self._ready_order is not None:
            ready_order, self._ready_order = self._ready_order, None
            self._rebuild_buckets(ready_order)


class _FinishedWork:
    """A collective whose future holds its tensor: that of torch's fake process group holds nothing."""

    def __init__(self, tensor: Tensor) -> None:
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])

    def wait(self) -> None:
        """Return at once."""

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


def _all_reduce_with_future(all_reduce: Callable[..., Any], tensor: Tensor, *arguments: Any, **options: Any) -> Any:
    all_reduce(tensor, *arguments, **options)
    return _FinishedWork(tensor)


@torch.no_grad()
def broadcast_coalesced(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast ``tensors`` from the group's first rank, those of one type in buffers of 250 MiB."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        sizes = [tensor.numel() * tensor.element_size() for tensor in reversed(alike)]
        for bucket in fill_buckets(sizes, _MAX_BROADCAST_BYTES, _MAX_BROADCAST_BYTES):
            members = [alike[len(alike) - 1 - place] for place in bucket]
            flat = torch.cat([tensor.flatten() for tensor in members])
            dist.broadcast(flat, source, group=group)
            for tensor, part in zip(members, torch.split(flat, [member.numel() for member in members]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def horovod_stand_ins(spec: RunSpec, recorder: StepRecorder) -> dict[str, Any]:
    """See ``Strategy.stand_ins``."""
    fusion_bytes = int(float(options_with_defaults(spec)["fusion_threshold_mb"]) * MIB)

    def load_modelled() -> ModelledHorovod:
        recorder.modelled.add("horovod")
        return ModelledHorovod(fusion_bytes)

    runtime = "hpcbench.worker.strategies.horovod"
    return {f"{runtime}:load_horovod": load_modelled, f"{runtime}:start_horovod": lambda *_arguments: None}


def fairscale_stand_ins(spec: RunSpec, recorder: StepRecorder) -> dict[str, Any]:
    """See ``Strategy.stand_ins``; nothing without fairscale: the strategy reports how to install it."""
    del spec
    replacements: dict[str, Any] = {}
    with suppress(ImportError):
        wrapper = importlib.import_module("fairscale.nn.misc.flatten_params_wrapper")
        importlib.import_module("fairscale.nn.pipe.pipeline")
        replacements[f"{wrapper.__name__}:FlatParameter"] = make_flat_parameter(wrapper.FlatParameter)
        replacements["fairscale.nn.pipe.pipeline:create_workers"] = create_inline_workers
        replacements["fairscale.nn.pipe.pipeline:join_workers"] = lambda *_queues: None
        sharded = importlib.import_module("fairscale.nn.data_parallel.fully_sharded_data_parallel")
        # It compares values of all ranks, once, on cuda.
        replacements[f"{sharded.__name__}:validate_process_group"] = lambda *_group: None
        # Tensors that it keeps for the process would be those of an earlier dry run.
        replacements["fairscale.nn.pipe.phony:_phonies"] = dict[Any, Any]()
        replacements["fairscale.nn.pipe.copy:get_device"] = lambda _stream: recorder.device
    return replacements


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
