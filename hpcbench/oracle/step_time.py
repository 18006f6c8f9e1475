"""The time of a step by its parts, and the events of a forward pass, a backward pass and an update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel, RowKernels, update_kernels
from hpcbench.oracle.stream_simulator import CommCall, ComputeEvent, StreamEvent, StreamTimes, WaitEvent
from hpcbench.parallel.layer_table import LayerTable


class StepBreakdown(NamedTuple):
    """Seconds of one steady step of the rank that sets the pace.

    ``predicted_step_s`` is the sum of computation, exposed communication, bubble and waiting for stragglers.
    """

    step_time_s: float
    compute_s: float
    comm_s: float = 0.0
    exposed_comm_s: float = 0.0
    bubble_s: float = 0.0
    """A pipeline's ranks idle for want of micro-batches."""
    straggler_s: float = 0.0
    latency_s: float = 0.0
    """Of ``exposed_comm_s``, what no bandwidth would shorten."""


def step_from_events(clock: CostModel, events: Iterable[StreamEvent]) -> StepBreakdown:
    """The step that ``events`` make, with the overhead of a step and the wait for the slowest rank."""
    return step_from_streams(clock, clock.run(events))


def step_from_streams(clock: CostModel, busy: StreamTimes) -> StepBreakdown:
    """As ``step_from_events``, of events that were walked through."""
    overhead_s = clock.overhead_s()
    compute_s = busy.compute_s + overhead_s
    straggler_s = clock.straggler_s(compute_s)
    exposed_share = busy.exposed_comm_s / busy.comm_s if busy.comm_s else 0.0
    return StepBreakdown(
        step_time_s=busy.end_s + overhead_s + straggler_s,
        compute_s=compute_s,
        comm_s=busy.comm_s,
        exposed_comm_s=busy.exposed_comm_s,
        straggler_s=straggler_s,
        latency_s=busy.latency_s * exposed_share,
    )


def slowest_step(steps: Iterable[StepBreakdown]) -> StepBreakdown:
    """The one that the others wait for."""
    return max(steps, key=lambda step: step.step_time_s)


def without_waiting(call: CommCall, key: str) -> CommCall:
    """``call`` handed over without waiting for it."""
    return call._replace(key=key)


WAIT_FOR_ALL = WaitEvent()
"""The computing stream waits for all that is under way."""


EventsAtRow = Callable[[int], Sequence[StreamEvent]]
"""What happens at the row of that number."""


def no_events(_: int) -> Sequence[StreamEvent]:
    """At no row anything."""
    return ()


def forward_events(
    clock: CostModel, passes: Sequence[RowKernels], before: EventsAtRow = no_events, after: EventsAtRow = no_events
) -> Iterator[StreamEvent]:
    """Row by row."""
    for number, one in enumerate(passes):
        yield from before(number)
        yield ComputeEvent(clock.kernel_s(one.forward))
        yield from after(number)


def backward_events(
    clock: CostModel,
    spec: RunSpec,
    table: LayerTable,
    passes: Sequence[RowKernels],
    before: EventsAtRow = no_events,
    after: EventsAtRow = no_events,
    again: EventsAtRow = no_events,
) -> Iterator[StreamEvent]:
    """Row by row from the last; a block whose activations were dropped is computed again before its last row.

    ``again`` is what happens after each row that is computed again.
    """
    block = -1
    for number in range(len(passes) - 1, -1, -1):
        layer = table.layers[number]
        if spec.activation_checkpointing and layer.block != block and layer.block < table.blocks:
            for one in [row for row, other in enumerate(table.layers) if other.block == layer.block]:
                yield ComputeEvent(clock.kernel_s(passes[one].forward))
                yield from again(one)
        block = layer.block
        yield from before(number)
        yield ComputeEvent(clock.kernel_s(passes[number].backward))
        yield from after(number)


def update_events(clock: CostModel, spec: RunSpec, parameter_bytes: Sequence[float]) -> Iterator[StreamEvent]:
    """The optimizer's pass over what the rank updates."""
    counts = Counter(size for size in parameter_bytes if size)
    each = (clock.kernel_s(kernel) for kernel in update_kernels(spec, counts))
    yield ComputeEvent(sum(seconds * count for seconds, count in zip(each, counts.values(), strict=True)))
