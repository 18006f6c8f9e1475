"""Communication calls: the record of one rank in one step, which the oracle predicts and the worker records, and the
messages of a probe with their form in an option of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, get_args

import msgspec

from hpcbench.config.run_spec import CollectiveOperation, RunSpec
from hpcbench.errors import ConfigError

COMM_OPERATIONS: tuple[str, ...] = tuple(name for name in get_args(CollectiveOperation) if name != "pairs")


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


def message_shapes(spec: RunSpec) -> list[MessageShape]:
    """Return the messages of a run of collectives: those of its option ``messages``, or the one of its parameters.

    ``message_bytes`` is the size that nccl-tests prints: of the bytes that a rank sends and receives the larger number.
    It is rounded up so that all ranks have equal parts of whole numbers. Raises ``ConfigError`` as ``parse_messages``.
    """
    if messages := str(spec.options.get("messages", "")):
        return parse_messages(messages)
    if spec.operation == "pairs":
        return [MessageShape("send", 2, 1 if spec.nodes > 1 else 2, 1, 4 * -(-(spec.message_bytes or 0) // 4))]
    width = spec.group_tasks or spec.tasks_per_node
    ranks = spec.nodes * width
    part_bytes = 4 * -(-(spec.message_bytes or 0) // (4 * ranks))
    payload_bytes = part_bytes if spec.operation == "all_gather" else part_bytes * ranks
    rivals = 1 if spec.nodes == 1 else spec.tasks_per_node // width
    return [MessageShape(spec.operation or "", ranks, width, rivals, payload_bytes)]


def bus_bandwidth(operation: str, ranks: int, payload_bytes: int, seconds: float) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth (bytes/s) of a call that took ``seconds``.

    Source: nccl-tests, doc/PERFORMANCE.md. The algorithm bandwidth is size over time; the bus bandwidth is comparable
    to that of the hardware, whatever the number of ranks.
    """
    size_bytes = payload_bytes * ranks if operation == "all_gather" else payload_bytes
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share, "all_to_all": share}
    return size_bytes / seconds, factors.get(operation, 1.0) * size_bytes / seconds


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
