"""Sending of a submission's jobs to SLURM: in the largest arrays that its limits allow, each job once.

A limit on running jobs holds across arrays, where SLURM's own limit (``%N``) holds within one array. The allowed jobs
are divided among throttle groups. Each array of a group may run as many jobs as the group has, and starts after the
group's previous array has ended."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit import slurm_queue
from hpcbench.submit.journal import JobBatch, Journal, read_dropped_runs, read_journal
from hpcbench.submit.lock import LockHeldError, exclusive_lock
from hpcbench.submit.sbatch import JobSubmitter, Notify, SbatchError, check_job_parameters
from hpcbench.submit.slurm_queue import SbatchOutcome
from hpcbench.submit.submission_record import JobArray, Submission


def throttle_group_sizes(max_running: int, arrays: Sequence[int]) -> list[int]:
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


def split_arrays(jobs: Iterable[int], largest: int) -> list[int]:
    """The arrays of at most ``largest`` jobs that arrays of ``jobs`` are sent as."""
    return [min(largest, count - first) for count in jobs for first in range(0, count, largest)]


def next_throttle_group(used: Iterable[int], lanes: int) -> int:
    """The lane that has been given the fewest arrays so far."""
    given = [0] * lanes
    for lane in used:
        given[lane % lanes] += 1
    return given.index(min(given))


JobRanges = list[tuple[int, int]]
"""First number and count of consecutive jobs of an array."""


@dataclass
class SendOutcome:
    """What came of handing a submission over."""

    jobs: int = 0
    """Jobs that the scheduler took now."""
    waiting: int = 0
    """Jobs that it will be offered again."""
    reason: str = ""
    """Why they wait."""
    refused: list[SbatchError] = field(default_factory=list)
    failed: SubmitError | None = None
    """The scheduler did not answer."""


def send_submission(
    folder: Path, record: Submission, profile: ClusterProfile, tree: ClusterTree, tell: Notify
) -> SendOutcome:
    """Offer the scheduler everything of a submission that it has not taken yet. One process at a time does so."""
    try:
        with exclusive_lock(folder / ".sending") as lock:
            return _SubmissionSender(
                folder, record, profile, JobSubmitter(folder, record, profile, tree, lock), tell
            ).send()
    except LockHeldError as held:
        return SendOutcome(waiting=_count_jobs(unsent_jobs(folder, record, read_journal(folder))), reason=held.message)


def unsent_jobs(folder: Path, record: Submission, journal: Journal) -> dict[int, JobRanges]:
    """Per array the jobs that no call of sbatch was about, without those all of whose runs were struck."""
    dropped = read_dropped_runs(folder)
    return {
        array.number: _without_dropped(array, dropped, journal.unsent(array.number, array.jobs))
        for array in record.arrays
    }


def _without_dropped(array: JobArray, dropped: set[str], ranges: JobRanges) -> JobRanges:
    if not dropped:
        return ranges
    kept: JobRanges = []
    for first, count in ranges:
        for job in range(first, first + count):
            if dropped.issuperset(array.runs_of(job)):
                continue
            if kept and sum(kept[-1]) == job:
                kept[-1] = (kept[-1][0], kept[-1][1] + 1)
            else:
                kept.append((job, 1))
    return kept


def _count_jobs(jobs: dict[int, JobRanges]) -> int:
    return sum(count for ranges in jobs.values() for _, count in ranges)


class _SubmissionSender:
    """One process's part in sending a submission."""

    def __init__(
        self, folder: Path, record: Submission, profile: ClusterProfile, desk: JobSubmitter, tell: Notify
    ) -> None:
        self._folder, self._record, self._profile, self._desk, self._tell = folder, record, profile, desk, tell
        self._outcome = SendOutcome()
        self._largest = 1
        self._widths: list[int] = []
        self._used_lanes: list[int] = []
        self._last_of_lane: dict[int, str] = {}
        self._free: int | None = None

    def send(self) -> SendOutcome:
        journal = read_journal(self._folder)
        try:
            for chunk in journal.chunks:
                if chunk.is_open:
                    self._desk.recover(chunk, self._tell)
            now = read_journal(self._folder)
            todo = unsent_jobs(self._folder, self._record, now)
            if any(todo.values()):
                self._prepare(now.chunks, todo)
                self._send_arrays(todo)
        except SubmitError as error:
            self._outcome.failed = error
            self._outcome.reason = error.message
        self._finish(journal.waiting)
        return self._outcome

    def _prepare(self, chunks: list[JobBatch], todo: dict[int, JobRanges]) -> None:
        slurm_queue.export_slurm_settings(self._profile)
        if max(count for ranges in todo.values() for _, count in ranges) > 1:
            self._largest = self._desk.ask(lambda: slurm_queue.max_array_size(self._profile), self._tell)
        if self._record.max_running_jobs is not None:
            arrays = split_arrays((array.jobs for array in self._record.arrays), self._largest)
            self._widths = throttle_group_sizes(self._record.max_running_jobs, arrays)
            self._take_up_lanes([chunk for chunk in chunks if chunk.job_id is not None])
        limit = self._limit()
        if limit is not None:
            queued = slurm_queue.count_queued_jobs(self._profile)
            self._free = None if queued is None else max(0, limit - queued)

    def _limit(self) -> int | None:
        """Jobs that may be submitted: the least of the cluster's and of the partitions' that this is about."""
        partitions = (self._profile.partition(array.partition).max_submitted_jobs for array in self._record.arrays)
        limits = (self._profile.scheduler.max_submitted_jobs, *partitions)
        return min((limit for limit in limits if limit is not None), default=None)

    def _take_up_lanes(self, sent: list[JobBatch]) -> None:
        """Go on where an earlier process stopped, without depending on a job that the scheduler may have forgotten."""
        last = {chunk.lane: chunk.job_id or "" for chunk in sent}
        queued = slurm_queue.queued_job_numbers(last.values(), self._profile) if last else set()
        self._last_of_lane = {lane: job_id for lane, job_id in last.items() if job_id in queued}
        self._used_lanes = [chunk.lane for chunk in sent]

    def _send_arrays(self, todo: dict[int, JobRanges]) -> None:
        full: set[str | None] = set()
        for array in self._record.arrays:
            ranges = todo[array.number]
            if ranges:
                self._check(array)
            try:
                for first, count in ranges:
                    if array.partition not in full and not self._send_range(array, first, count):
                        full.add(array.partition)
            except SbatchError as error:
                if error.answer is not SbatchOutcome.REFUSED:
                    raise
                self._refuse(array, ranges)
                self._outcome.refused.append(error)

    def _refuse(self, array: JobArray, ranges: JobRanges) -> None:
        """What is left of an array that the scheduler will not have belongs to no submission."""
        sent = [chunk for chunk in read_journal(self._folder).of(array.number) if chunk.job_id is not None]
        for first, count in ranges:
            done = sum(chunk.count for chunk in sent if first <= chunk.first < first + count)
            if done < count:
                self._desk.writer.note(
                    JobBatch(array=array.number, first=first + done, count=count - done, refused=True)
                )

    def _check(self, array: JobArray) -> None:
        parameters = {
            "nodes": array.nodes,
            "ntasks_per_node": array.ranks // array.nodes,
            "time": max(1, int(array.job_limit_s // 60)),
            "account": self._profile.account,
        }
        check_job_parameters({key: value for key, value in parameters.items() if value is not None}, self._folder)

    def _send_range(self, array: JobArray, first: int, count: int) -> bool:
        """Send consecutive jobs in as few calls as the scheduler allows; ``False`` once it takes no more for now."""
        end, size = first + count, min(count, self._largest)
        while first < end:
            size = min(size, end - first)
            if self._free is not None:
                size = min(size, self._free)
                if size == 0:
                    self._outcome.reason = f"the profile allows {self._limit()} submitted jobs"
                    return False
            chunk = self._chunk(array, first, size)
            try:
                job_id = self._desk.offer(
                    chunk, self._options(chunk, array.partition), self._profile.scheduler.retry_s, self._tell
                )
            except SbatchError as error:
                if error.answer is not SbatchOutcome.LIMIT:
                    raise
                if size == 1:
                    return self._over_limit(error)
                size //= 2
                continue
            self._count(chunk, job_id)
            first += size
        return True

    def _over_limit(self, error: SbatchError) -> bool:
        """A single job is over a limit: it waits, unless nothing is queued that it could be waiting for."""
        if self._outcome.jobs == 0 and slurm_queue.count_queued_jobs(self._profile) == 0:
            raise SbatchError(error.message, SbatchOutcome.REFUSED, hint=error.hint) from error
        self._outcome.reason = error.message.splitlines()[0]
        return False

    def _chunk(self, array: JobArray, first: int, count: int) -> JobBatch:
        return JobBatch(
            array=array.number,
            first=first,
            count=count,
            name=self._record.chunk_name(array.number, first, count),
            lane=next_throttle_group(self._used_lanes, len(self._widths)) if self._widths else 0,
            is_array=array.jobs > 1,
        )

    def _options(self, chunk: JobBatch, partition: str | None) -> list[str]:
        drop = self._profile.request_of(partition).drop
        options = [f"--{name}={chunk.name}" for name in ("job-name", "comment") if name not in drop]
        if chunk.is_array:
            width = self._widths[chunk.lane] if self._widths else chunk.count
            options.append(f"--array=0-{chunk.count - 1}" + (f"%{width}" if width < chunk.count else ""))
        if chunk.lane in self._last_of_lane:
            options.append(f"--dependency=afterany:{self._last_of_lane[chunk.lane]}")
        return options

    def _count(self, chunk: JobBatch, job_id: str) -> None:
        self._outcome.jobs += chunk.count
        if self._widths:
            self._used_lanes.append(chunk.lane)
            self._last_of_lane[chunk.lane] = job_id
        if self._free is not None:
            self._free -= chunk.count

    def _finish(self, was_waiting: str) -> None:
        journal = read_journal(self._folder)
        rest = unsent_jobs(self._folder, self._record, journal)
        self._outcome.waiting = _count_jobs(rest)
        self._outcome.waiting += sum(chunk.count for chunk in journal.chunks if chunk.is_open)
        if self._outcome.reason != was_waiting:
            self._desk.writer.wait(self._outcome.reason)
