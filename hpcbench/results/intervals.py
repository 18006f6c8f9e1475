"""Arithmetic of time intervals: half-open ranges of nanoseconds. Pure integers."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
"""(begin, end)."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, in order, disjoint and not touching.

    >>> union([(5, 7), (0, 2), (1, 3), (3, 4)])
    [(0, 4), (5, 7)]
    """
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def subtract(intervals: Iterable[Interval], without: Iterable[Interval]) -> list[Interval]:
    """The points of ``intervals`` that are in none of ``without``.

    >>> subtract([(0, 10)], [(2, 3), (8, 20)])
    [(0, 2), (3, 8)]
    """
    holes = union(without)
    left: list[Interval] = []
    first = 0
    for interval in union(intervals):
        begin, end = interval
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        for hole_begin, hole_end in holes[first:]:
            if hole_begin >= end:
                break
            if hole_begin > begin:
                left.append((begin, hole_begin))
            begin = max(begin, hole_end)
        if begin < end:
            left.append((begin, end))
    return left


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The points of ``intervals`` within ``window``."""
    low, high = window
    return union((max(begin, low), min(end, high)) for begin, end in intervals)


def length_s(intervals: Iterable[Interval]) -> float:
    """Seconds that ``intervals`` cover, each point once."""
    return sum(end - begin for begin, end in union(intervals)) / 1e9
