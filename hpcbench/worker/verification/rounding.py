"""The bound of comparisons in a run's own low precision: the distance of one device's own trainings from fp64.

The value of a sum of floating-point numbers depends on its order, and strategies add in other orders than one device.
How much that changes is no constant: it depends on the network, the steps and the processor's vector width. So one
device trains the same steps in several orders of summation, and once in fp64. The largest distance from fp64 is what
rounding does to this training on this machine; ranks may be ``FACTOR`` times as far from one device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpcbench.worker.verification.reference import (
    TensorKey,
    TrainingRecord,
    absolute_difference,
    finite_part,
    is_exact,
    widened,
)

FACTOR = 8.0
"""Ranks may differ from one device by this many times the largest distance of one device from fp64: the orders are a
sample, and ranks and one device may be off in opposite directions."""

LEAST = 1e-3
"""A tensor counts as at least this part of the largest one of its kind. The gradient of a bias before BatchNorm is 0:
what is computed of it is rounding alone."""

UNIT = {"fp32": 2.0**-23, "tf32": 2.0**-15, "fp16": 2.0**-15, "bf16": 2.0**-12, "bf16_params": 2.0**-12}
"""The smallest distance from fp64 that is assumed, since one device may hit the exact loss by chance: the epsilon of
fp32, and a 32nd of that of lower precisions, where a loss is the mean of some hundred rounded numbers."""

Distances = dict[TensorKey, float]
"""Largest difference of each tensor of floating-point numbers by kind and name, relative to its ``_Size.scale``."""


class _Size(NamedTuple):
    largest: float
    """The largest absolute number."""
    scale: float
    """Divisor of a distance: ``largest``, at least ``LEAST`` of the kind's largest tensor."""


def distances(ours: TrainingRecord, reference: TrainingRecord) -> Distances:
    """The distance of every loss, of the first and last gradients, and of the weights and statistics afterwards."""
    mine, theirs = _tensors(ours), _tensors(reference)
    assert mine.keys() == theirs.keys()
    return {key: _difference(mine[key], theirs[key]) / size.scale for key, size in _sizes(theirs).items()}


def bounds(samples: Sequence[Distances], unit: float) -> Distances:
    """``FACTOR`` times the largest distance of any of ``samples``, for every tensor.

    A tensor of few numbers may be right by chance in every order: none is taken to be better than the median of its
    kind. More samples never lower a bound.

    Args:
        samples: distances from fp64 of trainings that differ in their order of summation.
        unit: the smallest distance that counts, see ``UNIT``.
    """
    largest = {key: max(sample[key] for sample in samples) for key in samples[0]}
    kinds = {kind for kind, _ in largest}
    medians = {kind: statistics.median(value for (of, _), value in largest.items() if of == kind) for kind in kinds}
    return {key: FACTOR * max(value, medians[key[0]], unit) for key, value in largest.items()}


def result_tolerances(allowed: Distances, reference: TrainingRecord) -> Distances:
    """``allowed`` in the measure of results, max|a - b| / max(1, max|b|)."""
    sizes = _sizes(_tensors(reference))
    return {key: value * sizes[key].scale / max(1.0, sizes[key].largest) for key, value in allowed.items()}


def _tensors(record: TrainingRecord) -> dict[TensorKey, Tensor]:
    losses = {f"step {step}": torch.tensor(loss, dtype=torch.float64) for step, loss in enumerate(record.losses, 1)}
    kinds: dict[str, Mapping[str, Tensor]] = {
        "loss": losses, "first gradient": record.first_gradients, "last gradient": record.gradients,
        "weight": record.state,
    }  # fmt: skip
    named = ((kind, name, tensor) for kind, tensors in kinds.items() for name, tensor in tensors.items())
    return {(kind, name): widened(tensor) for kind, name, tensor in named if not is_exact(tensor)}


def _sizes(tensors: Mapping[TensorKey, Tensor]) -> dict[TensorKey, _Size]:
    largest = {
        key: finite_part(tensor).abs().max().item() if tensor.numel() else 0.0 for key, tensor in tensors.items()
    }
    least: dict[str, float] = {}
    for kind, name in tensors:
        # Of trained tensors alone: a mask may hold the largest number that there is.
        if kind != "loss" and (kind != "weight" or ("first gradient", name) in tensors):
            least[kind] = max(least.get(kind, 0.0), LEAST * largest[kind, name])
    tiny = torch.finfo(torch.float64).tiny
    return {key: _Size(size, max(size, least.get(key[0], 0.0), tiny)) for key, size in largest.items()}


