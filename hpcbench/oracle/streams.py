"""A rank's step as two streams: what it computes, and what it passes meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Compute(NamedTuple):
    """The computing stream is busy for so long."""

    seconds: float


class Call(NamedTuple):
    """A collective is handed to the communication stream, which takes one after another."""

    seconds: float
    latency_s: float = 0.0
    """The part of it that no bandwidth would shorten."""
    key: str | None = None
    """``Wait`` waits for it by this name; without one the computing stream waits at once."""


class Wait(NamedTuple):
    """The computing stream waits for the last call of that name; for all calls where it is empty."""

    key: str = ""


Event = Compute | Call | Wait


class Busy(NamedTuple):
    """What became of a step, in seconds."""

    end_s: float
    compute_s: float
    """As computed, slowed down by communication or not."""
    comm_s: float
    exposed_comm_s: float
    """While the computing stream waited."""
    latency_s: float
    """Of ``comm_s``."""


def run(events: Iterable[Event], slowdown: float = 1.0) -> Busy:
    """Walk through ``events``, in program order. Under communication computation is ``slowdown`` times slower."""
    now = busy_until = compute = comm = exposed = latency = 0.0
    ends: dict[str, float] = {}
    for event in events:
        if isinstance(event, Compute):
            spent = _computed(event.seconds, busy_until - now, slowdown)
            now += spent
            compute += spent
            continue
        if isinstance(event, Call):
            busy_until = max(now, busy_until) + event.seconds
            comm += event.seconds
            latency += event.latency_s
            if event.key is not None:
                ends[event.key] = busy_until
                continue
            until = busy_until
        else:
            until = ends.get(event.key, now) if event.key else max(now, busy_until)
        exposed += max(until - now, 0.0)
        now = max(now, until)
    return Busy(now, compute, comm, exposed, latency)


def _computed(seconds: float, under_comm_s: float, slowdown: float) -> float:
    """How long ``seconds`` of computation take when communication is under way for ``under_comm_s`` more."""
    if under_comm_s <= 0.0 or slowdown <= 1.0:
        return seconds
    if seconds * slowdown <= under_comm_s:
        return seconds * slowdown
    return under_comm_s + seconds - under_comm_s / slowdown
