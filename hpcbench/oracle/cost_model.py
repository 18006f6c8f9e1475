"""Times of kernels, collectives and steps on one machine, at the shapes and placements of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil, exp, floor, log, sqrt
from operator import attrgetter
from statistics import NormalDist
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle import stream_simulator
from hpcbench.oracle.collective_formulas import GroupLinks, HockneyLink, collective_s
from hpcbench.oracle.machine import CollectiveSample, Machine, StrategyOverhead
from hpcbench.oracle.measured_shapes import KernelConditions, MeasuredTimes
from hpcbench.oracle.placement import GroupPlacement
from hpcbench.oracle.tensor_sizes import FP32_BYTES, activation_number_bytes, input_bytes, optimizer_tensors
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.layer_table import LayerRow, LayerTable, cached_by_identity, cached_by_run_fields
from hpcbench.parallel.roofline import BACKWARD, COPY_KIND, FORWARD, UPDATE, Kernel, RooflineModel
from hpcbench.parallel.traffic import OVERLAPPED_OPERATIONS, MessageShape, Traffic


class RowShare(NamedTuple):
    """A rank's part of a row: 1 where it has all of it."""

    flops: float = 1.0
    inputs: float = 1.0
    outputs: float = 1.0
    weights: float = 1.0


FULL_SHARE = RowShare()


class RowKernels(NamedTuple):
    """The kernels of a row, one per pass."""

    forward: Kernel
    backward: Kernel


def row_kernels(spec: RunSpec, layer: LayerRow, samples: float, share: RowShare = FULL_SHARE) -> RowKernels:
    """Return the forward and backward kernel of ``samples`` samples through a rank's ``share`` of ``layer``."""
    scale = activation_number_bytes(spec) / FP32_BYTES
    inputs = input_bytes(layer) * samples * scale * share.inputs
    outputs = layer.output_bytes * samples * scale * share.outputs
    whole = input_bytes(layer) + layer.output_bytes
    moved_share = (inputs + outputs) / whole if whole else samples * scale
    weights = layer.parameters * FP32_BYTES * share.weights

    def kernel(direction: str, flops: float, moved_bytes: float) -> Kernel:
        computed, moved = flops * samples * share.flops, moved_bytes * moved_share
        return Kernel(layer.kind, direction, spec.compute_precision, computed, moved, weights, inputs, outputs)

    return RowKernels(
        kernel(FORWARD, layer.forward_flops, layer.forward_moved_bytes),
        kernel(BACKWARD, layer.backward_flops, layer.backward_moved_bytes),
    )


@cached_by_identity(64)
def first_equal_rows(table: LayerTable) -> list[int]:
    """Return by row the first one that computes the same: a transformer's blocks are equal."""
    # What a row's kernels depend on, and the name that it has within its block, by which some are split.
    fields = attrgetter(
        "kind", "output_bytes", "parameters", "forward_flops", "backward_flops", "forward_moved_bytes",
        "backward_moved_bytes",
    )  # fmt: skip
    seen: dict[tuple[object, ...], int] = {}
    return [
        seen.setdefault((*fields(layer), layer.name.partition(".")[2], *layer.input_shape), number)
        for number, layer in enumerate(table.layers)
    ]


@cached_by_run_fields("batch_size", "micro_batches", "precision")
def unsharded_row_kernels(spec: RunSpec, table: LayerTable) -> list[RowKernels]:
    """Return the kernels of a rank that has all of every layer, for one micro-batch."""
    samples = spec.batch_size / spec.micro_batches
    return [row_kernels(spec, layer, samples) for layer in table.layers]


def update_kernels(spec: RunSpec, parameter_bytes: Iterable[float]) -> Iterator[Kernel]:
    """Yield a kernel for every tensor that the rank updates, of so many bytes."""
    moved = optimizer_tensors(spec).moved
    for size in parameter_bytes:
        if size:
            yield Kernel(spec.optimizer, UPDATE, spec.compute_precision, 0.0, moved * size, size, 0.0, 0.0)


