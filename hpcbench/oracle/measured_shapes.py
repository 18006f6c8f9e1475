"""Measured times of the blocks and messages of one sweep, and their lookup by shape.

A kernel counts as measured where its sizes per sample, the precision, the ranks on a node and the way in which
gradients are kept are equal, and its samples were measured or lie between two numbers that were. Parts of a layer by
positions or heads lie between measured parts of it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import exp, isclose, log
from statistics import fmean
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.collective_formulas import HockneyLink
from hpcbench.parallel.layer_table import cached_by_identity
from hpcbench.parallel.roofline import UPDATE, Kernel
from hpcbench.parallel.traffic import MessageShape

_MIN_S = 1e-9


class KernelConditions(NamedTuple):
    """Conditions under which equal kernels take equal time."""

    ranks_per_node: int
    """Number of ranks that compute at the same time on a node."""
    accumulates: bool = False
    """Whether gradients are added to those of an earlier micro-batch."""
    channels_last: bool = False
    cudnn_benchmark: bool = True


class MeasuredKernel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a block's measured wall time."""

    kernel: Kernel
    samples: int
    """Number of samples of the micro-batch; 1 for an update."""
    conditions: KernelConditions
    seconds: float
    is_part: bool = False
    """Whether it is the time of the whole layer times the ratio of part and whole, both called alone."""


class MeasuredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The measured time of a call, including the time to issue it."""

    shape: MessageShape
    tasks_per_node: int
    seconds: float


class MeasuredOverlap(msgspec.Struct, frozen=True, kw_only=True):
    """The measured slowdowns of a pass through a model and of collectives under each other."""

    workload: str
    """``workload_key`` of the runs that it is for."""
    samples: int
    """Number of samples of the pass."""
    nodes: int
    tasks_per_node: int
    operation: str
    slowdown: float
    """Factor on the pass while the collectives run."""
    comm_slowdown: float
    """Factor on the collectives while the pass runs."""

    @property
    def conditions(self) -> tuple[object, ...]:
        """Return the values of which there is one measurement."""
        return self.workload, self.samples, self.nodes, self.tasks_per_node, self.operation


class MeasuredCuts(NamedTuple):
    """A number of parts into which every layer that can be cut was cut and measured."""

    workload: str
    """``workload_key`` of the runs that it is for."""
    samples: int
    conditions: KernelConditions
    parts: int


def workload_key(spec: RunSpec) -> str:
    """Return a text that is equal for runs whose layers are equal at equal numbers of samples."""
    parts = (spec.model, spec.model_options, spec.dataset, spec.input_size, spec.compute_precision, spec.channels_last)
    return msgspec.json.encode(parts).decode()


class MeasuredShapes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All shapes that probes of sweeps measured on one cluster."""

    kernels: list[MeasuredKernel] = []
    messages: list[MeasuredMessage] = []
    overlaps: list[MeasuredOverlap] = []
    cuts: list[MeasuredCuts] = []
    compute_spread: float = 0.0
    """Relative uncertainty of a step's computation where all blocks were measured."""
    comm_spread: float = 0.0
    sweeps: list[str] = []
    environment_digests: list[str] = []
    links: tuple[HockneyLink, HockneyLink] | None = None
    """The profile's inside nodes and between nodes when messages were measured."""
    environment: str | None = None
    """Name of the environment in the profile; ``None`` is its default."""
    environment_keys: list[str] = []
    """Hashes of the software as the submitter saw it."""

    def over_links(self, links: tuple[HockneyLink, HockneyLink]) -> MeasuredShapes:
        """Return the shapes without messages and overlaps over a link that the profile has changed since."""
        before = self.links or links
        is_same = [old == new for old, new in zip(before, links, strict=True)]
        if all(is_same):
            return self
        messages = [message for message in self.messages if is_same[message.shape.nodes > 1]]
        overlaps = [overlap for overlap in self.overlaps if is_same[overlap.nodes > 1]]
        return msgspec.structs.replace(self, messages=messages, overlaps=overlaps)

    def joined(self, later: MeasuredShapes) -> MeasuredShapes:
        """Return both; of equal shapes the later measurement."""
        earlier = self if later.links is None else self.over_links(later.links)
        kernels = {
            (each.kernel, each.samples, each.conditions, each.is_part): each for each in (*self.kernels, *later.kernels)
        }
        messages = {(each.shape, each.tasks_per_node): each for each in (*earlier.messages, *later.messages)}
        overlaps = {each.conditions: each for each in (*earlier.overlaps, *later.overlaps)}
        return MeasuredShapes(
            kernels=list(kernels.values()),
            messages=list(messages.values()),
            overlaps=list(overlaps.values()),
            cuts=list(dict.fromkeys([*self.cuts, *later.cuts])),
            compute_spread=max(self.compute_spread, later.compute_spread),
            comm_spread=max(self.comm_spread, later.comm_spread),
            sweeps=list(dict.fromkeys([*self.sweeps, *later.sweeps])),
            environment_digests=list(dict.fromkeys([*self.environment_digests, *later.environment_digests])),
            links=later.links or self.links,
            environment=later.environment,
            environment_keys=list(dict.fromkeys([*self.environment_keys, *later.environment_keys])),
        )


