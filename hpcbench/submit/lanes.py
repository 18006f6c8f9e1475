"""A limit on running jobs, kept over several arrays: SLURM's own limit (``%N``) holds within one array alone.

The jobs that may run are shared out among lanes. An array of a lane may run as many jobs as the lane has, and begins
once the lane's array before it has ended; so that however many arrays there are, the limit is never exceeded.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def lane_widths(max_running: int, arrays: Sequence[int]) -> list[int]:
    """How many jobs each lane may run, with ``arrays`` of so many jobs each that take the lanes in turn.

    As many lanes as arrays, or as jobs that may run where those are fewer. Each has one job; the others go one by one
    to where most jobs come on each that may run.
    """
    lanes = max(1, min(max_running, len(arrays)))
    widths, jobs = [1] * lanes, [sum(arrays[lane::lanes]) for lane in range(lanes)]
    longest = [(-float(jobs[lane]), lane) for lane in range(lanes)]
    heapq.heapify(longest)
    for _ in range(min(max_running, sum(jobs)) - lanes):
        lane = longest[0][1]
        widths[lane] += 1
        heapq.heapreplace(longest, (-jobs[lane] / widths[lane], lane))
    return widths


def cut(jobs: Iterable[int], largest: int) -> list[int]:
    """The arrays of at most ``largest`` jobs that arrays of ``jobs`` are sent as."""
    return [min(largest, count - first) for count in jobs for first in range(0, count, largest)]


def next_lane(used: Iterable[int], lanes: int) -> int:
    """The lane that has been given the fewest arrays so far."""
    given = [0] * lanes
    for lane in used:
        given[lane % lanes] += 1
    return given.index(min(given))
