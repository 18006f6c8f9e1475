"""How long a kernel takes by those that were measured: a roofline, corrected by what kernels like it took.

Without measurements a kernel takes the longer of its arithmetic and its memory traffic (Williams et al. 2009), and at
least a launch. Measured kernels say how far off that is where they lie; in between they are weighted by how near they
are, in logarithms of their sizes. Far from all of them it is as far off as its kind typically is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import ceil, dist, exp, inf, log

from hpcbench.parallel.kernel import BACKWARD, UPDATE, Compute, Kernel

_NEIGHBOURS = 6
_NEAR = 0.25
"""Distance (of the logarithms) below which two kernels are as good as equal."""
_FAR = 1.5
"""Distance at which a measured kernel says half of what it says of itself, and its kind the other half."""
_UNKNOWN = "*"
_PRODUCTS = ("Linear", "Product")
_TILE = 256 * 128
_REMEMBERED = 1 << 16
_NUMBER_BYTES = {"fp64": 8, "bf16": 2, "fp16": 2}

_Features = tuple[float, ...]
_Entry = tuple[_Features, float]
_Kind = tuple[str, str, str]
"""Of a layer, the direction, the precision."""


class Alike:
    """Times of kernels on one device."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._known: dict[_Kind, list[_Entry]] = defaultdict(list)
        sums: dict[_Kind, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for sample in compute.samples:
            kernel, base, seconds = sample.kernel, self.roofline_s(sample.kernel), max(sample.seconds, 1e-9)
            entry = (_features(kernel), log(seconds / base))
            kind = (kernel.kind, kernel.direction, kernel.precision)
            self._known[kind].append(entry)
            self._known[_UNKNOWN, kernel.direction, kernel.precision].append(entry)
            sums[kind] = [sums[kind][0] + seconds, sums[kind][1] + base]
        for entries in self._known.values():
            entries.sort()
        self._typical = {kind: log(seconds / base) for kind, (seconds, base) in sums.items()}
        """Of a kind's kernels together, so that the long ones count; of no kind it is the roofline."""
        self.seconds = lru_cache(maxsize=_REMEMBERED)(self._seconds)
        """Of one kernel, alone on the device. A fit asks for the same ones again and again."""

    @classmethod
    def of(cls, compute: Compute) -> Alike:
        """The one for ``compute``; samples are sorted in once, also for copies with other factors."""
        found = _MADE.get(id(compute.samples))
        if found is None or found._compute.samples is not compute.samples or _rates(found._compute) != _rates(compute):
            if len(_MADE) >= _KEPT:
                _MADE.clear()
            found = _MADE[id(compute.samples)] = cls(compute)
        return found

    def _seconds(self, kernel: Kernel) -> float:
        base = self.roofline_s(kernel)
        if not self._known or kernel.moved_bytes + kernel.flops + kernel.weight_bytes == 0:
            return base
        kind = (kernel.kind, kernel.direction, kernel.precision)
        if kind not in self._known:
            kind = (_UNKNOWN, kernel.direction, kernel.precision)
        return base * exp(_correction(_features(kernel), self._known.get(kind, []), self._typical.get(kind, 0.0)))

    def roofline_s(self, kernel: Kernel) -> float:
        """By the device's peaks alone."""
        compute = self._compute
        peak = compute.peak_flops_per_s.get(kernel.precision) or max(compute.peak_flops_per_s.values())
        flops_s = kernel.flops / (peak * compute.flops_efficiency * whole_waves(kernel, compute.processors))
        # The backward pass writes the weights' gradients beside reading the weights.
        weights = kernel.weight_bytes * (2 if kernel.direction == BACKWARD else int(kernel.direction != UPDATE))
        bytes_s = (kernel.moved_bytes + weights) / (compute.memory_bandwidth_bytes_per_s * compute.bandwidth_efficiency)
        launches = 2 if kernel.direction == BACKWARD and kernel.flops else 1
        if not (kernel.flops or kernel.moved_bytes):
            return 0.0
        return max(flops_s, bytes_s) + launches * compute.launch_s


_MADE: dict[int, Alike] = {}
_KEPT = 16


def _rates(compute: Compute) -> tuple[object, ...]:
    efficiencies = (compute.flops_efficiency, compute.bandwidth_efficiency)
    rates = (compute.peak_flops_per_s, compute.memory_bandwidth_bytes_per_s, compute.launch_s, compute.processors)
    return (*rates, *efficiencies)


def whole_waves(kernel: Kernel, processors: int) -> float:
    """The share of ``processors`` that is busy: the last wave of a matrix product's tiles is seldom full.

    Wave quantization of NVIDIA's "Matrix Multiplication Background User's Guide", with its largest tiles; a product of
    less than one wave is cut into smaller ones. A backward pass has two products, as large as the input and the
    weights. A kernel without weights or FLOPs is none.
    """
    if not processors or not kernel.flops or kernel.kind not in _PRODUCTS:
        return 1.0
    wide = _NUMBER_BYTES.get(kernel.precision, 4)
    if kernel.direction == BACKWARD:
        made = [kernel.input_bytes / wide, kernel.weight_bytes / 4 or kernel.input_bytes / wide]
    else:
        made = [kernel.output_bytes / wide]
    waves = [numbers / (_TILE * processors) for numbers in made]
    return len(made) / sum(ceil(one) / one if one > 1.0 else 1.0 for one in waves)


def _features(kernel: Kernel) -> _Features:
    """Logarithms of what tells layers apart: arithmetic, both activations, weights, and products per output."""
    outputs = max(kernel.output_bytes, 4.0)
    return (
        log(outputs),
        log(kernel.flops + 1e3),
        log(kernel.input_bytes + 64.0),
        log(kernel.weight_bytes + 64.0),
        log(kernel.flops / outputs + 1.0),
    )


def _correction(at: _Features, known: Sequence[_Entry], typical: float) -> float:
    """Weighted mean of the nearest kernels' logarithms of measured over roofline; far from all of them ``typical``."""
    distances = _nearest(at, known)
    if not distances:
        return 0.0
    weighted = [(1.0 / (_NEAR * _NEAR / 16 + distance * distance), value) for distance, value in distances]
    mean = sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)
    return typical + (mean - typical) / (1.0 + (distances[0][0] / _FAR) ** 2)


def _nearest(at: _Features, known: Sequence[_Entry]) -> list[tuple[float, float]]:
    """Distance and value of the ``_NEIGHBOURS`` nearest of ``known``, ascending by the features.

    Looked for from where the first feature is alike, on both sides, until that alone is further off than all found.
    """
    low = bisect_left(known, (at, 0.0)) - 1
    high, found = low + 1, list[tuple[float, float]]()
    while low >= 0 or high < len(known):
        below = at[0] - known[low][0][0] if low >= 0 else inf
        above = known[high][0][0] - at[0] if high < len(known) else inf
        if len(found) == _NEIGHBOURS and min(below, above) > found[-1][0]:
            break
        if below <= above:
            features, value = known[low]
            low -= 1
        else:
            features, value = known[high]
            high += 1
        distance = dist(at, features)
        if len(found) < _NEIGHBOURS or (distance, value) < found[-1]:
            insort(found, (distance, value))
            del found[_NEIGHBOURS:]
    return found