class SizeCurve:
    """Seconds by size, never falling: violations are pooled (Ayer et al. 1955)."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        logs: dict[float, list[float]] = defaultdict(list)
        for size, seconds in points:
            logs[size].append(log(max(seconds, _MIN_S)))
        self._sizes = sorted(logs)
        pools: list[tuple[float, int]] = []
        for size in self._sizes:
            mean, count = fmean(logs[size]), 1
            while pools and pools[-1][0] > mean:
                before, others = pools.pop()
                mean, count = (before * others + mean * count) / (others + count), others + count
            pools.append((mean, count))
        self._logs = [mean for mean, count in pools for _ in range(count)]

    def at(self, size: float) -> float | None:
        """Interpolate the logarithms between two measured sizes; ``None`` outside of them."""
        place = bisect_left(self._sizes, size * (1 - 1e-6))
        if place == len(self._sizes):
            return None
        if isclose(self._sizes[place], size, rel_tol=1e-6):
            return exp(self._logs[place])
        if place == 0:
            return None
        low, high = self._sizes[place - 1], self._sizes[place]
        part = log(size / low) / log(high / low)
        return exp(self._logs[place - 1] * (1 - part) + self._logs[place] * part)


def per_sample_sizes(kernel: Kernel, samples: float) -> tuple[object, ...]:
    """Return the values that kernels of one layer and share have in common at any number of samples."""
    scaled = (kernel.flops, kernel.moved_bytes, kernel.input_bytes, kernel.output_bytes)
    per_sample = (f"{size / samples:.6g}" for size in scaled)
    return kernel.kind, kernel.direction, kernel.precision, f"{kernel.weight_bytes:.6g}", *per_sample


def _per_byte_sizes(kernel: Kernel) -> tuple[object, ...] | None:
    """Return the values that kernels of equal time per byte have in common; ``None`` for other kernels.

    Such a kernel has neither weights nor FLOPs: more samples and more channels are the same to it.
    """
    if kernel.flops or kernel.weight_bytes or not kernel.output_bytes:
        return None
    ratios = (f"{size / kernel.output_bytes:.6g}" for size in (kernel.moved_bytes, kernel.input_bytes))
    return kernel.kind, kernel.direction, kernel.precision, *ratios


def _per_flop_sizes(kernel: Kernel) -> tuple[object, ...] | None:
    """Return the values that kernels of equal time per FLOP have in common; ``None`` for other kernels.

    Such a kernel has no weights, as attention: half of the heads is to it as half of the samples.
    """
    if kernel.weight_bytes or not kernel.flops:
        return None
    ratios = (f"{size / kernel.flops:.3g}" for size in (kernel.moved_bytes, kernel.input_bytes, kernel.output_bytes))
    return kernel.kind, kernel.direction, kernel.precision, *ratios


def _per_layer_sizes(kernel: Kernel, samples: float) -> tuple[object, ...] | None:
    """Return the values that parts of one layer by positions have in common; ``None`` for kernels without weights.

    Parts with and without neighbours' positions (halos) are between half of the layer and all of it.
    """
    if not kernel.weight_bytes:
        return None
    return kernel.kind, kernel.direction, kernel.precision, f"{kernel.weight_bytes:.6g}", samples


def _work(kernel: Kernel) -> float:
    return kernel.flops or kernel.moved_bytes


class MeasuredTimes:
    """The index of ``MeasuredShapes``."""

    def __init__(self, shapes: MeasuredShapes) -> None:
        self._overlaps = shapes.overlaps
        by_samples: dict[object, list[tuple[float, float]]] = defaultdict(list)
        by_bytes: dict[object, list[tuple[float, float]]] = defaultdict(list)
        by_work: dict[object, list[tuple[float, float]]] = defaultdict(list)
        by_payload: dict[object, list[tuple[float, float]]] = defaultdict(list)
        wholes = {(one.conditions, one.kernel, one.samples) for one in shapes.kernels if not one.is_part}
        for measured in shapes.kernels:
            # Half of a batch of 24 is a batch of 12: where that was measured itself, it counts alone.
            if measured.is_part and (measured.conditions, measured.kernel, measured.samples) in wholes:
                continue
            key = measured.conditions, per_sample_sizes(measured.kernel, measured.samples)
            by_samples[key].append((measured.samples, measured.seconds))
            if (per_byte_key := _per_byte_sizes(measured.kernel)) is not None:
                by_bytes[measured.conditions, per_byte_key].append((measured.kernel.output_bytes, measured.seconds))
            for work_key in (_per_flop_sizes(measured.kernel), _per_layer_sizes(measured.kernel, measured.samples)):
                if work_key is not None and measured.kernel.direction != UPDATE:
                    by_work[measured.conditions, work_key].append((_work(measured.kernel), measured.seconds))
        for message in shapes.messages:
            group = message.shape[:-1]
            by_payload[group, message.tasks_per_node].append((message.shape.payload_bytes, message.seconds))
        self._by_samples = {key: SizeCurve(points) for key, points in by_samples.items()}
        self._by_bytes = {key: SizeCurve(points) for key, points in by_bytes.items()}
        self._by_work = {key: SizeCurve(points) for key, points in by_work.items()}
        self._by_payload = {key: SizeCurve(points) for key, points in by_payload.items()}

    @staticmethod
    @cached_by_identity(16)
    def of(shapes: MeasuredShapes) -> MeasuredTimes:
        """Return the index, which is built once."""
        return MeasuredTimes(shapes)

    def kernel_s(self, kernel: Kernel, conditions: KernelConditions, samples: Sequence[float]) -> float | None:
        """Return the measured seconds of ``kernel``, which is of one of these numbers of samples."""
        for count in (1,) if kernel.direction == UPDATE else samples:
            curve = self._by_samples.get((conditions, per_sample_sizes(kernel, count)))
            if curve is not None and (seconds := curve.at(count)) is not None:
                return seconds
        plain = _per_byte_sizes(kernel)
        curve = None if plain is None else self._by_bytes.get((conditions, plain))
        if curve is not None or kernel.direction == UPDATE:
            return None if curve is None else curve.at(kernel.output_bytes)
        for key in (_per_flop_sizes(kernel), *(_per_layer_sizes(kernel, count) for count in samples)):
            curve = None if key is None else self._by_work.get((conditions, key))
            if curve is not None and (seconds := curve.at(_work(kernel))) is not None:
                return seconds
        return None

    def slowdowns(self, spec: RunSpec, operation: str) -> tuple[float, float] | None:
        """Return the slowdowns of computation and of ``operation`` under each other in a run; ``None`` without any.

        Of several measurements of the run's model that of the nearest number of nodes, then of samples, counts.
        """
        key, samples = workload_key(spec), spec.batch_size / spec.micro_batches
        alike = [
            overlap
            for overlap in self._overlaps
            if (overlap.workload, overlap.operation, overlap.tasks_per_node) == (key, operation, spec.tasks_per_node)
            and (overlap.nodes > 1) == (spec.nodes > 1)
        ]
        if not alike:
            return None
        nearest = min(alike, key=lambda one: (abs(log(one.nodes / spec.nodes)), abs(log(one.samples / samples))))
        return nearest.slowdown, nearest.comm_slowdown

    def message_s(self, shape: MessageShape, tasks_per_node: int) -> float | None:
        """Return the measured seconds of a call, the time to issue it included."""
        curve = self._by_payload.get((shape[:-1], tasks_per_node))
        return None if curve is None else curve.at(shape.payload_bytes)
