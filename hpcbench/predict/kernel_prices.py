"""Kernel times on a device: the roofline, measured kernels, and between them the roofline corrected by near ones.

The roofline's time of a kernel that was not measured is multiplied by the ratio (measured time / roofline time) of the
nearest measured kernels of its kind, weighted by their distance in the logarithms of the sizes. Without any of its
kind, those of all kinds count; without any measured kernel, the roofline's time stays."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil, dist, exp, inf, log
from typing import NamedTuple

import msgspec

from hpcbench.strategies.layer_table import cached_by_identity

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
COPY_KIND = "copy"
"""Kind of the kernels that lay tensors side by side, pad them or take them apart."""


class Kernel(NamedTuple):
    """A computation of a rank. Equal kernels take equal time; sizes are those of the whole micro-batch."""

    kind: str
    """The layer's class; of an update the optimizer."""
    direction: str
    """``forward``, ``backward`` or ``update``."""
    precision: str
    flops: float
    """Two per multiply-add."""
    moved_bytes: float
    """Activations read and written, as if nothing stayed in a cache."""
    weight_bytes: float
    """Bytes of the parameters that the kernel uses."""
    input_bytes: float
    output_bytes: float


class KernelConditions(NamedTuple):
    """Conditions under which equal kernels take equal time."""

    ranks_per_node: int = 1
    """Number of ranks that compute at the same time on a node."""
    channels_last: bool = False
    cudnn_benchmark: bool = True


class MeasuredKernel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kernel and the wall time that it took within a pass through a model."""

    kernel: Kernel
    conditions: KernelConditions
    seconds: float


class DeviceCompute(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of the device that a rank computes on."""

    peak_flops_per_s: dict[str, float]
    """Peak rates by precision."""
    memory_bandwidth_bytes_per_s: float
    launch_s: float
    """Seconds of a kernel's launch, in addition to its computation."""
    flops_efficiency: float = 0.6
    """Fraction of the peak that large matrix products reach."""
    bandwidth_efficiency: float = 0.8
    kernels: list[MeasuredKernel] = []
    """Others are priced by the most similar of them."""
    spread: float = 0.35
    """Relative uncertainty (one standard deviation of the logarithm) of a step's computation."""
    measured_spread: float = 0.03
    """The same, where all of its kernels were measured."""
    crowding: dict[int, float] = {}
    """Factor on each rank's computation, relative to a rank alone, by the number of ranks on a node."""
    processors: int = 0
    """Multiprocessors that tiles of a matrix product are dealt out to; 0 where nothing is lost in the last wave."""


_MATRIX_PRODUCT_KINDS = ("Linear", "Product")
_TILE_ELEMENTS = 256 * 128
_NUMBER_BYTES = {"fp64": 8, "bf16": 2, "fp16": 2}


def roofline_s(kernel: Kernel, compute: DeviceCompute) -> float:
    """Return the seconds of a kernel by the device's peaks alone (Williams et al. 2009).

    A kernel takes the longer of its arithmetic and its memory traffic, and its launch.
    """
    peak = compute.peak_flops_per_s.get(kernel.precision) or max(compute.peak_flops_per_s.values())
    flops_s = kernel.flops / (peak * compute.flops_efficiency * wave_efficiency(kernel, compute.processors))
    # The backward pass writes the weights' gradients beside reading the weights.
    weights = kernel.weight_bytes * (2 if kernel.direction == BACKWARD else int(kernel.direction != UPDATE))
    bytes_s = (kernel.moved_bytes + weights) / (compute.memory_bandwidth_bytes_per_s * compute.bandwidth_efficiency)
    launches = 2 if kernel.direction == BACKWARD and kernel.flops else 1
    if not (kernel.flops or kernel.moved_bytes):
        return 0.0
    return max(flops_s, bytes_s) + launches * compute.launch_s


def wave_efficiency(kernel: Kernel, processors: int) -> float:
    """The share of ``processors`` that is busy: the last wave of a matrix product's tiles is seldom full.

    Wave quantization of NVIDIA's "Matrix Multiplication Background User's Guide", with its largest tiles; a product of
    less than one wave is cut into smaller ones. A backward pass has two products, as large as the input and the
    weights. A kernel without weights or FLOPs is none.
    """
    if not processors or not kernel.flops or kernel.kind not in _MATRIX_PRODUCT_KINDS:
        return 1.0
    number_bytes = _NUMBER_BYTES.get(kernel.precision, 4)
    products = [kernel.output_bytes / number_bytes]
    if kernel.direction == BACKWARD:
        products = [kernel.input_bytes / number_bytes, kernel.weight_bytes / 4 or kernel.input_bytes / number_bytes]
    waves = [elements / (_TILE_ELEMENTS * processors) for elements in products]
    return len(waves) / sum(ceil(count) / count if count > 1.0 else 1.0 for count in waves)


class KernelPrice(NamedTuple):
    """The time of a kernel, and whether that kernel itself was measured under the same conditions."""

    seconds: float
    is_measured: bool


_NEIGHBOURS = 3
_NEAR_DISTANCE = 0.05
"""Distance (of the logarithms) below which two kernels are as good as equal."""
_ANY_KIND = "*"
_CACHED_KERNELS = 1 << 16

_Features = tuple[float, ...]
_Class = tuple[KernelConditions | None, str, str, str]
"""Conditions, kind of the layer, direction, precision. With ``None`` kernels of all conditions are in the class."""


