"""Calls of sbatch: the batch of jobs that each sends, its name and options, and the limits that divide batches.

A job has a name of its own, unless the profile prescribes one, or drops ours. It is then found by its command, the
script with its argument, which no other batch of the tree has.

SLURM's own limit on running jobs (``%N``) holds within one array. A limit on several arrays divides the allowed jobs
among throttle groups. Each array of a group may run as many jobs as the group has, and starts after the group's
previous array has ended. Three running jobs and arrays of six, two and two jobs:

    group 0 (2 jobs)   array 0 %2  --afterany-->  array 2 %2
    group 1 (1 job)    array 1 %1
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.submit.journal import JobBatch
from hpcbench.submit.submission_record import JobArray, Submission


def new_batch(
    folder: Path, record: Submission, array: JobArray, first: int, count: int, profile: ClusterProfile, group: int = 0
) -> JobBatch:
    """The batch of ``count`` jobs of an array from ``first`` on, before it is sent.

    Args:
        folder: the submission's.
        group: its throttle group.
    """
    script = folder / f"{array.number}.sh"
    own = record.batch_name(array.number, first, count)
    # Without a name, sbatch calls a job after its script.
    default = script.name if "job-name" in profile.partition(array.partition).request.drop else own
    name = _profile_directive("job-name", profile, array.partition) or default
    return JobBatch(
        array=array.number,
        first=first,
        count=count,
        name=name,
        command="" if name == own else f"{script} {first}",
        group=group,
        is_array=array.jobs > 1,
    )


def batch_options(
    batch: JobBatch, record: Submission, profile: ClusterProfile, throttle: Throttle | None = None
) -> list[str]:
    """The options of sbatch for a batch: its own name and comment, unless the profile has others; its array."""
    partition = record.arrays[batch.array].partition
    own, drop = record.batch_name(batch.array, batch.first, batch.count), profile.partition(partition).request.drop
    options = [
        f"--{name}={own}"
        for name in ("job-name", "comment")
        if name not in drop and _profile_directive(name, profile, partition) is None
    ]
    if batch.is_array:
        size = throttle.sizes[batch.group] if throttle and throttle.sizes else batch.count
        options.append(f"--array=0-{batch.count - 1}" + (f"%{size}" if size < batch.count else ""))
    if throttle and batch.group in throttle.last_job:
        options.append(f"--dependency=afterany:{throttle.last_job[batch.group]}")
    return options


def sbatch_command(script: Path, options: list[str], argument: int) -> list[str]:
    """The words of the call that submits the jobs of an array from number ``argument`` on."""
    return ["sbatch", "--parsable", *options, str(script), str(argument)]


def planned_calls(folder: Path, record: Submission, profile: ClusterProfile) -> dict[int, list[list[str]]]:
    """The calls of sbatch by array of a submission of which nothing was sent, if no limit but the profile's divides it.

    The number of a job that another one waits for is known once it was sent; its script stands in its place.
    """
    largest = profile.scheduler.max_array_size or max(array.jobs for array in record.arrays)
    scopes = throttle_scopes(record.max_running_jobs, {one.partition: one.max_running_jobs for one in record.arrays})
    throttles: dict[str, Throttle] = {}
    for name, limit in set(scopes.values()):
        jobs = (one.jobs for one in record.arrays if scopes.get(one.partition, ("", 0))[0] == name)
        throttles[name] = Throttle(throttle_group_sizes(limit, split_arrays(jobs, largest)))
    calls: dict[int, list[list[str]]] = {}
    for array in record.arrays:
        throttle = throttles[scopes[array.partition][0]] if array.partition in scopes else Throttle()
        script = folder / f"{array.number}.sh"
        for first in range(0, array.jobs, largest):
            count = min(largest, array.jobs - first)
            batch = new_batch(folder, record, array, first, count, profile, throttle.next_group())
            options = batch_options(batch, record, profile, throttle)
            calls.setdefault(array.number, []).append(sbatch_command(script, options, first))
            throttle.add(batch.group, f"<the job of {script.name} {first}>")
    return calls


def _profile_directive(name: str, profile: ClusterProfile, partition: str | None) -> str | None:
    """The value of a directive that the profile writes into every job; ``None`` if it has none."""
    value = profile.partition(partition).directives.get(name)
    return None if value is None or value is False else str(value)


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
