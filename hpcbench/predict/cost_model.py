"""Times of kernels, collectives and steps on one machine, at the shapes and placements of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import sqrt
from operator import attrgetter
from statistics import NormalDist
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict import stream_simulator
from hpcbench.predict.kernel_prices import BACKWARD, COPY_KIND, FORWARD, UPDATE, Kernel, KernelConditions, KernelPrices
from hpcbench.predict.machine import Machine, StrategyOverhead
from hpcbench.predict.message_prices import MessagePrice, MessagePrices, Slowdowns, slowdowns
from hpcbench.predict.placement import GroupPlacement
from hpcbench.predict.tensor_sizes import FP32_BYTES, activation_number_bytes, input_bytes, optimizer_tensors
from hpcbench.strategies.layer_table import LayerRow, LayerTable, cached_by_identity, cached_by_run_fields
from hpcbench.strategies.traffic import OVERLAPPED_OPERATIONS, MessageShape, Traffic


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


class UnmeasuredShapes(NamedTuple):
    """Shapes of a run that were not measured, with the seconds that they were priced at."""

    kernels: dict[Kernel, float]
    """Seconds of the layers' kernels, without updates and copies."""
    messages: dict[MessageShape, float]
    overlaps: set[Traffic]
    """The collectives of each simulated step that move most bytes while the rank computes."""


def is_eager_run(spec: RunSpec) -> bool:
    """Whether the run computes as probes do: not compiled, without variables of the user's."""
    return not spec.compile and not spec.env


def kernel_conditions(spec: RunSpec) -> KernelConditions:
    """Return the conditions under which the layers of a run compute."""
    return KernelConditions(spec.tasks_per_node, spec.channels_last, spec.cudnn_benchmark)


def group_message(operation: str, payload_bytes: float, group: GroupPlacement) -> MessageShape:
    """Return the shape of one call of ``group``."""
    return MessageShape(operation, group.ranks, group.ranks_per_node, group.rivals, max(round(payload_bytes), 4))


class CostModel:
    """The times of a run's kernels and messages on a machine. Kernels and collectives are cached.

    Example:
        >>> from hpcbench.predict.placement import place_group
        >>> cost_model = CostModel(machine, spec)
        >>> cost_model.collective("all_reduce", 4e6, place_group(spec, "dp")).seconds > 0
        True
    """

    def __init__(self, machine: Machine, spec: RunSpec) -> None:
        self.machine, self.spec = machine, spec
        self._kernels, self._messages = KernelPrices.of(machine.compute), MessagePrices.of(machine.comm)
        self.overhead = machine.strategies.get(spec.strategy, StrategyOverhead())
        self.unmeasured = UnmeasuredShapes({}, {}, set())
        self._conditions = kernel_conditions(spec)
        self.kernel_s = lru_cache(maxsize=None)(self._kernel_s)
        self.collective = lru_cache(maxsize=None)(self._collective)

    def _kernel_s(self, kernel: Kernel) -> float:
        """Seconds of one kernel of one rank."""
        seconds, is_measured = self._kernels.price(kernel, self._conditions)
        if not is_measured and kernel.direction != UPDATE and kernel.kind != COPY_KIND:
            self.unmeasured.kernels[kernel] = seconds
        # Kernels were measured without the library's threads and hooks.
        return seconds * self.overhead.compute_factor

    @property
    def is_measured(self) -> bool:
        """Whether all layers and messages that were priced so far were measured in their own shapes."""
        return is_eager_run(self.spec) and not self.unmeasured.kernels and not self.unmeasured.messages

    def spreads(self) -> tuple[float, float]:
        """Return the relative uncertainty of computation and of communication, as priced so far."""
        compute, comm, is_eager = self.machine.compute, self.machine.comm, is_eager_run(self.spec)
        return (
            compute.measured_spread if is_eager and not self.unmeasured.kernels else compute.spread,
            comm.measured_spread if is_eager and not self.unmeasured.messages else comm.spread,
        )

    def _collective(
        self, operation: str, payload_bytes: float, group: GroupPlacement, key: str | None = None, lane: str = ""
    ) -> stream_simulator.CommCall:
        """Return a call of ``group``; its payload is counted as in ``strategies.traffic.Traffic``."""
        traffic = Traffic(operation=operation, group_size=group.ranks, payload_bytes=round(payload_bytes))
        price = MessagePrice(0.0, 0.0, True)
        if group.ranks > 1:
            shape = group_message(operation, payload_bytes, group)
            price = self._messages.price(shape, self.spec.tasks_per_node)
            if not price.is_measured or self.spec.devices_per_task > 1:
                self.unmeasured.messages[shape] = price.seconds
        wire = "out" if group.nodes > 1 else "in"
        return stream_simulator.CommCall(price.seconds, price.latency_s, key, lane, wire, traffic)

    def calls(self, traffic: Traffic, group: GroupPlacement) -> list[stream_simulator.CommCall]:
        """Return the calls that ``traffic`` stands for, each waited for."""
        return [self.collective(traffic.operation, traffic.payload_bytes, group)] * traffic.count

    def run(self, events: Iterable[stream_simulator.StreamEvent]) -> stream_simulator.StreamTimes:
        """Simulate the events of a step."""
        step, slowed = list(events), Slowdowns()
        if (overlapped := main_overlapped_call(step)) is not None:
            slowed = slowdowns(self.machine.comm, self.spec, overlapped.operation)
            if not slowed.is_measured:
                self.unmeasured.overlaps.add(overlapped)
        return stream_simulator.simulate_streams(step, slowed.computation, slowed.collective)

    def overhead_s(self) -> float:
        """Return the seconds of the computing thread in a step beside kernels and calls."""
        return self.overhead.step_s + self.overhead.sample_s * self.spec.batch_size

    def straggler_s(self, compute_s: float) -> float:
        """Return the seconds by which the slowest of all ranks exceeds their mean in a median step."""
        return compute_s * self.machine.straggling * expected_normal_maximum(self.spec.ranks)


def main_overlapped_call(events: Sequence[stream_simulator.StreamEvent]) -> Traffic | None:
    """Return the largest call of the operation that moves the most bytes while the rank computes."""
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
