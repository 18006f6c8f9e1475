"""How long a kernel takes by those that were measured: a roofline, corrected by what kernels like it took.

Without measurements a kernel takes the longer of its arithmetic and its memory traffic (Williams et al. 2009), and at
least a launch. Measured kernels say how far off that is where they lie; in between they are weighted by how near they
are, in logarithms of their sizes.
"""

from __future__ import annotations

from collections import defaultdict
from math import ceil, exp, log, sqrt

from hpcbench.parallel.kernel import BACKWARD, UPDATE, Compute, Kernel, KernelSample

_NEIGHBOURS = 6
_NEAR = 0.25
"""Distance (of the logarithms) below which two kernels are as good as equal."""
_UNKNOWN = "*"
_PRODUCTS = ("Linear", "Product")
_TILE = 256 * 128
_NUMBER_BYTES = {"fp64": 8, "bf16": 2, "fp16": 2}


class Alike:
    """Times of kernels on one device."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._known: dict[tuple[str, str, str], list[tuple[tuple[float, ...], float]]] = defaultdict(list)
        for sample in compute.samples:
            kernel = _kernel(sample)
            entry = (_features(kernel), log(max(sample.seconds, 1e-9) / self.roofline_s(kernel)))
            self._known[kernel.kind, kernel.direction, kernel.precision].append(entry)
            self._known[_UNKNOWN, kernel.direction, kernel.precision].append(entry)

    @classmethod
    def of(cls, compute: Compute) -> Alike:
        """The one for ``compute``; samples are sorted in once."""
        found = _MADE.get(id(compute))
        if found is None or found._compute is not compute:
            found = _MADE[id(compute)] = cls(compute)
        return found

    def seconds(self, kernel: Kernel) -> float:
        """Of one kernel, alone on the device."""
        base = self.roofline_s(kernel)
        if not self._known or kernel.moved_bytes + kernel.flops + kernel.weight_bytes == 0:
            return base
        known = self._known.get((kernel.kind, kernel.direction, kernel.precision)) or self._known.get(
            (_UNKNOWN, kernel.direction, kernel.precision), []
        )
        return base * exp(_correction(_features(kernel), known))

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


def _kernel(sample: KernelSample) -> Kernel:
    return Kernel(*(getattr(sample, name) for name in Kernel._fields))


def _features(kernel: Kernel) -> tuple[float, ...]:
    """Logarithms of what tells layers apart: arithmetic, both activations, weights, and products per output."""
    outputs = max(kernel.output_bytes, 4.0)
    return (
        log(kernel.flops + 1e3),
        log(kernel.input_bytes + 64.0),
        log(outputs),
        log(kernel.weight_bytes + 64.0),
        log(kernel.flops / outputs + 1.0),
    )


def _correction(at: tuple[float, ...], known: list[tuple[tuple[float, ...], float]]) -> float:
    """Weighted mean of the nearest kernels' logarithms of measured over roofline."""
    distances = sorted((_distance(at, features), value) for features, value in known)[:_NEIGHBOURS]
    if not distances:
        return 0.0
    weighted = [(1.0 / (_NEAR * _NEAR / 16 + distance * distance), value) for distance, value in distances]
    return sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)


def _distance(left: tuple[float, ...], right: tuple[float, ...]) -> float:
    return sqrt(sum((a - b) ** 2 for a, b in zip(left, right, strict=True)))
