"""A step's time and what it is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hpcbench.oracle.clock import Clock
from hpcbench.oracle.streams import Busy, Call, Event, Wait


class StepTime(NamedTuple):
    """Seconds of one steady step of the rank that sets the pace.

    ``step_time_s`` is the sum of computation, exposed communication, bubble and waiting for stragglers.
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


def of_events(clock: Clock, events: Iterable[Event]) -> StepTime:
    """The step that ``events`` make, with the overhead of a step and the wait for the slowest rank."""
    return of_busy(clock, clock.run(events))


def of_busy(clock: Clock, busy: Busy) -> StepTime:
    """As ``of_events``, of events that were walked through."""
    overhead_s = clock.overhead_s()
    compute_s = busy.compute_s + overhead_s
    straggler_s = clock.straggler_s(compute_s)
    exposed_share = busy.exposed_comm_s / busy.comm_s if busy.comm_s else 0.0
    return StepTime(
        step_time_s=busy.end_s + overhead_s + straggler_s,
        compute_s=compute_s,
        comm_s=busy.comm_s,
        exposed_comm_s=busy.exposed_comm_s,
        straggler_s=straggler_s,
        latency_s=busy.latency_s * exposed_share,
    )


def slowest(steps: Iterable[StepTime]) -> StepTime:
    """The one that the others wait for."""
    return max(steps, key=lambda step: step.step_time_s)


def later(call: Call, key: str) -> Call:
    """``call`` handed over without waiting for it."""
    return call._replace(key=key)


ALL = Wait()
"""The computing stream waits for all that is under way."""
