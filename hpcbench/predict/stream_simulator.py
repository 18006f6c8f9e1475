"""A simulator of one rank's step: one computing stream and several communication streams that overlap it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpcbench.strategies.traffic import Traffic


class ComputeEvent(NamedTuple):
    """The computing stream is busy for so long."""

    seconds: float


class CommCall(NamedTuple):
    """A collective is queued on the communication stream of its lane, which runs one after another."""

    seconds: float
    latency_s: float = 0.0
    """The part of it that no bandwidth would shorten."""
    key: str | None = None
    """``WaitEvent`` waits for it by this name; without one the computing stream waits at once."""
    lane: str = ""
    """Process groups have lanes of their own: a call does not queue behind another group's."""
    wire: str = ""
    """Lanes with running calls on one wire share it evenly."""
    traffic: Traffic | None = None
    """Operation, group size and payload of the call."""


class WaitEvent(NamedTuple):
    """The computing stream waits for the last call of that name; for all calls where it is empty."""

    key: str = ""


class RepeatEvent(NamedTuple):
    """Repetitions of ``events``, one after another. No call is running at the beginning and between two of them."""

    times: int
    events: Sequence[StreamEvent]


StreamEvent = ComputeEvent | CommCall | WaitEvent | RepeatEvent


class StreamTimes(NamedTuple):
    """The times of a simulated step, in seconds."""

    end_s: float
    compute_s: float
    """Duration of the computation, including its slow-down by communication."""
    comm_s: float
    """Time in which any call was running: simultaneous calls of two lanes count once."""
    exposed_comm_s: float
    """Time in which the computing stream waited for a call."""
    latency_s: float
    """The part of ``comm_s`` that is latency."""


def simulate_streams(
    events: Iterable[StreamEvent],
    slowdown: float = 1.0,
    comm_slowdown: float = 1.0,
) -> StreamTimes:
    """Walk through ``events``, in program order.

    Under communication computation is ``slowdown`` times slower, and under computation communication is
    ``comm_slowdown`` times slower: libraries that send with the processors that compute.
    """
    now = compute = comm = called = exposed = latency = 0.0
    lanes = _CommStreams()
    for event in events:
        if isinstance(event, ComputeEvent):
            under_way_s = lanes.last() - now
            spent = _slowed_compute_s(event.seconds, under_way_s * comm_slowdown, slowdown)
            if under_way_s > 0.0 and comm_slowdown > 1.0:
                lanes.hold_up(now, spent, comm_slowdown)
                comm += lanes.last() - now - under_way_s
            now += spent
            compute += spent
            continue
        if isinstance(event, RepeatEvent):
            once, times = simulate_streams(event.events, slowdown, comm_slowdown), event.times
            now += times * once.end_s
            compute += times * once.compute_s
            comm += times * once.comm_s
            called += times * once.comm_s
            exposed += times * once.exposed_comm_s
            latency += times * once.latency_s
            continue
        if isinstance(event, CommCall):
            before = max(lanes.last(), now)
            until = lanes.add(event, now)
            comm += max(lanes.last() - before, 0.0)
            called += event.seconds
            latency += event.latency_s
            if event.key is not None:
                continue
        else:
            until = lanes.keys.get(event.key, ("", now))[1] if event.key else max(now, lanes.last())
        exposed += max(until - now, 0.0)
        now = max(now, until)
    return StreamTimes(now, compute, comm, exposed, latency * comm / called if called else 0.0)


class _CommStreams:
    """The calls in flight with their ends."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], float] = {}
        """End of the last call by communication stream and wire."""
        self.keys: dict[str, tuple[tuple[str, str] | str, float]] = {}
        """Communication stream and wire of the last call of each name, and its end."""

    def last(self) -> float:
        """Return the end of the last call."""
        return max(self._ends.values(), default=0.0)

    def add(self, call: CommCall, now: float) -> float:
        """Start a call, and return its end."""
        stream = (call.lane, call.wire)
        begin = max(now, self._ends.get(stream, 0.0))
        end = begin + call.seconds
        for other, until in list(self._ends.items()):
            if other != stream and other[1] == call.wire and until > begin:
                # Two that share a wire evenly: the shorter one takes twice its time, the longer one both.
                both = min(until - begin, call.seconds)
                end += both
                self._delay(other, begin, call.seconds)
        self._ends[stream] = end
        if call.key is not None:
            self.keys[call.key] = (stream, end)
        return end

    def hold_up(self, now: float, seconds: float, slowdown: float) -> None:
        """Slow all calls in flight down by ``slowdown`` for this long from ``now`` on."""

        def later(until: float) -> float:
            left = until - now
            return until + min(seconds * (1.0 - 1.0 / slowdown), left * (slowdown - 1.0)) if left > 0.0 else until

        self._ends = {lane: later(until) for lane, until in self._ends.items()}
        self.keys = {key: (where, later(until)) for key, (where, until) in self.keys.items()}

    def _delay(self, lane: tuple[str, str], begin: float, seconds: float) -> None:
        self._ends[lane] += min(self._ends[lane] - begin, seconds)
        for key, (where, until) in self.keys.items():
            if where == lane and until > begin:
                self.keys[key] = (where, until + min(until - begin, seconds))


def _slowed_compute_s(seconds: float, under_comm_s: float, slowdown: float) -> float:
    """Return the duration of ``seconds`` of computation while communication runs for ``under_comm_s`` more."""
    if under_comm_s <= 0.0 or slowdown <= 1.0:
        return seconds
    if seconds * slowdown <= under_comm_s:
        return seconds * slowdown
    return under_comm_s + seconds - under_comm_s / slowdown
