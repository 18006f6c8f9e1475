"""Limits on running jobs that hold across arrays, where SLURM's own limit (``%N``) holds within one array.

The allowed jobs are divided among throttle groups. Each array of a group may run as many jobs as the group has, and
starts after the group's previous array has ended. Three running jobs and arrays of six, two and two jobs:

    group 0 (2 jobs)   array 0 %2  --afterany-->  array 2 %2
    group 1 (1 job)    array 1 %1
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil


def throttle_group_sizes(max_running: int, arrays: Sequence[int]) -> list[int]:
    """The number of jobs that each throttle group may run.

    There are as many groups, at most one per array, as finish first if all jobs take the same time: arrays of one group
    run one after another. Each has one job; a further job goes to the group with the most jobs for each that may run.

    Args:
        max_running: jobs that may run at the same time.
        arrays: jobs of each array; array ``i`` belongs to group ``i % groups``.
    """
    most_groups = max(1, min(max_running, len(arrays)))
    candidates = [_group_sizes(max_running, arrays, groups) for groups in range(most_groups, 0, -1)]
    return min(candidates, key=lambda sizes: _job_rounds(sizes, arrays))


def _group_sizes(max_running: int, arrays: Sequence[int], groups: int) -> list[int]:
    sizes, jobs = [1] * groups, [sum(arrays[group::groups]) for group in range(groups)]
    longest = [(-float(jobs[group]), group) for group in range(groups)]
    heapq.heapify(longest)
    for _ in range(min(max_running, sum(jobs)) - groups):
        group = longest[0][1]
        sizes[group] += 1
        heapq.heapreplace(longest, (-jobs[group] / sizes[group], group))
    return sizes


def _job_rounds(sizes: Sequence[int], arrays: Sequence[int]) -> int:
    """The jobs that the longest group runs one after another."""
    groups = len(sizes)
    return max(sum(ceil(jobs / sizes[group]) for jobs in arrays[group::groups]) for group in range(groups))


def split_arrays(jobs: Iterable[int], largest: int) -> list[int]:
    """The arrays of at most ``largest`` jobs that arrays of ``jobs`` are sent as."""
    return [min(largest, count - first) for count in jobs for first in range(0, count, largest)]


def next_throttle_group(used: Iterable[int], groups: int) -> int:
    """The group with the fewest arrays so far. ``used``: the group of each array."""
    arrays = [0] * groups
    for group in used:
        arrays[group % groups] += 1
    return arrays.index(min(arrays))


@dataclass
class Throttle:
    """The throttle groups of the arrays that one limit on running jobs holds for; without a limit there are none."""

    sizes: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    """The group of each array that was submitted."""
    last_job: dict[int, str] = field(default_factory=dict)
    """The newest array of each group that the scheduler still lists."""

    def next_group(self) -> int:
        return next_throttle_group(self.used, len(self.sizes)) if self.sizes else 0

    def add(self, group: int, job_id: str) -> None:
        if self.sizes:
            self.used.append(group)
            self.last_job[group] = job_id


def throttle_scopes(
    most: int | None, by_partition: Mapping[str | None, int | None]
) -> dict[str | None, tuple[str, int]]:
    """The limit on running jobs that holds for each partition, with the name of the arrays that share it.

    A limit of a partition holds for its arrays alone. One of the whole submission is divided: limited partitions take
    their limits, the others share the rest. If that leaves nothing, all share the smallest limit.

    Args:
        most: the submission's limit; ``None``: none.
        by_partition: the limit of each partition that it uses.

    Example::

        throttle_scopes(8, {"small": 1, "large": None, "old": None})
        # {"small": ("small", 1), "large": ("", 7), "old": ("", 7)}
    """
    limited = {key: limit for key, limit in by_partition.items() if limit is not None}
    own = {key: (str(key), limit) for key, limit in limited.items()}
    if most is None:
        return own
    rest = most - sum(limited.values())
    unlimited = by_partition.keys() - limited.keys()
    if rest < (1 if unlimited else 0):
        return dict.fromkeys(by_partition, ("", min([most, *limited.values()])))
    return {**own, **dict.fromkeys(unlimited, ("", rest))}
