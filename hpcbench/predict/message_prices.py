"""Times of calls between ranks: measured messages, and beyond them the formulas, with the measured links.

The smallest and the largest message of each measured group give its latency and its time per byte. Between them the
ratio of measured to formula is interpolated by size. A group that was not measured has the links and the ratios of the
most similar measured one."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from math import exp, log, log2
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.collective_formulas import GroupLinks, HockneyLink, collective_s
from hpcbench.strategies.layer_table import cached_by_identity
from hpcbench.strategies.traffic import MessageShape


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
    """Factor on the collectives while the pass runs; 1 where another unit than the processor sends."""

    @property
    def conditions(self) -> tuple[object, ...]:
        """Return the values of which there is one measurement."""
        return self.workload, self.samples, self.nodes, self.tasks_per_node, self.operation


class CommParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The links between ranks, with the measurements over them."""

    intra_node: HockneyLink
    inter_node: HockneyLink
    links_per_node: int = 1
    """Links between nodes that a node has; groups that send at the same time share them."""
    striped: bool = False
    """Whether one group uses all links of a node (NCCL does, gloo does not)."""
    trees: bool = True
    """Whether the library has tree all_reduces (NCCL from 2.4 on)."""
    by_hop: bool = False
    """Whether the latencies of a ring's links add up (NCCL), or every step waits for the longest."""
    messages: list[MeasuredMessage] = []
    overlaps: list[MeasuredOverlap] = []
    measured_links: tuple[HockneyLink, HockneyLink] | None = None
    """The profile's links inside nodes and between them when messages and overlaps were measured."""
    spread: float = 0.4
    """Relative uncertainty of a step's communication."""
    measured_spread: float = 0.03
    """The same, where all of its messages were measured."""

    def span(self, shape: MessageShape) -> GroupLinks:
        """Return the links as a group sees them beside its rivals, which share them fairly."""
        lanes = min(shape.ranks_per_node, self.links_per_node) if self.striped else 1
        # Rivals share what links there are; one group alone uses no more than its lanes.
        flows = max(1.0, shape.rivals * lanes / self.links_per_node)
        inter = HockneyLink(self.inter_node.latency_s, self.inter_node.beta_s_per_byte * flows / lanes)
        nodes = -(-shape.ranks // shape.ranks_per_node)
        return GroupLinks(shape.ranks, nodes, self.intra_node, inter, self.trees, self.by_hop)

    def rate(self, *, crosses: bool) -> float:
        """Return how many times as fast the profile's link is as when it was measured."""
        now, then = (self.intra_node, self.inter_node)[crosses], (self.measured_links or (None, None))[crosses]
        return 1.0 if then is None or not now.beta_s_per_byte else then.beta_s_per_byte / now.beta_s_per_byte


class MessagePrice(NamedTuple):
    """The time of a call, the part of it that no bandwidth would shorten, and whether the group itself was measured."""

    seconds: float
    latency_s: float
    is_measured: bool


class _Group(NamedTuple):
    """The measurements of one group and operation."""

    shape: MessageShape
    tasks_per_node: int
    latency_s: float
    beta_ratio: float
    """Measured time per byte over that of the profile's link at that time."""
    sizes: list[float]
    log_ratios: list[float]
    """Logarithm of measured over fitted time, by size."""


_FALLBACK_OPERATION = "all_reduce"


class MessagePrices:
    """Times of calls over the links of one machine."""

    def __init__(self, comm: CommParameters) -> None:
        self._comm = comm
        intra, inter = comm.measured_links or (comm.intra_node, comm.inter_node)
        then = msgspec.structs.replace(comm, intra_node=intra, inter_node=inter)
        by_group: dict[tuple[MessageShape, int], list[MeasuredMessage]] = defaultdict(list)
        for message in comm.messages:
            by_group[message.shape._replace(payload_bytes=0), message.tasks_per_node].append(message)
        self._groups: dict[tuple[str, bool], list[_Group]] = defaultdict(list)
        for (shape, tasks), messages in by_group.items():
            self._groups[shape.operation, shape.nodes > 1].append(_fit_group(then, shape, tasks, messages))

    @staticmethod
    @cached_by_identity(16)
    def of(comm: CommParameters) -> MessagePrices:
        """Return the prices over these links, which are computed once."""
        return MessagePrices(comm)

    def price(self, shape: MessageShape, tasks_per_node: int) -> MessagePrice:
        """Return the price of one call of a group on nodes with ``tasks_per_node`` ranks."""
        span, size = self._comm.span(shape), float(shape.payload_bytes)
        groups = self._groups.get((shape.operation, span.nodes > 1))
        groups = groups or self._groups.get((_FALLBACK_OPERATION, span.nodes > 1))
        if not groups:
            seconds, latency_s = (collective_s(shape.operation, span, payload) for payload in (size, 0.0))
            return MessagePrice(seconds, latency_s, False)
        group = min(groups, key=lambda one: _distance(one, shape, tasks_per_node))
        links = _with_link(span, group.latency_s, group.beta_ratio)
        seconds, latency_s = (
            collective_s(shape.operation, links, payload) * exp(_between(group.sizes, group.log_ratios, payload))
            for payload in (size, 0.0)
        )
        is_same = (group.shape, group.tasks_per_node) == (shape._replace(payload_bytes=0), tasks_per_node)
        is_between = group.sizes[0] <= size <= group.sizes[-1] and self._comm.rate(crosses=span.nodes > 1) == 1.0
        return MessagePrice(seconds, min(latency_s, seconds), is_same and is_between)

    def interpolation_error(self) -> float:
        """Return the relative error of a message that is interpolated between its neighbours, over all groups."""
        errors = []
        for group in (group for groups in self._groups.values() for group in groups):
            inner = list(zip(group.sizes, group.log_ratios, strict=True))
            for before, (size, value), after in zip(inner, inner[1:], inner[2:], strict=False):
                errors.append(value - _between([before[0], after[0]], [before[1], after[1]], size))
        return (sum(error**2 for error in errors) / len(errors)) ** 0.5 if errors else 0.0


def _fit_group(
    comm: CommParameters, shape: MessageShape, tasks_per_node: int, messages: Sequence[MeasuredMessage]
) -> _Group:
    span, operation = comm.span(shape), shape.operation
    times = sorted((max(float(one.shape.payload_bytes), 1.0), one.seconds) for one in messages)
    wire = span.inter_node if span.nodes > 1 else span.intra_node
    steps, moved = (collective_s(operation, _over(span, link), 1.0) for link in (HockneyLink(1, 0), HockneyLink(0, 1)))
    (small, small_s), (large, large_s) = times[0], times[-1]
    beta = wire.beta_s_per_byte
    if large > small and large_s > small_s:
        beta = (large_s - small_s) / ((large - small) * moved)
    latency_s = max(small_s - small * moved * beta, 0.05 * small_s) / steps
    fitted = _with_link(span, latency_s, beta / wire.beta_s_per_byte)
    ratios = [log(seconds / collective_s(operation, fitted, size)) for size, seconds in times]
    return _Group(shape, tasks_per_node, latency_s, beta / wire.beta_s_per_byte, [size for size, _ in times], ratios)


def _over(span: GroupLinks, link: HockneyLink) -> GroupLinks:
    return span._replace(intra_node=link, inter_node=link, trees=False, by_hop=False)


def _with_link(span: GroupLinks, latency_s: float, beta_ratio: float) -> GroupLinks:
    """Return the group with a measured link, whose latency is that of a step, whichever links it crosses."""
    if span.nodes > 1:
        link = HockneyLink(latency_s, span.inter_node.beta_s_per_byte * beta_ratio)
        return span._replace(inter_node=link, by_hop=False)
    return span._replace(intra_node=HockneyLink(latency_s, span.intra_node.beta_s_per_byte * beta_ratio))


def _distance(group: _Group, shape: MessageShape, tasks_per_node: int) -> float:
    """Return a distance between two groups, by the logarithms of their sizes."""
    pairs = (
        (group.shape.ranks, shape.ranks, 1.0), (group.shape.rivals, shape.rivals, 1.0),
        (group.shape.ranks_per_node, shape.ranks_per_node, 0.5), (group.tasks_per_node, tasks_per_node, 0.25),
    )  # fmt: skip
    return sum(weight * abs(log2(measured / wanted)) for measured, wanted, weight in pairs)


def _between(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """Interpolate ``values`` over the logarithm of ``sizes``; beyond them the nearest holds."""
    place = bisect_left(sizes, size)
    if place in (0, len(sizes)):
        return values[min(place, len(sizes) - 1)]
    low, high = sizes[place - 1], sizes[place]
    part = log(size / low) / log(high / low)
    return values[place - 1] * (1 - part) + values[place] * part


def workload_key(spec: RunSpec) -> str:
    """Return a text that is equal for runs whose layers are equal at equal numbers of samples."""
    parts = (spec.model, spec.model_options, spec.dataset, spec.input_size, spec.compute_precision, spec.channels_last)
    return msgspec.json.encode(parts).decode()


class Slowdowns(NamedTuple):
    """Factors on computation and on a collective under each other."""

    computation: float = 1.0
    collective: float = 1.0
    is_measured: bool = False
    """Whether they were measured for the run's own model, operation and ranks on a node."""


def slowdowns(comm: CommParameters, spec: RunSpec, operation: str) -> Slowdowns:
    """Return the slowdowns of the measured overlap that is most like the run.

    The same model, operation and kind of link come first, then the nearest number of nodes and of samples. On a link
    that is now faster than when they were measured, both lose more, in proportion to the bytes that it carries.
    """
    if not comm.overlaps:
        return Slowdowns()
    key, samples, crosses = workload_key(spec), spec.batch_size / spec.micro_batches, spec.nodes > 1
    same = (key, operation, spec.tasks_per_node)

    def unlike(one: MeasuredOverlap) -> tuple[object, ...]:
        own = (one.workload, one.operation, one.tasks_per_node)
        return (
            (one.nodes > 1) != crosses, *(mine != other for mine, other in zip(own, same, strict=True)),
            abs(log(one.nodes / spec.nodes)), abs(log(one.samples / samples)),
        )  # fmt: skip

    found = min(comm.overlaps, key=unlike)
    rate = comm.rate(crosses=found.nodes > 1)
    is_same = (found.workload, found.operation, found.tasks_per_node) == same and (found.nodes > 1) == crosses
    return Slowdowns(
        1.0 + (found.slowdown - 1.0) * rate, 1.0 + (found.comm_slowdown - 1.0) * rate, is_same and rate == 1.0
    )
