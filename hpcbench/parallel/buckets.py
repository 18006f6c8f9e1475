"""Which gradients are sent together. Pure integers: the worker fills these very buckets, the oracle prices them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIB = 2**20
BUCKET_CAP_MB = 25.0
FIRST_CAP_BYTES = MIB
"""The first bucket is small, so that communication begins early (Li et al. 2020, section 3.2.3)."""


def buckets(tensor_bytes: Sequence[int], cap_bytes: int, first_cap_bytes: int = FIRST_CAP_BYTES) -> list[list[int]]:
    """Places in ``tensor_bytes`` that make up each bucket, in the order in which buckets are sent.

    The backward pass ends with the first tensor, so buckets are filled from the last one on. A bucket is closed as
    soon as it holds its cap or more.

    >>> buckets([8, 8, 8, 8], cap_bytes=16, first_cap_bytes=4)
    [[3], [2, 1], [0]]
    """
    found: list[list[int]] = []
    current: list[int] = []
    held = 0
    for place in range(len(tensor_bytes) - 1, -1, -1):
        current.append(place)
        held += tensor_bytes[place]
        if held >= (cap_bytes if found else min(first_cap_bytes, cap_bytes)):
            found.append(current)
            current, held = [], 0
    return [*found, current] if current else found


def bucket_bytes(tensor_bytes: Sequence[int], cap_bytes: int) -> list[int]:
    """Payload of each bucket, see ``buckets``."""
    return [total(tensor_bytes, places) for places in buckets(tensor_bytes, cap_bytes)]


def total(tensor_bytes: Sequence[int], places: Iterable[int]) -> int:
    """Bytes of the tensors at ``places``."""
    return sum(tensor_bytes[place] for place in places)