def measured_collective(
    span: GroupLinks, operation: str, samples: Sequence[CollectiveSample], payload_bytes: float = float("inf")
) -> CollectiveSample | None:
    """Return the correction that was measured for ``operation`` on links of that kind; ``None`` without any.

    Of several measured for the same ranks, each for its own sizes, the one for ``payload_bytes`` counts.

    Between two measured numbers of ranks all go in proportion to the logarithms; beyond them the nearest holds. An
    operation that was not measured is taken to be as all_reduce.
    """
    on_link = [sample for sample in samples if (sample.nodes > 1) == (span.nodes > 1)]
    measured = [sample for sample in on_link if sample.operation == operation]
    by_ranks: dict[int, CollectiveSample] = {}
    for sample in sorted(
        measured or [sample for sample in on_link if sample.operation == "all_reduce"], key=attrgetter("from_bytes")
    ):
        if sample.from_bytes <= payload_bytes or sample.ranks not in by_ranks:
            by_ranks[sample.ranks] = sample
    if not by_ranks:
        return None
    low = by_ranks[max((ranks for ranks in by_ranks if ranks <= span.ranks), default=min(by_ranks))]
    high = by_ranks[min((ranks for ranks in by_ranks if ranks >= span.ranks), default=max(by_ranks))]
    if low.ranks == high.ranks:
        return low
    part = log(span.ranks / low.ranks) / log(high.ranks / low.ranks)

    def between(name: str) -> float:
        return float(getattr(low, name) * (1 - part) + getattr(high, name) * part)

    return msgspec.structs.replace(
        low,
        ranks=span.ranks,
        latency_s=between("latency_s"),
        beta_ratio=exp(log(low.beta_ratio) * (1 - part) + log(high.beta_ratio) * part),
    )


def measured_collective_s(
    span: GroupLinks, operation: str, sample: CollectiveSample | None, payload_bytes: float
) -> float:
    """Return the time of one call, corrected by ``sample``."""
    if sample is None:
        return collective_s(operation, span, payload_bytes)
    crosses = span.nodes > 1
    wire = span.inter_node if crosses else span.intra_node
    link = HockneyLink(sample.latency_s, wire.beta_s_per_byte * sample.beta_ratio)
    # What was measured is a step's latency, whichever link it crosses.
    links = span._replace(inter_node=link, by_hop=False) if crosses else span._replace(intra_node=link)
    return collective_s(operation, links, payload_bytes)


class UnmeasuredShapes(NamedTuple):
    """Shapes of a run that were priced by formulas, with the seconds."""

    kernels: dict[Kernel, float]
    """Seconds of the layers' kernels, without updates and copies."""
    messages: dict[MessageShape, float]
    overlaps: set[Traffic]
    """The collectives of each simulated step that move most bytes while the rank computes."""


def accumulations_per_pass(spec: RunSpec) -> float:
    """Return how often a backward pass adds a weight's gradients to earlier ones: in all but a step's first.

    Versions of an asynchronous pipeline take each micro-batch's gradients alone, unless two versions are shared by a
    window (2bw).
    """
    staleness = get_strategy(spec.strategy).staleness
    is_single = staleness is not None and not staleness(spec).double_buffered
    return 0.0 if is_single else (spec.micro_batches - 1) / spec.micro_batches


def accumulation_kernel(kernel: Kernel) -> Kernel:
    """Return the sum of the gradients of the backward pass ``kernel`` and earlier ones: reads two, writes one."""
    size = kernel.weight_bytes
    return Kernel(COPY_KIND, FORWARD, kernel.precision, 0.0, 3.0 * size, 0.0, size, size)


def is_eager_run(spec: RunSpec) -> bool:
    """Whether the run computes as probes do: not compiled, without variables of the user's."""
    return not spec.compile and not spec.env


