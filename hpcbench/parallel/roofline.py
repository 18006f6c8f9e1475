"""Kernel times on a device: a roofline model, corrected by the nearest measured kernels.
Without measurements a kernel takes the longer of its arithmetic and its memory traffic (Williams et al. 2009), and at
least one launch. Measured kernels correct this, weighted by their distance in the logarithms of the sizes; far from
all of them the typical correction of the kind applies.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import ceil, dist, exp, inf, log
from typing import NamedTuple

import msgspec

from hpcbench.parallel.layer_table import memoized

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


class KernelSample(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel and how long it took: the median, and the spread between launches."""

    kernel: Kernel
    seconds: float
    spread: float = 0.0
    """Relative spread."""


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
    samples: list[KernelSample] = []
    """Measured kernels: others are estimated from the most similar ones."""
    factors: dict[str, float] = {}
    """Time of a whole step over the sum of its kernels' times, by model; ``""`` is the entry of any other model."""
    spread: float = 0.35
    """Relative uncertainty (one standard deviation of the logarithm) of a step's computation."""
    step_s: float = 0.0
    """Seconds of a step outside of its kernels: the loop, the library's hooks."""
    crowding: dict[int, float] = {}
    """Factor on each rank's computation, relative to a rank alone, by the number of ranks on a node."""
    processors: int = 0
    """Multiprocessors that tiles of a matrix product are dealt out to; 0 where nothing is lost in the last wave."""


_NEIGHBOURS = 6
_NEAR_DISTANCE = 0.25
"""Distance (of the logarithms) below which two kernels are as good as equal."""
_FAR_DISTANCE = 1.5
"""Distance at which a measured kernel and the mean of its kind have equal weight in a prediction."""
_ANY_KIND = "*"
_MATRIX_PRODUCT_KINDS = ("Linear", "Product")
_TILE_ELEMENTS = 256 * 128
_CACHED_KERNELS = 1 << 16
_NUMBER_BYTES = {"fp64": 8, "bf16": 2, "fp16": 2}

_FeatureVector = tuple[float, ...]
_CorrectionSample = tuple[_FeatureVector, float]
_KernelClass = tuple[str, str, str]
"""Kind of the layer, direction, precision."""


class RooflineModel:
    """Times of kernels on one device."""

    def __init__(self, compute: DeviceCompute) -> None:
        self._compute = compute
        self._known: dict[_KernelClass, list[_CorrectionSample]] = defaultdict(list)
        sums: dict[_KernelClass, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for sample in compute.samples:
            kernel, base, seconds = sample.kernel, self.roofline_s(sample.kernel), max(sample.seconds, 1e-9)
            entry = (_kernel_features(kernel), log(seconds / base))
            kind = (kernel.kind, kernel.direction, kernel.precision)
            self._known[kind].append(entry)
            self._known[_ANY_KIND, kernel.direction, kernel.precision].append(entry)
            sums[kind] = [sums[kind][0] + seconds, sums[kind][1] + base]
        for entries in self._known.values():
            entries.sort()
        self._typical = {kind: log(seconds / base) for kind, (seconds, base) in sums.items()}
        """Logarithm of measured over roofline time by kind, over the sum of its kernels so that long ones count; a kind
        without measurements has the roofline's time."""
        self.seconds = lru_cache(maxsize=_CACHED_KERNELS)(self._seconds)
        """Seconds of one kernel, alone on the device. The results are cached because a fit requests the same kernels
        many times."""

    @staticmethod
    @memoized(16, lambda compute: (compute.samples, _device_rates(compute)))
    def of(compute: DeviceCompute) -> RooflineModel:
        """The one for ``compute``; samples are sorted in once, also for copies with other factors."""
        return RooflineModel(compute)

    def _seconds(self, kernel: Kernel) -> float:
        base = self.roofline_s(kernel)
        if not self._known or kernel.moved_bytes + kernel.flops + kernel.weight_bytes == 0:
            return base
        kind = (kernel.kind, kernel.direction, kernel.precision)
        if kind not in self._known:
            kind = (_ANY_KIND, kernel.direction, kernel.precision)
        return base * exp(
            _log_correction(_kernel_features(kernel), self._known.get(kind, []), self._typical.get(kind, 0.0))
        )

    def roofline_s(self, kernel: Kernel) -> float:
        """Return the seconds by the device's peaks alone."""
        compute = self._compute
        peak = compute.peak_flops_per_s.get(kernel.precision) or max(compute.peak_flops_per_s.values())
        flops_s = kernel.flops / (peak * compute.flops_efficiency * wave_efficiency(kernel, compute.processors))
        # The backward pass writes the weights' gradients beside reading the weights.
        weights = kernel.weight_bytes * (2 if kernel.direction == BACKWARD else int(kernel.direction != UPDATE))
        bytes_s = (kernel.moved_bytes + weights) / (compute.memory_bandwidth_bytes_per_s * compute.bandwidth_efficiency)
        launches = 2 if kernel.direction == BACKWARD and kernel.flops else 1
        if not (kernel.flops or kernel.moved_bytes):
            return 0.0
        return max(flops_s, bytes_s) + launches * compute.launch_s


def _device_rates(compute: DeviceCompute) -> tuple[object, ...]:
    peaks = tuple(sorted(compute.peak_flops_per_s.items()))
    efficiencies = (compute.flops_efficiency, compute.bandwidth_efficiency)
    return (peaks, compute.memory_bandwidth_bytes_per_s, compute.launch_s, compute.processors, *efficiencies)


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


def _kernel_features(kernel: Kernel) -> _FeatureVector:
    """Logarithms of a layer's features: arithmetic, both activations, weights, and products per output."""
    outputs = max(kernel.output_bytes, 4.0)
    return (
        log(outputs),
        log(kernel.flops + 1e3),
        log(kernel.input_bytes + 64.0),
        log(kernel.weight_bytes + 64.0),
        log(kernel.flops / outputs + 1.0),
    )


def _log_correction(features: _FeatureVector, samples: Sequence[_CorrectionSample], typical: float) -> float:
    """Weighted mean of the nearest kernels' logarithms of measured over roofline; far from all of them ``typical``."""
    distances = _nearest_samples(features, samples)
    if not distances:
        return 0.0
    weighted = [
        (1.0 / (_NEAR_DISTANCE * _NEAR_DISTANCE / 16 + distance * distance), value) for distance, value in distances
    ]
    mean = sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)
    return typical + (mean - typical) / (1.0 + (distances[0][0] / _FAR_DISTANCE) ** 2)


def _nearest_samples(features: _FeatureVector, samples: Sequence[_CorrectionSample]) -> list[tuple[float, float]]:
    """Distance and value of the ``_NEIGHBOURS`` nearest of ``samples``, ascending by the features.

    The search starts at the nearest first feature, in both directions, and ends where that distance alone exceeds those
    of all neighbours.
    """
    low = bisect_left(samples, (features, 0.0)) - 1
    high, neighbours = low + 1, list[tuple[float, float]]()
    while low >= 0 or high < len(samples):
        below = features[0] - samples[low][0][0] if low >= 0 else inf
        above = samples[high][0][0] - features[0] if high < len(samples) else inf
        if len(neighbours) == _NEIGHBOURS and min(below, above) > neighbours[-1][0]:
            break
        if below <= above:
            sample_features, value = samples[low]
            low -= 1
        else:
            sample_features, value = samples[high]
            high += 1
        distance = dist(features, sample_features)
        if len(neighbours) < _NEIGHBOURS or (distance, value) < neighbours[-1]:
            insort(neighbours, (distance, value))
            del neighbours[_NEIGHBOURS:]
    return neighbours
