"""Kernel times on a device: measured kernels, and between them the roofline, corrected by the most similar ones.

Of a kernel that was not measured, the roofline's time is multiplied by measured over roofline time of the nearest
measured kernels of its kind, weighted by their distance in the logarithms of the sizes. Without any of its kind, those
of all kinds count; without any measured kernel, the roofline's time stays."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import dist, exp, inf, log
from typing import NamedTuple

from hpcbench.predict.roofline import DeviceCompute, Kernel, KernelConditions, MeasuredKernel, roofline_s
from hpcbench.strategies.layer_table import cached_by_identity


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
"""Conditions (``None``: all of them, as for a rank alone), kind of the layer, direction, precision."""


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
