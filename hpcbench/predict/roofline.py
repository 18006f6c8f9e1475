"""Kernels and the roofline of a device."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import msgspec

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
