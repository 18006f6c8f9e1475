"""Communication calls: the record of one rank in one step, which the oracle predicts and the worker records, and the
messages of a probe with their form in an option of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from hpcbench.errors import ConfigError

COMM_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "reduce", "send")


class Traffic(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Equal calls of one rank in one step.

    ``payload_bytes`` is the payload that the rank passes to one call: to all_reduce, reduce_scatter, broadcast and
    reduce the whole buffer (of a broadcast also where it is received), to all_gather its own part, to all_to_all and
    send what leaves it. What is received point to point is the sender's.
    """

    operation: str
    group_size: int
    """Ranks that take part; 2 point to point."""
    payload_bytes: int
    count: int = 1


def group_call_factory(group_size: int) -> Callable[[str, int], Traffic]:
    """Makes single calls of a group, from the operation and the payload in bytes."""
    return lambda operation, payload_bytes: Traffic(
        operation=operation, group_size=group_size, payload_bytes=payload_bytes
    )


def merge_calls(calls: Iterable[Traffic]) -> list[Traffic]:
    """Return one entry for equal calls, in ascending order."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for call in calls:
        counts[call.operation, call.group_size, call.payload_bytes] += call.count
    return sorted(
        Traffic(operation=operation, group_size=size, payload_bytes=payload, count=count)
        for (operation, size, payload), count in counts.items()
    )


def total_payload_bytes(calls: Iterable[Traffic]) -> int:
    """Payload of all calls together."""
    return sum(call.payload_bytes * call.count for call in calls)


OVERLAPPED_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
"""Operations that libraries begin and wait for later, to compute meanwhile."""


class MessageShape(NamedTuple):
    """The shape of a call of a group: ``all_reduce:4:2:1:65536`` in the option ``messages``."""

    operation: str
    ranks: int
    """Number of ranks of one group."""
    ranks_per_node: int
    """Number of ranks of the group on each of its nodes."""
    rivals: int
    """Groups that use a node's way out at the same time; 1 inside a node."""
    payload_bytes: int
    """Bytes, counted as in ``strategies.traffic.Traffic``."""

    @property
    def nodes(self) -> int:
        """Nodes of the group."""
        return self.ranks // self.ranks_per_node


def format_messages(shapes: Iterable[MessageShape]) -> str:
    """Return the text that ``parse_messages`` reads."""
    return ",".join(":".join(map(str, shape)) for shape in shapes)


def parse_messages(text: str) -> list[MessageShape]:
    """Read the option; ``ConfigError`` where it names an unknown operation or a group that cannot be."""
    shapes = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        operation, *numbers = part.split(":")
        if operation not in COMM_OPERATIONS:
            raise ConfigError(f"messages: {part!r} begins with no operation: {', '.join(COMM_OPERATIONS)}")
        if len(numbers) != len(MessageShape._fields) - 1 or not all(map(str.isdecimal, numbers)):
            raise ConfigError(f"messages: {part!r}: operation:{':'.join(MessageShape._fields[1:])} is right")
        shape = MessageShape(operation, *map(int, numbers))
        is_pair = operation != "send" or shape.ranks == 2
        if min(shape[1:]) < 1 or shape.ranks < 2 or shape.ranks % shape.ranks_per_node or not is_pair:
            raise ConfigError(
                f"messages: {part!r}: {shape.ranks} ranks, {shape.ranks_per_node} on every node, cannot be"
            )
        shapes.append(shape)
    return shapes
