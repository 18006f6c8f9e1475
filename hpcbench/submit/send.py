"""Submission of jobs to SLURM: in the largest arrays that its limits allow, each job once.

A limit on running jobs holds across arrays, where SLURM's own limit (``%N``) holds within one array. The allowed jobs
are divided among throttle groups. Each array of a group may run as many jobs as the group has, and starts after the
group's previous array has ended. Three running jobs and arrays of six, two and two jobs:

    group 0 (2 jobs)   array 0 %2  --afterany-->  array 2 %2
    group 1 (1 job)    array 1 %1
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.journal import JobBatch, Journal, read_journal
from hpcbench.submit.lock import LockHeldError, exclusive_lock
from hpcbench.submit.sbatch import JobSubmitter, SbatchError, check_job_parameters
from hpcbench.submit.scheduler import Notify, SchedulerLimits, SendOutcome
from hpcbench.submit.slurm_queue import SbatchOutcome, count_queued_jobs, queued_job_numbers
from hpcbench.submit.submission_record import JobArray, Submission


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
class _Throttle:
    """The throttle groups of a submission; without a limit on running jobs there are none."""

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


JobRanges = list[tuple[int, int]]
"""First number and count of consecutive jobs of an array."""


def send_submission(
    folder: Path,
    record: Submission,
    profile: ClusterProfile,
    tree: ClusterTree,
    notify: Notify,
    limits: Callable[[], SchedulerLimits],
) -> SendOutcome:
    """Submit every job of a submission that the scheduler has not accepted yet. One process at a time does so."""
    try:
        with exclusive_lock(folder / ".sending") as lock:
            submitter = JobSubmitter(folder, record, profile, tree, lock)
            return _SubmissionSender(folder, record, profile, submitter, notify).send(limits)
    except LockHeldError as held:
        return SendOutcome(waiting=_count_jobs(unsent_jobs(record, read_journal(folder))), reason=held.message)


def unsent_jobs(record: Submission, journal: Journal) -> dict[int, JobRanges]:
    """Return by array the jobs that are in no batch, without those all of whose runs were removed."""
    return {
        array.number: _without_dropped(array, set(journal.dropped), journal.unsent(array.number, array.jobs))
        for array in record.arrays
    }


def _without_dropped(array: JobArray, dropped: set[str], ranges: JobRanges) -> JobRanges:
    if not dropped:
        return ranges
    remaining: JobRanges = []
    for first, count in ranges:
        for job in range(first, first + count):
            if dropped.issuperset(array.runs_of(job)):
                continue
            if remaining and sum(remaining[-1]) == job:
                remaining[-1] = (remaining[-1][0], remaining[-1][1] + 1)
            else:
                remaining.append((job, 1))
    return remaining


def _count_jobs(jobs: dict[int, JobRanges]) -> int:
    return sum(count for ranges in jobs.values() for _, count in ranges)


class _SubmissionSender:
    """Sends a submission, in the process that holds its lock."""

    def __init__(
        self, folder: Path, record: Submission, profile: ClusterProfile, submitter: JobSubmitter, notify: Notify
    ) -> None:
        self._folder, self._record, self._profile = folder, record, profile
        self._submitter, self._notify = submitter, notify
        self._outcome = SendOutcome()
        self._limits = SchedulerLimits()
        self._throttle = _Throttle()

    def send(self, limits: Callable[[], SchedulerLimits]) -> SendOutcome:
        journal = read_journal(self._folder)
        try:
            for batch in journal.batches:
                if batch.is_unanswered:
                    self._submitter.recover(batch, self._notify)
            recovered = read_journal(self._folder)
            unsent = unsent_jobs(self._record, recovered)
            if any(unsent.values()):
                self._limits = self._submitter.query(limits, self._notify)
                if self._record.max_running_jobs is not None:
                    arrays = split_arrays((array.jobs for array in self._record.arrays), self._limits.max_array_size)
                    sizes = throttle_group_sizes(self._record.max_running_jobs, arrays)
                    self._throttle = self._resumed_throttle(sizes, recovered)
                self._send_arrays(unsent)
        except SubmitError as error:
            self._outcome.failed = error
            self._outcome.reason = error.message
        self._finish(journal.waiting)
        return self._outcome

    def _resumed_throttle(self, sizes: list[int], journal: Journal) -> _Throttle:
        """The groups as an earlier process left them; a job that the scheduler has forgotten is no dependency."""
        last_job = {batch.lane: batch.job_id for batch in journal.batches if batch.job_id is not None}
        queued = queued_job_numbers(last_job.values(), self._profile) if last_job else set()
        queued_jobs = {group: job_id for group, job_id in last_job.items() if job_id in queued}
        return _Throttle(sizes, [batch.lane for batch in journal.batches if batch.is_sent], queued_jobs)

    def _send_arrays(self, unsent: dict[int, JobRanges]) -> None:
        full: set[str | None] = set()
        for array in self._record.arrays:
            ranges = unsent[array.number]
            if ranges:
                parameters = {
                    "nodes": array.nodes,
                    "ntasks_per_node": array.ranks // array.nodes,
                    "time": max(1, int(array.job_limit_s // 60)),
                    "account": self._profile.account,
                }
                set_parameters = {key: value for key, value in parameters.items() if value is not None}
                check_job_parameters(set_parameters, self._folder)
            try:
                for first, count in ranges:
                    if array.partition not in full and not self._send_range(array, first, count):
                        full.add(array.partition)
            except SbatchError as error:
                if error.outcome is not SbatchOutcome.REFUSED:
                    raise
                self._record_refusal(array, ranges)
                self._outcome.refused.append(error)

    def _record_refusal(self, array: JobArray, ranges: JobRanges) -> None:
        """The rest of an array that the scheduler refuses belongs to no submission."""
        sent = [batch for batch in read_journal(self._folder).of(array.number) if batch.is_sent]
        for first, count in ranges:
            accepted = sum(batch.count for batch in sent if first <= batch.first < first + count)
            if accepted < count:
                rest = JobBatch(array=array.number, first=first + accepted, count=count - accepted, refused=True)
                self._submitter.writer.record(rest)

    def _send_range(self, array: JobArray, first: int, count: int) -> bool:
        """Submit consecutive jobs in as few calls as SLURM allows; ``False`` once it accepts no more for now."""
        end, size = first + count, min(count, self._limits.max_array_size)
        while first < end:
            size = min(size, end - first)
            free = self._limits.free_jobs
            if free is not None:
                size = min(size, free)
                if size == 0:
                    self._outcome.reason = f"the profile allows {self._limits.max_submitted_jobs} submitted jobs"
                    return False
            batch = JobBatch(
                array=array.number,
                first=first,
                count=size,
                name=self._record.batch_name(array.number, first, size),
                lane=self._throttle.next_group(),
                is_array=array.jobs > 1,
            )
            try:
                job_id = self._submitter.submit(batch, self._options(batch, array.partition), self._notify)
            except SbatchError as error:
                if error.outcome is not SbatchOutcome.LIMIT:
                    raise
                if size == 1:
                    return self._wait_for_limit(error)
                size //= 2
                continue
            self._outcome.jobs += size
            self._throttle.add(batch.lane, job_id)
            if free is not None:
                self._limits = self._limits._replace(free_jobs=free - size)
            first += size
        return True

    def _wait_for_limit(self, error: SbatchError) -> bool:
        """A single job is over a limit. It waits, unless nothing is queued whose end it could wait for."""
        if self._outcome.jobs == 0 and count_queued_jobs(self._profile) == 0:
            raise SbatchError(error.message, SbatchOutcome.REFUSED, hint=error.hint) from error
        self._outcome.reason = error.message.splitlines()[0]
        return False

    def _options(self, batch: JobBatch, partition: str | None) -> list[str]:
        drop = self._profile.request_of(partition).drop
        options = [f"--{name}={batch.name}" for name in ("job-name", "comment") if name not in drop]
        if batch.is_array:
            size = self._throttle.sizes[batch.lane] if self._throttle.sizes else batch.count
            options.append(f"--array=0-{batch.count - 1}" + (f"%{size}" if size < batch.count else ""))
        if batch.lane in self._throttle.last_job:
            options.append(f"--dependency=afterany:{self._throttle.last_job[batch.lane]}")
        return options

    def _finish(self, was_waiting: str) -> None:
        journal = read_journal(self._folder)
        self._outcome.waiting = _count_jobs(unsent_jobs(self._record, journal))
        self._outcome.waiting += sum(batch.count for batch in journal.batches if batch.is_unanswered)
        if self._outcome.reason != was_waiting:
            self._submitter.writer.record_waiting(self._outcome.reason)
