"""Bucketed all-reduce of gradients that overlaps with the backward pass (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.parallel.gradient_buckets import DEFAULT_BUCKET_CAP_MB, MIB, fill_buckets


class GradientReducer:
    """Adds up the gradients of ``parameters``, which every rank of ``group`` holds in the same order.

    DDP does the same for a whole module that all ranks of one group replicate; where layers are shared between ranks,
    some parameters have one set of replicas and some another. Buckets are sent in one order on all ranks, whatever
    order their gradients are ready in.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB
    ) -> None:
        self._group = group
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        filled = fill_buckets(sizes, max(int(bucket_cap_mb * MIB), 1))
        self._buckets = [[parameters[index] for index in bucket] for bucket in filled]
        self._bucket_of = {id(member): number for number, bucket in enumerate(self._buckets) for member in bucket}
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
        for bucket, (flat, work) in zip(self._buckets, self._under_way, strict=True):
            work.wait()
            parts = torch.split(flat, [parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view_as(parameter))
        self._begin()

    def send_rest(self) -> None:
        """Send what was not ready by itself; a parameter that got no gradient counts as zero."""
        while self._next < len(self._buckets):
            self._send()

    def _begin(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._under_way: list[tuple[Tensor, dist.Work]] = []

    def _ready(self, parameter: Tensor) -> None:
        if self.is_paused:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        gradients = [torch.zeros_like(member) if member.grad is None else member.grad for member in bucket]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None, "an asynchronous collective of a rank outside its group"
        self._under_way.append((flat, work))
        self._next += 1
