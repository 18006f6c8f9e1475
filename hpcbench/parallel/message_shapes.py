"""Messages of given sizes in groups of given places, and their form in an option of a sweep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hpcbench.errors import ConfigError
from hpcbench.parallel.traffic import COMM_OPERATIONS


class MessageShape(NamedTuple):
    """One call of a group: ``all_reduce:4:2:1:65536`` in the option ``messages``."""

    operation: str
    ranks: int
    """Number of ranks of one group."""
    ranks_per_node: int
    """On every node of the group."""
    rivals: int
    """Groups that use a node's way out at the same time; 1 inside a node."""
    payload_bytes: int
    """Bytes, counted as in ``parallel.traffic.Traffic``."""

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