def kernel_conditions(spec: RunSpec) -> KernelConditions:
    """Return the conditions under which the layers of a run compute."""
    accumulates = spec.micro_batches > 1
    return KernelConditions(spec.tasks_per_node, accumulates, spec.channels_last, spec.cudnn_benchmark)


def micro_batch_samples(spec: RunSpec) -> list[float]:
    """Return the samples of a run's micro-batches: their mean, and the whole numbers around it."""
    mean = spec.batch_size / spec.micro_batches
    return list(dict.fromkeys([mean, float(floor(mean)), float(ceil(mean))]))


def group_message(operation: str, payload_bytes: float, group: GroupPlacement) -> MessageShape:
    """Return the shape of one call of ``group``."""
    return MessageShape(operation, group.ranks, group.ranks_per_node, group.rivals, max(round(payload_bytes), 4))


class CostModel:
    """The times of a run's kernels and messages on a machine. Kernels and collectives are cached.

    Example:
        >>> from hpcbench.oracle.placement import place_group
        >>> cost_model = CostModel(machine, spec)
        >>> cost_model.collective("all_reduce", 4e6, place_group(spec, "dp")).seconds > 0
        True
    """

    def __init__(self, machine: Machine, spec: RunSpec) -> None:
        self.machine, self.spec = machine, spec
        self._roofline = RooflineModel.of(machine.compute)
        compute = machine.compute
        self.overhead = machine.strategies.get(spec.strategy, StrategyOverhead())
        self.unmeasured = UnmeasuredShapes({}, {}, set())
        shapes = machine.measured
        is_alike = shapes is not None and is_eager_run(spec) and spec.environment == shapes.environment
        self._measured = MeasuredTimes.of(shapes) if shapes is not None and is_alike else None
        self._conditions = kernel_conditions(spec)
        self._samples = micro_batch_samples(spec)
        self._accumulations = accumulations_per_pass(spec)
        self._factor = compute.factors.get(spec.model, compute.factors.get("", 1.0)) * self.overhead.compute_factor
        if compute.crowding:
            self._factor *= _interpolated(compute.crowding, spec.tasks_per_node)
        self.kernel_s = lru_cache(maxsize=None)(self._kernel_s)
        self.collective = lru_cache(maxsize=None)(self._collective)

    def _kernel_s(self, kernel: Kernel) -> float:
        """Seconds of one kernel of one rank."""
        if self._measured is not None:
            measured_s = self._measured.kernel_s(kernel, self._conditions, self._samples)
            if measured_s is not None:
                # Blocks were measured without the library's threads and hooks.
                return measured_s * self.overhead.compute_factor
        seconds = self._factor * self._roofline.seconds(kernel)
        if self._accumulations and kernel.direction == BACKWARD and kernel.weight_bytes:
            seconds += self._accumulations * self._factor * self._roofline.seconds(accumulation_kernel(kernel))
        if seconds and kernel.direction != UPDATE and kernel.kind != COPY_KIND:
            self.unmeasured.kernels[kernel] = seconds
        return seconds

    @property
    def is_measured(self) -> bool:
        """Whether all layers and messages that were priced so far were measured in their own shapes."""
        return self._measured is not None and not self.unmeasured.kernels and not self.unmeasured.messages

    def spreads(self) -> tuple[float, float]:
        """Return the relative uncertainty of computation and of communication, as priced so far."""
        compute, comm = self.machine.compute.spread, self.machine.comm.spread
        shapes = self.machine.measured
        if self._measured is None or shapes is None:
            return compute, comm
        return (
            compute if self.unmeasured.kernels else shapes.compute_spread,
            comm if self.unmeasured.messages else shapes.comm_spread,
        )

    def _collective(
        self, operation: str, payload_bytes: float, group: GroupPlacement, key: str | None = None, lane: str = ""
    ) -> stream_simulator.CommCall:
        """Return a call of ``group``; its payload is counted as in ``parallel.traffic.Traffic``."""
        seconds, latency_s = self._priced(operation, payload_bytes, group)
        traffic = Traffic(operation=operation, group_size=group.ranks, payload_bytes=round(payload_bytes))
        return stream_simulator.CommCall(seconds, latency_s, key, lane, "out" if group.nodes > 1 else "in", traffic)

    def calls(self, traffic: Traffic, group: GroupPlacement) -> list[stream_simulator.CommCall]:
        """Return the calls that ``traffic`` stands for, each waited for."""
        return [self.collective(traffic.operation, traffic.payload_bytes, group)] * traffic.count

    def run(self, events: Iterable[stream_simulator.StreamEvent]) -> stream_simulator.StreamTimes:
        """Simulate the events of a step."""
        comm, step = self.machine.comm, list(events)
        slowdowns = None
        if (overlapped := main_overlapped_call(step)) is not None:
            if self._measured is not None:
                slowdowns = self._measured.slowdowns(self.spec, overlapped.operation)
            if slowdowns is None:
                self.unmeasured.overlaps.add(overlapped)
        slowdown, comm_slowdown = slowdowns or (comm.overlap_slowdown, comm.comm_slowdown)
        return stream_simulator.simulate_streams(step, slowdown, comm_slowdown)

    def overhead_s(self) -> float:
        """Return the seconds of the computing thread in a step beside kernels and calls."""
        return self.machine.compute.step_s + self.overhead.step_s + self.overhead.sample_s * self.spec.batch_size

    def _priced(self, operation: str, payload_bytes: float, group: GroupPlacement) -> tuple[float, float]:
        if group.ranks < 2:
            return 0.0, 0.0
        span = self._span(group)
        sample = measured_collective(span, operation, self.machine.comm.collectives, payload_bytes)
        seconds, latency_s = (
            measured_collective_s(span, operation, sample, size) + self.machine.comm.call_s
            for size in (payload_bytes, 0.0)
        )
        shape = group_message(operation, payload_bytes, group)
        if self._measured is not None and self.spec.devices_per_task == 1:
            measured_s = self._measured.message_s(shape, self.spec.tasks_per_node)
            if measured_s is not None:
                return measured_s, min(latency_s, measured_s)
        self.unmeasured.messages[shape] = seconds
        return seconds, latency_s

    def _span(self, group: GroupPlacement) -> GroupLinks:
        """The links as the group sees them beside its rivals."""
        comm = self.machine.comm
        lanes = min(group.ranks_per_node, comm.links_per_node) if comm.striped else 1
        # Rivals share what links there are; one group alone uses no more than its lanes.
        flows = group.rivals * lanes / comm.links_per_node
        # Where it was not measured, flows share a link fairly.
        phi = max(1.0, _interpolated({1: 1.0, **comm.contention}, flows) if comm.contention else flows)
        inter = HockneyLink(comm.inter_node.latency_s, comm.inter_node.beta_s_per_byte * phi / lanes)
        return GroupLinks(group.ranks, group.nodes, comm.intra_node, inter, comm.trees, comm.by_hop)

    def straggler_s(self, compute_s: float) -> float:
        """Return the seconds by which the slowest of all ranks exceeds their mean in a median step."""
        return compute_s * self.machine.straggling * expected_normal_maximum(self.spec.ranks)

    def longest_delay_s(self) -> float:
        """Return the mean of the longest delay of a node: it lies in the mean of steps, not in their median."""
        return self.machine.delay_s * harmonic_number(self.spec.nodes) if self.spec.ranks > 1 else 0.0


