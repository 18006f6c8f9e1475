"""Partitions and kinds of nodes: limits, memory, accelerators, and the nodes that are out of service."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_STATES_IN_SERVICE = frozenset({"IDLE", "ALLOCATED", "MIXED", "COMPLETING", "PLANNED", "CLOUD", "DYNAMIC_NORM", ""})
_NAMED_NODES = 4
"""Absent nodes that a message names; it counts the others."""


class GpuCount(NamedTuple):
    """Accelerators of one type of a node."""

    type: str | None
    number: int


@dataclass(frozen=True)
class NodeFacts:
    """A kind of nodes: equal hardware and features."""

    cpus: int
    memory_bytes: int
    gpus: tuple[GpuCount, ...]
    features: frozenset[str]
    arch: str
    threads_per_core: int
    name: str = field(default="", compare=False)
    state: str = field(default="IDLE", compare=False)
    """The scheduler's words, such as ``IDLE+DRAIN``."""
    reason: str = field(default="", compare=False)
    """The administrator's reason for the state."""

    @property
    def in_service(self) -> bool:
        """Whether the node is neither down, drained, reserved nor powered off."""
        return _STATES_IN_SERVICE.issuperset(re.split(r"[^A-Z_]+", self.state.upper()))

    @property
    def device_count(self) -> int:
        return sum(gpu.number for gpu in self.gpus)


@dataclass(frozen=True)
class MemoryLimits:
    """The memory that jobs of a partition get and may ask for, in bytes; ``None`` is no limit."""

    default_per_cpu: int | None = None
    default_per_node: int | None = None
    most_per_cpu: int | None = None
    most_per_node: int | None = None

    def default(self, kind: NodeFacts) -> int:
        """The memory on a node of a job that takes all its CPUs and asks for no memory."""
        per_cpu = self.default_per_cpu * kind.cpus if self.default_per_cpu else None
        return self.default_per_node or per_cpu or kind.memory_bytes

    def most(self, kind: NodeFacts) -> int:
        """The most memory that a job may ask for on a node."""
        per_cpu = self.most_per_cpu * kind.cpus if self.most_per_cpu else None
        return min(kind.memory_bytes, self.most_per_node or per_cpu or kind.memory_bytes)

    def must_ask(self, kind: NodeFacts) -> bool:
        """Whether a job must ask for its memory: by default it gets less than it may have, or too much to start."""
        return not 0.9 * self.most(kind) <= self.default(kind) <= self.most(kind)


@dataclass(frozen=True)
class PartitionFacts:
    """One partition of the scheduler; ``None`` is no limit."""

    name: str
    is_default: bool = False
    state: str = "UP"
    """``UP``, or what keeps its jobs from starting: ``DOWN``, ``DRAIN`` or ``INACTIVE``."""
    is_hidden: bool = False
    """Whether the scheduler lists it only on request."""
    max_time_min: float | None = None
    default_time_min: float | None = None
    max_nodes: int | None = None
    min_nodes: int | None = None
    nodes: int = 0
    allowed_qos: frozenset[str] | None = None
    allowed_accounts: frozenset[str] | None = None
    denied_accounts: frozenset[str] = frozenset()
    denied_qos: frozenset[str] = frozenset()
    allowed_groups: frozenset[str] | None = None
    absent_nodes: tuple[NodeFacts, ...] = ()
    """Its nodes that are down, drained, reserved or powered off."""
    qos: str | None = None
    whole_nodes: bool = False
    memory: MemoryLimits = MemoryLimits()
    kinds: tuple[NodeFacts, ...] = ()
    """Its kinds of nodes, the one with most nodes first."""

    @property
    def usual_kind(self) -> NodeFacts | None:
        """The kind that jobs are for: the most frequent one with devices, if there is one."""
        return next((kind for kind in self.kinds if kind.device_count), next(iter(self.kinds), None))

    @property
    def absence(self) -> str | None:
        """Its nodes that take no jobs now, with states and reasons, as text; ``None`` if all do."""
        if not self.absent_nodes:
            return None
        first = self.absent_nodes[:_NAMED_NODES]
        words = [f"{node.name} ({', '.join(filter(None, (node.state, node.reason)))})" for node in first]
        more = len(self.absent_nodes) - len(first)
        listed = ", ".join(words) + (f" and {more} more" if more else "")
        verb = "takes" if len(self.absent_nodes) == 1 else "take"
        return f"{len(self.absent_nodes)} of its {self.nodes} nodes {verb} no jobs now: {listed}"

    @property
    def limits_accounts(self) -> bool:
        """Whether it takes jobs of some accounts or QOS only."""
        allowed = self.allowed_accounts is not None or self.allowed_qos is not None
        return allowed or bool(self.denied_accounts or self.denied_qos)

    def takes_qos(self, qos: str) -> bool:
        return qos not in self.denied_qos and (self.allowed_qos is None or qos in self.allowed_qos)
