"""A limit on running jobs, kept over several arrays: SLURM's own limit (``%N``) holds within one array alone.

The jobs that may run are shared out among lanes. An array of a lane may run as many jobs as the lane has, and begins
once the lane's array before it has ended; so that however many arrays there are, the limit is never exceeded.
"""

from __future__ import annotations

from collections.abc import Iterable


def lane_widths(max_running: int, arrays: int) -> list[int]:
    """How many jobs each lane may run: as many lanes as arrays, or as jobs that may run where those are fewer."""
    lanes = max(1, min(max_running, arrays))
    share, rest = divmod(max_running, lanes)
    return [share + (lane < rest) for lane in range(lanes)]


def count_arrays(jobs: Iterable[int], largest: int) -> int:
    """How many arrays it takes when each holds at most ``largest`` jobs."""
    return sum(-(-count // largest) for count in jobs)


def next_lane(used: Iterable[int], lanes: int) -> int:
    """The lane that has been given the fewest arrays so far."""
    given = [0] * lanes
    for lane in used:
        given[lane % lanes] += 1
    return given.index(min(given))