def main_overlapped_call(events: Sequence[stream_simulator.StreamEvent]) -> Traffic | None:
    """Return the call of the operation that moves most bytes while the rank computes, the largest of its calls."""
    totals, largest = Counter[str](), dict[str, Traffic]()
    running: list[Traffic] = []
    for event in events:
        if isinstance(event, stream_simulator.RepeatEvent):
            inner = main_overlapped_call(event.events)
            running += [] if inner is None else [inner]
        elif isinstance(event, stream_simulator.CommCall):
            running += [event.traffic] if event.key is not None and event.traffic is not None else []
            continue
        elif isinstance(event, stream_simulator.WaitEvent):
            running = [] if not event.key else running
            continue
        for call in running:
            totals[call.operation] += call.payload_bytes
            largest[call.operation] = max(largest.get(call.operation, call), call, key=lambda one: one.payload_bytes)
        running = []
    overlapping = {operation: total for operation, total in totals.items() if operation in OVERLAPPED_OPERATIONS}
    return largest[max(overlapping, key=overlapping.__getitem__)] if overlapping else None


def expected_normal_maximum(count: int) -> float:
    """Return the expected largest of ``count`` standard normal draws (Blom 1958's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def harmonic_number(count: int) -> float:
    """Return 1 + 1/2 + ... + 1/count: the expected maximum of ``count`` exponential draws with mean 1."""
    if count <= 100:
        return sum(1.0 / number for number in range(1, count + 1))
    # Euler's expansion, to 1e-10.
    return log(count) + 0.5772156649015329 + 1 / (2 * count) - 1 / (12 * count**2)


def _interpolated(figures: dict[int, float], at: float) -> float:
    """Return ``figures`` interpolated linearly; beyond the last one, on the line through the last two."""
    known = sorted(figures.items())
    if len(known) == 1 or at <= known[0][0]:
        return known[0][1]
    for (left, low), (right, high) in pairwise(known):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    (left, low), (right, high) = known[-2:]
    return max(high + (high - low) * (at - right) / (right - left), high)


def combined_relative_spread(parts: list[tuple[float, float]], whole_s: float) -> float:
    """Relative uncertainty of a sum of independent parts (seconds, relative uncertainty)."""
    if not whole_s:
        return 0.0
    return sqrt(sum((seconds * spread) ** 2 for seconds, spread in parts)) / whole_s


class StepBreakdown(NamedTuple):
    """Seconds of one steady step of the slowest rank.

    ``step_time_s`` is the sum of computation, exposed communication, bubble and waiting for stragglers.
    """

    step_time_s: float
    compute_s: float
    comm_s: float = 0.0
    exposed_comm_s: float = 0.0
    bubble_s: float = 0.0
    """Idle time of a pipeline's ranks without a micro-batch."""
    straggler_s: float = 0.0
    latency_s: float = 0.0
    """The part of ``exposed_comm_s`` that no bandwidth would shorten."""