class KernelPrices:
    """Times of kernels on one device."""

    def __init__(self, compute: DeviceCompute) -> None:
        self._compute = compute
        self._measured: dict[tuple[KernelConditions, Kernel], float] = {}
        self._similar: dict[_Class, list[tuple[_Features, float]]] = defaultdict(list)
        for one in compute.kernels:
            base_s = roofline_s(one.kernel, compute)
            if base_s <= 0.0 or one.seconds <= 0.0:
                continue
            self._measured[one.conditions, one.kernel] = one.seconds
            features, kind = _features(one.kernel), one.kernel.kind
            ratio, alone = log(one.seconds / base_s), log(self.crowding(one.conditions.ranks_per_node))
            for conditions, value in ((one.conditions, ratio), (None, ratio - alone)):
                for name in (kind, _ANY_KIND):
                    key = (conditions, name, one.kernel.direction, one.kernel.precision)
                    self._similar[key].append((features, value))
        for entries in self._similar.values():
            entries.sort()
        self.price = lru_cache(maxsize=_CACHED_KERNELS)(self._price)
        """Return the ``KernelPrice`` of a kernel of one rank under some conditions."""

    @staticmethod
    @cached_by_identity(16)
    def of(compute: DeviceCompute) -> KernelPrices:
        """Return the prices of a device, which are computed once."""
        return KernelPrices(compute)

    def crowding(self, ranks_per_node: int) -> float:
        """Return the factor on a rank's computation beside others on its node."""
        return interpolate(self._compute.crowding, ranks_per_node) if self._compute.crowding else 1.0

    def _price(self, kernel: Kernel, conditions: KernelConditions) -> KernelPrice:
        measured_s = self._measured.get((conditions, kernel))
        if measured_s is not None:
            return KernelPrice(measured_s, True)
        base_s, beside = roofline_s(kernel, self._compute), self.crowding(conditions.ranks_per_node)
        if not base_s:
            return KernelPrice(0.0, True)
        features, rest = _features(kernel), (kernel.direction, kernel.precision)
        for place, kind in ((conditions, kernel.kind), (None, kernel.kind), (conditions, _ANY_KIND), (None, _ANY_KIND)):
            entries = self._similar.get((place, kind, *rest))
            if entries:
                factor = exp(_log_ratio(features, entries))
                return KernelPrice(base_s * factor * (beside if place is None else 1.0), False)
        return KernelPrice(base_s * beside, False)


def crowding_of(kernels: Sequence[MeasuredKernel]) -> dict[int, float]:
    """Return by ranks on a node the time of their kernels over the time of the same kernels on a rank alone."""
    alone = {one.kernel: one.seconds for one in kernels if one.conditions.ranks_per_node == 1}
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in kernels:
        if one.kernel in alone and one.conditions.ranks_per_node > 1:
            both = sums[one.conditions.ranks_per_node]
            both[0], both[1] = both[0] + one.seconds, both[1] + alone[one.kernel]
    return {1: 1.0, **{ranks: max(1.0, beside / by_itself) for ranks, (beside, by_itself) in sums.items()}}


def interpolate(figures: dict[int, float], at: float) -> float:
    """Return ``figures`` interpolated linearly; beyond the last one, on the line through the last two."""
    known = sorted(figures.items())
    if len(known) == 1 or at <= known[0][0]:
        return known[0][1]
    for (left, low), (right, high) in pairwise(known):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    (left, low), (right, high) = known[-2:]
    return max(high + (high - low) * (at - right) / (right - left), high)


def _features(kernel: Kernel) -> _Features:
    """Logarithms of a layer's features: arithmetic, both activations, weights, and products per output."""
    outputs = max(kernel.output_bytes, 4.0)
    return (
        log(outputs),
        log(kernel.flops + 1e3),
        log(kernel.input_bytes + 64.0),
        log(kernel.weight_bytes + 64.0),
        log(kernel.flops / outputs + 1.0),
    )


def _log_ratio(features: _Features, entries: Sequence[tuple[_Features, float]]) -> float:
    """Return the mean logarithm of measured over roofline time of the nearest of ``entries``, weighted by distance."""
    near = _nearest(features, entries)
    weights = [1.0 / (_NEAR_DISTANCE**2 + distance * distance) ** 2 for distance, _ in near]
    return sum(weight * value for weight, (_, value) in zip(weights, near, strict=True)) / sum(weights)


def _nearest(features: _Features, entries: Sequence[tuple[_Features, float]]) -> list[tuple[float, float]]:
    """Return distance and value of the ``_NEIGHBOURS`` nearest of ``entries``, which are sorted by their features.

    The search starts at the nearest first feature, in both directions, and ends where that distance alone exceeds those
    of all neighbours.
    """
    low = bisect_left(entries, (features, 0.0)) - 1
    high, near = low + 1, list[tuple[float, float]]()
    while low >= 0 or high < len(entries):
        below = features[0] - entries[low][0][0] if low >= 0 else inf
        above = entries[high][0][0] - features[0] if high < len(entries) else inf
        if len(near) == _NEIGHBOURS and min(below, above) > near[-1][0]:
            break
        place = low if below <= above else high
        low, high = (low - 1, high) if below <= above else (low, high + 1)
        distance = dist(features, entries[place][0])
        if len(near) < _NEIGHBOURS or (distance, entries[place][1]) < near[-1]:
            insort(near, (distance, entries[place][1]))
            del near[_NEIGHBOURS:]
    return near
