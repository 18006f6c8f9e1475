"""The time of a step by its parts, and the events of an update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel, update_kernels
from hpcbench.oracle.stream_simulator import ComputeEvent, StreamEvent, WaitEvent


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


def step_from_events(cost_model: CostModel, events: Iterable[StreamEvent]) -> StepBreakdown:
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


WAIT_FOR_ALL = WaitEvent()
"""The computing stream waits for all running calls."""


def update_events(cost_model: CostModel, spec: RunSpec, parameter_bytes: Sequence[float]) -> Iterator[StreamEvent]:
    """Yield the optimizer's pass over the tensors that the rank updates."""
    counts = Counter(size for size in parameter_bytes if size)
    kernels_s = [cost_model.kernel_s(kernel) for kernel in update_kernels(spec, counts)]
    yield ComputeEvent(sum(seconds * count for seconds, count in zip(kernels_s, counts.values(), strict=True)))
