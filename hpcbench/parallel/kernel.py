"""What a rank computes and on what: words that the oracle and a rehearsal on the worker share."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Kernel(NamedTuple):
    """One computation of one rank. Equal kernels take equal time; sizes are those of the whole micro-batch."""

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
    """Of the parameters at hand."""
    input_bytes: float
    output_bytes: float


class KernelSample(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel and how long it took: the median, and the spread between launches."""

    kernel: Kernel
    seconds: float
    spread: float = 0.0
    """Relative."""


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's device."""

    peak_flops_per_s: dict[str, float]
    """Per precision."""
    memory_bandwidth_bytes_per_s: float
    launch_s: float
    """What a kernel takes at least."""
    flops_efficiency: float = 0.6
    """Of the peak, that large matrix products reach."""
    bandwidth_efficiency: float = 0.8
    samples: list[KernelSample] = []
    """Measured kernels: others are judged by those that are most alike."""
    factors: dict[str, float] = {}
    """By model: what a whole step takes over the sum of its kernels; ``""`` is any other model's."""
    spread: float = 0.35
    """Relative uncertainty (one standard deviation of the logarithm) of a step's computation."""
    step_s: float = 0.0
    """What a step takes beside its kernels: the loop, the library's hooks."""
    crowding: dict[int, float] = {}
    """By ranks on a node: how much slower each computes than alone."""
    processors: int = 0
    """Multiprocessors that tiles of a matrix product are dealt out to; 0 where nothing is lost in the last wave."""


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker that computes nothing has to know of the cluster that it rehearses."""

    cluster: str
    source: str
    """Where the numbers are from, in words."""
    compute: Compute
