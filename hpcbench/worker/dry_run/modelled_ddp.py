"""A stand-in for torch's DistributedDataParallel, whose reducer in C++ cannot run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from hpcbench.strategies.gradient_buckets import DEFAULT_BUCKET_CAP_MB, FIRST_BUCKET_CAP_BYTES, MIB, fill_buckets

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
