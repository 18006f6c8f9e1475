"""The record of communication calls of one rank in one step, which the oracle predicts and the worker records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

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
    """One entry for equal calls, in ascending order."""
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