def _difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    if not a.numel():
        return 0.0
    largest = absolute_difference(a, b).max().item()
    return math.inf if math.isnan(largest) else largest


class _Reordered(TorchFunctionMode):
    """Computes linear layers, convolutions and BatchNorm in the order of a subclass: mathematically the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = kwargs or {}
        with torch._C.DisableTorchFunction():
            if "input" in more or "weight" in more:
                return func(*args, **more)
            if func is F.linear or (func in (torch.conv2d, torch.conv3d) and args[0].dim() == args[1].dim()):
                return self.product(func, *args, **more)
            if func is F.batch_norm:
                return self.batch_norm(*args, **more)
            return func(*args, **more)

    def product(
        self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **named: Any
    ) -> Tensor:
        """Compute ``func``, a linear layer of ``x`` [samples, ..., inputs] or a convolution."""
        return func(x, weight, bias, *more, **named)  # type: ignore[no-any-return]

    def batch_norm(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        """``x`` [samples, channels, *extents]."""
        return F.batch_norm(x, *more, **named)


class SamplesBackwards(_Reordered):
    """Sums over samples begin with the last one."""

    def product(
        self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **named: Any
    ) -> Tensor:
        return func(x.flip(0), weight, bias, *more, **named).flip(0)  # type: ignore[no-any-return]

    def batch_norm(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        dims = (0, *range(2, x.dim()))
        return F.batch_norm(x.flip(dims), *more, **named).flip(dims)


class SamplesInHalves(_Reordered):
    """The gradient of a weight is the sum of those of two halves of the samples."""

    def product(
        self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **named: Any
    ) -> Tensor:
        return torch.cat([func(part, weight, bias, *more, **named) for part in x.tensor_split(2) if len(part)])


class PositionsInHalves(_Reordered):
    """The gradient of a weight is the sum of those of two halves of the output's first extent.

    With one sample, sums over positions are the longest, and no order of the samples changes them.
    """

    def product(
        self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        if func is F.linear and x.dim() > 2:
            return torch.cat([F.linear(part, weight, bias) for part in x.tensor_split(2, 1)], 1)
        if func is F.linear:
            return F.linear(x, weight, bias)  # type: ignore[no-any-return]
        if isinstance(padding, str):
            return func(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        dims = x.dim() - 2
        strides, paddings, dilations = (_per_dim(value, dims) for value in (stride, padding, dilation))
        reach = dilations[0] * (weight.shape[2] - 1) + 1
        outputs = (x.shape[2] + 2 * paddings[0] - reach) // strides[0] + 1
        if outputs < 2:
            return func(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        padded = F.pad(x, (0, 0) * (dims - 1) + (paddings[0], paddings[0]))
        middle = outputs // 2
        halves = [
            padded.narrow(2, first * strides[0], (count - 1) * strides[0] + reach)
            for first, count in ((0, middle), (middle, outputs - middle))
        ]
        rest = (strides, (0, *paddings[1:]), dilations, groups)
        return torch.cat([func(half, weight, bias, *rest) for half in halves], 2)


def _per_dim(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


class InputsInHalves(_Reordered):
    """An output is the sum of what two halves of the inputs give, of BatchNorm's statistics those of the samples."""

    def product(
        self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **named: Any
    ) -> Tensor:
        dim = -1 if func is F.linear else 1
        if func is not F.linear and (weight.shape[1] == 1 or weight.shape[1] != x.shape[1]):
            return func(x, weight, bias, *more, **named)  # type: ignore[no-any-return]
        first, second = zip(x.tensor_split(2, dim), weight.tensor_split(2, 1), strict=True)
        return func(*first, bias, *more, **named) + func(*second, None, *more, **named)  # type: ignore[no-any-return]


@contextmanager
def other_kernels() -> Iterator[None]:
    """Convolutions and linear layers by torch's own kernels instead of those of oneDNN and cuDNN."""
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


AS_IT_IS, OTHER_KERNELS = "as it is", "other kernels"

ORDERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    AS_IT_IS: nullcontext,
    "positions in halves": PositionsInHalves,
    "inputs in halves": InputsInHalves,
    "samples backwards": SamplesBackwards,
    "samples in halves": SamplesInHalves,
    OTHER_KERNELS: other_kernels,
}
"""Within its context a training sums in that order; those that most networks feel come first."""