def step_from_events(cost_model: CostModel, events: Iterable[stream_simulator.StreamEvent]) -> StepBreakdown:
    """Simulate ``events``, and add the overhead of a step and the wait for the slowest rank."""
    times = cost_model.run(events)
    overhead_s = cost_model.overhead_s()
    compute_s = times.compute_s + overhead_s
    straggler_s = cost_model.straggler_s(compute_s)
    exposed_share = times.exposed_comm_s / times.comm_s if times.comm_s else 0.0
    return StepBreakdown(
        step_time_s=times.end_s + overhead_s + straggler_s,
        compute_s=compute_s,
        comm_s=times.comm_s,
        exposed_comm_s=times.exposed_comm_s,
        straggler_s=straggler_s,
        latency_s=times.latency_s * exposed_share,
    )


WAIT_FOR_ALL = stream_simulator.WaitEvent()
"""The computing stream waits for all running calls."""


def update_events(
    cost_model: CostModel, spec: RunSpec, parameter_bytes: Sequence[float]
) -> Iterator[stream_simulator.StreamEvent]:
    """Yield the optimizer's pass over the tensors that the rank updates."""
    counts = Counter(size for size in parameter_bytes if size)
    kernels_s = [cost_model.kernel_s(kernel) for kernel in update_kernels(spec, counts)]
    yield stream_simulator.ComputeEvent(
        sum(seconds * count for seconds, count in zip(kernels_s, counts.values(), strict=True))
    )
