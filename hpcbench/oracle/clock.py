"""How long a kernel and a collective take on a machine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from math import log, sqrt
from statistics import NormalDist

from hpcbench.config.spec import RunSpec
from hpcbench.oracle import streams
from hpcbench.oracle.collectives import Span, Wire, time_s
from hpcbench.oracle.corrections import corrected
from hpcbench.oracle.kernels import Kernel
from hpcbench.oracle.machine import Machine, Strategy
from hpcbench.oracle.placement import Group
from hpcbench.parallel.alike import Alike
from hpcbench.parallel.traffic import Traffic


class Clock:
    """One machine's times for one run's placement. Remembers what it was asked."""

    def __init__(self, machine: Machine, spec: RunSpec) -> None:
        self.machine, self.spec = machine, spec
        self._alike = Alike.of(machine.compute)
        compute = machine.compute
        self.own = machine.strategies.get(spec.strategy, Strategy())
        self._factor = compute.factors.get(spec.model, compute.factors.get("", 1.0)) * self.own.compute_factor
        self._factor *= _crowded(compute.crowding, spec.tasks_per_node)
        self.kernel_s = lru_cache(maxsize=None)(self._kernel_s)
        self.call = lru_cache(maxsize=None)(self._call)

    def _kernel_s(self, kernel: Kernel) -> float:
        """Seconds of one kernel of one rank."""
        return self._factor * self._alike.seconds(kernel)

    def _call(
        self, operation: str, payload_bytes: float, group: Group, key: str | None = None, lane: str = ""
    ) -> streams.Call:
        """One collective of ``group``, whose payload is counted as ``parallel.traffic.Traffic`` counts it."""
        seconds, latency_s = self._priced(operation, payload_bytes, group)
        traffic = Traffic(operation=operation, group_size=group.ranks, payload_bytes=round(payload_bytes))
        return streams.Call(seconds, latency_s, key, lane, "out" if group.nodes > 1 else "in", traffic)

    def calls(self, traffic: Traffic, group: Group) -> list[streams.Call]:
        """Those that ``traffic`` stands for, each waited for."""
        return [self.call(traffic.operation, traffic.payload_bytes, group)] * traffic.count

    def run(self, events: Iterable[streams.Event]) -> streams.Busy:
        """What becomes of a step."""
        comm = self.machine.comm
        return streams.run(events, comm.overlap_slowdown, comm.comm_slowdown)

    def overhead_s(self) -> float:
        """What a step takes of the computing thread beside kernels and calls."""
        return self.machine.compute.step_s + self.own.step_s + self.own.sample_s * self.spec.batch_size

    def _priced(self, operation: str, payload_bytes: float, group: Group) -> tuple[float, float]:
        if group.ranks < 2:
            return 0.0, 0.0
        span = corrected(self._span(group), operation, self.machine.comm.collectives, payload_bytes)
        issue_s = self.machine.comm.call_s
        return time_s(operation, span, payload_bytes) + issue_s, time_s(operation, span, 0.0) + issue_s

    def _span(self, group: Group) -> Span:
        """The links as the group sees them beside its rivals."""
        comm = self.machine.comm
        lanes = min(group.ranks_per_node, comm.links_per_node) if comm.striped else 1
        # Rivals share what links there are; one group alone uses no more than its lanes.
        flows = group.rivals * lanes / comm.links_per_node
        phi = _contended(comm.contention, flows)
        inter = Wire(comm.inter_node.latency_s, comm.inter_node.beta_s_per_byte * phi / lanes)
        return Span(group.ranks, group.nodes, comm.intra_node, inter, comm.trees, comm.by_hop)

    def straggler_s(self, compute_s: float) -> float:
        """How much longer than the mean the slowest of all ranks takes: ranks compute, nodes are held up, by chance."""
        delayed_s = self.machine.delay_s * harmonic(self.spec.nodes) if self.spec.ranks > 1 else 0.0
        return compute_s * self.machine.straggling * expected_largest(self.spec.ranks) + delayed_s


def expected_largest(count: int) -> float:
    """Of ``count`` draws from the standard normal distribution the expected largest (Blom 1958's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def harmonic(count: int) -> float:
    """1 + 1/2 + ... + 1/count: of so many draws from an exponential distribution of mean 1 the expected largest."""
    if count <= 100:
        return sum(1.0 / number for number in range(1, count + 1))
    # Euler's expansion, to 1e-10.
    return log(count) + 0.5772156649015329 + 1 / (2 * count) - 1 / (12 * count**2)


def _crowded(crowding: dict[int, float], ranks: int) -> float:
    return _interpolated(crowding, ranks) if crowding else 1.0


def _contended(contention: dict[int, float], flows: float) -> float:
    """What nobody measured shares fairly."""
    return max(1.0, _interpolated({1: 1.0, **contention}, flows) if contention else flows)


def _interpolated(figures: dict[int, float], at: float) -> float:
    """Between two figures in proportion, beyond the last one as the last two go on."""
    known = sorted(figures.items())
    if len(known) == 1 or at <= known[0][0]:
        return known[0][1]
    for (left, low), (right, high) in pairwise(known):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    (left, low), (right, high) = known[-2:]
    return max(high + (high - low) * (at - right) / (right - left), high)


def combined_spread(parts: list[tuple[float, float]], whole_s: float) -> float:
    """Relative uncertainty of a sum of independent parts (seconds, relative uncertainty)."""
    if not whole_s:
        return 0.0
    return sqrt(sum((seconds * spread) ** 2 for seconds, spread in parts)) / whole_s
