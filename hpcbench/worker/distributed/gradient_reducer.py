"""Bucketed all-reduce of gradients that overlaps with the backward pass (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.strategies.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, fill_buckets


class GradientReducer:
    """Adds up the gradients of ``parameters``, which every rank of ``group`` holds in the same order.

    DDP does the same for a whole module that all ranks of one group replicate; where layers are shared between ranks,
    some parameters have one set of replicas and some another. Buckets are sent in one order on all ranks, whatever
    order their gradients are ready in.

    A bucket is a new tensor of each step into which one operator copies its gradients; from then on ``grad`` of its
    parameters are views of it, so that nothing is copied back::

        backward pass   | grad | grad | grad |  --cat-->  | bucket       |  --all_reduce-->  sums
        parameter.grad                                    |    |    |    |  views
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB
    ) -> None:
        self._group = group
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._buckets: list[list[tuple[nn.Parameter, tuple[int, ...]]]] = []
        """Parameters with the strides of their gradients there: those of tensors without gaps in the parameter's memory
        format, such as channels_last."""
        for alike in by_dtype.values():
            sizes = [parameter.numel() * parameter.element_size() for parameter in alike]
            filled = fill_buckets(sizes, max(int(bucket_cap_mb * MIB), 1))
            members = [(parameter, torch.empty_like(parameter, device="meta").stride()) for parameter in alike]
            self._buckets += [[members[index] for index in bucket] for bucket in filled]
        self._bucket_of = {
            id(parameter): number for number, bucket in enumerate(self._buckets) for parameter, _ in bucket
        }
        self.is_paused = False
        """Gradients stay unsent, to be sent with those of a later backward pass."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
        self._begin()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes in here leave their gradients to be sent with the next one's."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def finish(self) -> None:
        """Send what is left, and wait for all."""
        self.send_rest()
        for work in self._under_way:
            work.wait()
        for parameter in self._without_gradient:
            # By a gradient of zeros an optimizer would decay the weight. Fake tensors, of another type, have no values.
            if type(parameter.grad) is Tensor and not parameter.grad.any():
                parameter.grad = None
        self._begin()

    def send_rest(self) -> None:
        """Send the buckets that were not ready by themselves; zeros stand for a parameter without a gradient."""
        while self._next < len(self._buckets):
            self._send()

    def _begin(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._under_way: list[dist.Work] = []
        self._without_gradient: list[nn.Parameter] = []

    def _ready(self, parameter: Tensor) -> None:
        if self.is_paused:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._without_gradient += [parameter for parameter, _ in bucket if parameter.grad is None]
        gradients = [flatten_gradient(*member) for member in bucket]
        flat = torch.cat(gradients)
        parts = torch.split(flat, [len(gradient) for gradient in gradients])
        for (parameter, strides), part in zip(bucket, parts, strict=True):
            parameter.grad = part.as_strided(parameter.shape, strides)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None, "an asynchronous collective of a rank outside its group"
        self._under_way.append(work)
        self._next += 1


def flatten_gradient(parameter: nn.Parameter, strides: tuple[int, ...]) -> Tensor:
    """Return the gradient of ``parameter`` [numel] in the order in which memory of ``strides``, without gaps, holds it.

    A parameter without a gradient has zeros. Only a gradient that lies otherwise is copied.
    """
    gradient = parameter.grad
    if gradient is None:
        return parameter.new_zeros(parameter.numel())
    lengths = zip(gradient.shape, gradient.stride(), strides, strict=True)
    if any(size > 1 and own != wanted for size, own, wanted in lengths):
        laid_out = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
        gradient = laid_out.copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))
