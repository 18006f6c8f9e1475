"""The time of one collective: the Hockney model of rings, trees and direct exchanges (Thakur et al. 2005).

A message of m bytes over a link takes ``latency_s + m * beta_s_per_byte``. A ring over several nodes is as slow
as its slowest link, since every step waits for it. Sizes are payloads as ``Traffic`` of ``hpcbench.strategies``
defines them."""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple


class HockneyLink(NamedTuple):
    """A link between two ranks, one direction."""

    latency_s: float
    beta_s_per_byte: float

    def message_s(self, size_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_s + size_bytes * self.beta_s_per_byte


class GroupLinks(NamedTuple):
    """The placement of a group of ranks on nodes, with its links."""

    ranks: int
    nodes: int
    intra_node: HockneyLink
    inter_node: HockneyLink
    trees: bool = True
    """Whether the library has tree all_reduces: NCCL has, gloo uses a ring for every size."""
    by_hop: bool = False
    """Whether the latencies of a ring's links add up, as in NCCL's own model. Otherwise every step of a ring takes the
    longest latency of its links."""

    @property
    def slowest(self) -> HockneyLink:
        """Return the slowest link of a ring over the group."""
        return self.intra_node if self.nodes == 1 else self.inter_node

    @property
    def ranks_per_node(self) -> int:
        """Return the ranks on the node with most of them."""
        return ceil(self.ranks / self.nodes)

    def ring_step_s(self, size_bytes: float) -> float:
        """Return the time of one of the p - 1 steps of a ring, in which every rank passes on ``size_bytes``."""
        if not self.by_hop or self.nodes == 1:
            return self.slowest.message_s(size_bytes)
        inner, outer = self.ranks - self.nodes, self.nodes
        latency_s = (inner * self.intra_node.latency_s + outer * self.inter_node.latency_s) / self.ranks
        return latency_s + size_bytes * self.slowest.beta_s_per_byte


def all_reduce_s(span: GroupLinks, size_bytes: float) -> float:
    """The faster of a ring and a tree, between which libraries choose by size and number of ranks."""
    ring_s = ring_all_reduce_s(span, size_bytes)
    return min(ring_s, tree_all_reduce_s(span, size_bytes)) if span.trees else ring_s


def ring_all_reduce_s(span: GroupLinks, size_bytes: float) -> float:
    """A reduce_scatter, then an all_gather: 2 (p - 1) steps of m / p bytes."""
    return 2 * (span.ranks - 1) * span.ring_step_s(size_bytes / span.ranks)


def tree_all_reduce_s(span: GroupLinks, size_bytes: float) -> float:
    """NCCL's: a chain inside each node and two binary trees over the nodes, half of the data in each (Jeaugey 2019).

    Every rank sends and receives the whole buffer once up and once down; latency grows with the depth.
    """
    if span.ranks == 1:
        return 0.0
    depth_s = (span.ranks_per_node - 1) * span.intra_node.latency_s
    if span.nodes > 1:
        depth_s += ceil(log2(span.nodes)) * span.inter_node.latency_s
    return 2 * (depth_s + size_bytes * span.slowest.beta_s_per_byte)


def all_gather_s(span: GroupLinks, part_bytes: float) -> float:
    """A ring: p - 1 steps of one rank's part."""
    return (span.ranks - 1) * span.ring_step_s(part_bytes)


def reduce_scatter_s(span: GroupLinks, size_bytes: float) -> float:
    """A ring: p - 1 steps of m / p bytes."""
    return (span.ranks - 1) * span.ring_step_s(size_bytes / span.ranks)


def broadcast_s(span: GroupLinks, size_bytes: float) -> float:
    """A binomial tree: the number of ranks that have it doubles in each step."""
    return ceil(log2(span.ranks)) * span.slowest.message_s(size_bytes)


def all_to_all_s(span: GroupLinks, size_bytes: float) -> float:
    """Return the time of a direct exchange: p - 1 messages of m / p bytes."""
    return (span.ranks - 1) * span.slowest.message_s(size_bytes / span.ranks)


def send_s(span: GroupLinks, size_bytes: float) -> float:
    """Return the time of one message between two ranks of the group."""
    return span.slowest.message_s(size_bytes)


COLLECTIVE_FORMULAS = {
    "all_reduce": all_reduce_s,
    "reduce_scatter": reduce_scatter_s,
    "all_gather": all_gather_s,
    "broadcast": broadcast_s,
    "reduce": broadcast_s,
    "all_to_all": all_to_all_s,
    "send": send_s,
}


def collective_s(operation: str, span: GroupLinks, payload_bytes: float) -> float:
    """Return the time of one call of ``operation``."""
    return COLLECTIVE_FORMULAS[operation](span, payload_bytes)
