"""The rounding of one device: the bound of every comparison in a run's own low precision.

The value of a sum of floating-point numbers depends on its order, and strategies add in other orders than one device.
How much that changes is no constant: it depends on the network, on the steps and on the processor's vector width. So
one device trains the same steps in several orders of summation, and once in fp64. The largest distance from fp64 is
what rounding does to this training on this machine; ranks may be ``FACTOR`` times as far from one device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpcbench.worker.verification.reference import TrainingRecord

FACTOR = 8.0
"""Ranks may differ from one device by so many times the largest distance that one device has from fp64: the orders are a
sample, and ranks and one device may be off in opposite directions."""

LEAST = 1e-3
"""A tensor counts as at least this part of the largest one of its kind. The gradient of a bias before BatchNorm is 0:
what is computed of it is rounding alone."""

UNIT = {"fp32": 2.0**-23, "bf16": 2.0**-12}
"""No tensor is taken to be nearer to fp64: one device may hit the exact loss by chance. In fp32 the distance of 1 from
the next number; a loss in bf16 is the mean of what some hundred such numbers, 2^-8 apart, give."""

Distances = dict[tuple[str, str], float]
"""By kind (``loss``, ``first gradient``, ``last gradient``, ``weight``) and name: the largest difference of a tensor,
relative to its own largest number."""


def distances(ours: TrainingRecord, reference: TrainingRecord) -> Distances:
    """Return the distances of losses, of gradients of the first and last step, and of weights and statistics after it."""
    losses = {f"step {step}": (a, b) for step, (a, b) in enumerate(zip(ours.losses, reference.losses, strict=True), 1)}
    found = {("loss", name): abs(a - b) / abs(b) for name, (a, b) in losses.items()}
    found |= _distances("first gradient", ours.first_gradients, reference.first_gradients)
    found |= _distances("last gradient", ours.gradients, reference.gradients)
    return found | _distances("weight", ours.state, reference.state)


def _distances(kind: str, ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Distances:
    assert ours.keys() == reference.keys() != set()
    sizes = {name: tensor.abs().max().item() for name, tensor in reference.items()}
    least = LEAST * max(sizes[name] for name, tensor in reference.items() if tensor.is_floating_point())
    return {
        (kind, name): _difference(ours[name], tensor) / max(sizes[name], least, torch.finfo(torch.float64).tiny)
        for name, tensor in reference.items()
    }


def _difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    found = (a.double() - b.double()).abs().max().item()
    return math.inf if math.isnan(found) else found


def bounds(trainings: Iterable[TrainingRecord], exact: TrainingRecord, unit: float) -> Distances:
    """``FACTOR`` times the largest distance of any of ``trainings`` from ``exact``, for every tensor.

    A tensor of few numbers may be right by chance in every order: none is taken to be better than the median of its
    kind.
    """
    each = [distances(one, exact) for one in trainings]
    largest = {key: max(one[key] for one in each) for key in each[0]}
    kinds = {kind for kind, _ in largest}
    medians = {kind: statistics.median(value for (of, _), value in largest.items() if of == kind) for kind in kinds}
    return {key: FACTOR * max(value, medians[key[0]], unit) for key, value in largest.items()}


class Excess(NamedTuple):
    """A tensor that is farther from one device than rounding explains."""

    kind: str
    name: str
    distance: float
    bound: float


def excesses(ours: TrainingRecord, reference: TrainingRecord, allowed: Distances) -> list[Excess]:
    """Kind by kind, the largest excess over its bound first.

    With the first update a mistake spreads to all tensors; the gradients before it show where it began.
    """
    found = [Excess(*key, value, allowed[key]) for key, value in distances(ours, reference).items()]
    too_far = [one for one in found if not one.distance <= one.bound]
    order = ["loss", "first gradient", "last gradient", "weight"]
    return sorted(too_far, key=lambda one: (order.index(one.kind), -one.distance / one.bound))


class _Reordered(TorchFunctionMode):
    """Computes linear layers, convolutions and BatchNorm as a subclass says: mathematically the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = kwargs or {}
        with torch._C.DisableTorchFunction():
            if func is F.linear:
                return self.linear(*args, **more)
            if func in (torch.conv2d, torch.conv3d):
                return self.convolution(func, *args, **more)
            if func is F.batch_norm:
                return self.batch_norm(*args, **more)
            return func(*args, **more)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` [samples, ..., inputs]."""
        return F.linear(x, weight, bias)

    def convolution(self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any) -> Tensor:
        """``x`` [samples, channels, *extents]."""
        return func(x, weight, bias, *more)  # type: ignore[no-any-return]

    def batch_norm(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        """``x`` [samples, channels, *extents]."""
        return F.batch_norm(x, *more, **named)


class SamplesBackwards(_Reordered):
    """Sums over samples begin with the last one."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.flip(0), weight, bias).flip(0)

    def convolution(self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any) -> Tensor:
        return func(x.flip(0), weight, bias, *more).flip(0)  # type: ignore[no-any-return]

    def batch_norm(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        dims = (0, *range(2, x.dim()))
        return F.batch_norm(x.flip(dims), *more, **named).flip(dims)


class SamplesInHalves(_Reordered):
    """The gradient of a weight is the sum of those of two halves of the samples."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.cat([F.linear(part, weight, bias) for part in x.tensor_split(2)])

    def convolution(self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any) -> Tensor:
        return torch.cat([func(part, weight, bias, *more) for part in x.tensor_split(2) if len(part)])


class InputsInHalves(_Reordered):
    """An output is the sum of what two halves of the inputs give, of BatchNorm's statistics those of the samples."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        first, second = zip(x.tensor_split(2, -1), weight.tensor_split(2, -1), strict=True)
        return F.linear(*first, bias) + F.linear(*second)

    def convolution(self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any) -> Tensor:
        if weight.shape[1] == 1 or weight.shape[1] != x.shape[1]:
            return func(x, weight, bias, *more)  # type: ignore[no-any-return]
        first, second = zip(x.tensor_split(2, 1), weight.tensor_split(2, 1), strict=True)
        return func(*first, bias, *more) + func(*second, None, *more)  # type: ignore[no-any-return]


@contextmanager
def other_kernels() -> Iterator[None]:
    """Convolutions and linear layers by torch's own kernels instead of oneDNN's."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


AS_IT_IS = "as it is"

ORDERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    AS_IT_IS: nullcontext,
    "samples backwards": SamplesBackwards,
    "samples in halves": SamplesInHalves,
    "inputs in halves": InputsInHalves,
    "other kernels": other_kernels,
}
