"""Submission of jobs to SLURM: in the largest arrays that its limits allow, each job once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.batches import (
    Throttle,
    batch_options,
    new_batch,
    split_arrays,
    throttle_group_sizes,
    throttle_scopes,
)
from hpcbench.submit.journal import JobBatch, Journal, read_journal
from hpcbench.submit.lock import LockHeldError, exclusive_lock
from hpcbench.submit.sbatch import JobSubmitter, SbatchError, check_job_parameters
from hpcbench.submit.scheduler import Notify, SchedulerLimits, SendOutcome
from hpcbench.submit.slurm_queue import SbatchOutcome, count_queued_jobs, queued_job_numbers, scheduler_cluster
from hpcbench.submit.submission_record import JobArray, Submission

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
        self._scopes: dict[str | None, tuple[str, int]] = {}
        self._throttles: dict[str, Throttle] = {}

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
                self._make_throttles(recovered)
                self._send_arrays(unsent)
        except SubmitError as error:
            self._outcome.failed = error
            self._outcome.reason = error.message
        self._finish(journal.waiting)
        return self._outcome

    def _make_throttles(self, journal: Journal) -> None:
        """The groups as an earlier process left them; a job that the scheduler has forgotten is no dependency."""
        partitions = {array.partition: array.max_running_jobs for array in self._record.arrays}
        self._scopes = throttle_scopes(self._record.max_running_jobs, partitions)
        for scope, limit in set(self._scopes.values()):
            arrays = [array for array in self._record.arrays if self._scope_of(array.number) == scope]
            sizes = split_arrays((array.jobs for array in arrays), self._limits.max_array_size)
            sent = [batch for batch in journal.batches if batch.is_sent and self._scope_of(batch.array) == scope]
            newest = {batch.group: batch for batch in sent}
            queued = {
                cluster: queued_job_numbers(
                    [batch.job_id for batch in newest.values() if batch.job_id and batch.job_cluster == cluster],
                    self._profile,
                    cluster,
                )
                for cluster in {batch.job_cluster for batch in newest.values()}
            }
            last_job = {
                group: batch.job_id
                for group, batch in newest.items()
                if batch.job_id and batch.job_id in queued[batch.job_cluster]
            }
            groups = throttle_group_sizes(limit, sizes)
            self._throttles[scope] = Throttle(groups, [batch.group for batch in sent], last_job)

    def _scope_of(self, array: int) -> str | None:
        return self._scopes.get(self._record.arrays[array].partition, (None, 0))[0]

    def _throttle_of(self, array: int) -> Throttle:
        scope = self._scope_of(array)
        return Throttle() if scope is None else self._throttles[scope]

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
            limit = self._limits.tightest(array.partition)
            if limit is not None:
                size = min(size, limit.free)
                if size <= 0:
                    self._outcome.reason = f"the profile allows {limit.most} submitted jobs {limit.of}".rstrip()
                    return False
            throttle = self._throttle_of(array.number)
            group = throttle.next_group()
            batch = new_batch(self._folder, self._record, array, first, size, self._profile, group)
            options = batch_options(batch, self._record, self._profile, throttle)
            try:
                job_id = self._submitter.submit(batch, options, self._notify)
            except SbatchError as error:
                if error.outcome is not SbatchOutcome.LIMIT:
                    raise
                if size == 1:
                    return self._wait_for_limit(error, scheduler_cluster(self._profile, array.partition))
                size //= 2
                continue
            self._outcome.jobs += size
            throttle.add(batch.group, job_id)
            self._limits = self._limits.after(array.partition, size)
            first += size
        return True

    def _wait_for_limit(self, error: SbatchError, cluster: str) -> bool:
        """A single job is over a limit. It waits, unless nothing is queued whose end it could wait for."""
        queued = count_queued_jobs(self._profile, cluster)
        if self._outcome.jobs == 0 and queued is not None and not queued.total():
            raise SbatchError(error.message, SbatchOutcome.REFUSED, hint=error.hint) from error
        self._outcome.reason = error.message.splitlines()[0]
        return False

    def _finish(self, was_waiting: str) -> None:
        journal = read_journal(self._folder)
        if journal.doubtful and self._outcome.jobs:
            self._submitter.cancel_surplus(journal, self._notify)
        self._outcome.waiting = _count_jobs(unsent_jobs(self._record, journal))
        self._outcome.waiting += sum(batch.count for batch in journal.batches if batch.is_unanswered)
        if self._outcome.reason != was_waiting:
            self._submitter.writer.record_waiting(self._outcome.reason)
