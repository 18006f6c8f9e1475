"""Hand a submission's jobs to SLURM: in as large arrays as it takes, within its limits, each job once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.results.store import ClusterTree
from hpcbench.submit import scheduler
from hpcbench.submit.answers import Answer
from hpcbench.submit.executor import SbatchError, check_parameters
from hpcbench.submit.journal import Chunk, Journal, dropped_runs, read_journal
from hpcbench.submit.lanes import cut, lane_widths, next_lane
from hpcbench.submit.lock import LockHeldError, exclusive
from hpcbench.submit.offer import Desk, Tell
from hpcbench.submit.submission_record import Array, Submission

Ranges = list[tuple[int, int]]
"""First number and count of consecutive jobs of an array."""


@dataclass
class Sent:
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


def send(folder: Path, record: Submission, profile: ClusterProfile, tree: ClusterTree, tell: Tell) -> Sent:
    """Offer the scheduler everything of a submission that it has not taken yet. One process at a time does so."""
    try:
        with exclusive(folder / ".sending") as lock:
            return _Sender(folder, record, profile, Desk(folder, record, profile, tree, lock), tell).send()
    except LockHeldError as held:
        return Sent(waiting=_count(unsent(folder, record, read_journal(folder))), reason=held.message)


def unsent(folder: Path, record: Submission, journal: Journal) -> dict[int, Ranges]:
    """Per array the jobs that no call of sbatch was about, without those all of whose runs were struck."""
    dropped = dropped_runs(folder)
    return {array.number: _without(array, dropped, journal.unsent(array.number, array.jobs)) for array in record.arrays}


def _without(array: Array, dropped: set[str], ranges: Ranges) -> Ranges:
    if not dropped:
        return ranges
    kept: Ranges = []
    for first, count in ranges:
        for job in range(first, first + count):
            if dropped.issuperset(array.runs_of(job)):
                continue
            if kept and sum(kept[-1]) == job:
                kept[-1] = (kept[-1][0], kept[-1][1] + 1)
            else:
                kept.append((job, 1))
    return kept


def _count(jobs: dict[int, Ranges]) -> int:
    return sum(count for ranges in jobs.values() for _, count in ranges)


class _Sender:
    """One process's part in sending a submission."""

    def __init__(self, folder: Path, record: Submission, profile: ClusterProfile, desk: Desk, tell: Tell) -> None:
        self._folder, self._record, self._profile, self._desk, self._tell = folder, record, profile, desk, tell
        self._outcome = Sent()
        self._largest = 1
        self._widths: list[int] = []
        self._used_lanes: list[int] = []
        self._last_of_lane: dict[int, str] = {}
        self._free: int | None = None

    def send(self) -> Sent:
        journal = read_journal(self._folder)
        try:
            for chunk in journal.chunks:
                if chunk.is_open:
                    self._desk.recover(chunk, self._tell)
            now = read_journal(self._folder)
            todo = unsent(self._folder, self._record, now)
            if any(todo.values()):
                self._prepare(now.chunks, todo)
                self._send_arrays(todo)
        except SubmitError as error:
            self._outcome.failed = error
            self._outcome.reason = error.message
        self._finish(journal.waiting)
        return self._outcome

    def _prepare(self, chunks: list[Chunk], todo: dict[int, Ranges]) -> None:
        scheduler.adopt(self._profile)
        if max(count for ranges in todo.values() for _, count in ranges) > 1:
            self._largest = self._desk.ask(lambda: scheduler.max_array_size(self._profile), self._tell)
        if self._record.max_running_jobs is not None:
            arrays = cut((array.jobs for array in self._record.arrays), self._largest)
            self._widths = lane_widths(self._record.max_running_jobs, arrays)
            self._take_up_lanes([chunk for chunk in chunks if chunk.job_id is not None])
        limit = self._limit()
        if limit is not None:
            queued = scheduler.queued_jobs(self._profile)
            self._free = None if queued is None else max(0, limit - queued)

    def _limit(self) -> int | None:
        """Jobs that may be submitted: the least of the cluster's and of the partitions' that this is about."""
        partitions = (self._profile.partition(array.partition).max_submitted_jobs for array in self._record.arrays)
        limits = (self._profile.scheduler.max_submitted_jobs, *partitions)
        return min((limit for limit in limits if limit is not None), default=None)

    def _take_up_lanes(self, sent: list[Chunk]) -> None:
        """Go on where an earlier process stopped, without depending on a job that the scheduler may have forgotten."""
        last = {chunk.lane: chunk.job_id or "" for chunk in sent}
        queued = scheduler.queued_arrays(last.values(), self._profile) if last else set()
        self._last_of_lane = {lane: job_id for lane, job_id in last.items() if job_id in queued}
        self._used_lanes = [chunk.lane for chunk in sent]

    def _send_arrays(self, todo: dict[int, Ranges]) -> None:
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
                if error.answer is not Answer.REFUSED:
                    raise
                self._refuse(array, ranges)
                self._outcome.refused.append(error)

    def _refuse(self, array: Array, ranges: Ranges) -> None:
        """What is left of an array that the scheduler will not have belongs to no submission."""
        sent = [chunk for chunk in read_journal(self._folder).of(array.number) if chunk.job_id is not None]
        for first, count in ranges:
            done = sum(chunk.count for chunk in sent if first <= chunk.first < first + count)
            if done < count:
                self._desk.writer.note(Chunk(array=array.number, first=first + done, count=count - done, refused=True))

    def _check(self, array: Array) -> None:
        parameters = {
            "nodes": array.nodes,
            "ntasks_per_node": array.ranks // array.nodes,
            "time": max(1, int(array.job_limit_s // 60)),
            "account": self._profile.account,
        }
        check_parameters({key: value for key, value in parameters.items() if value is not None}, self._folder)

    def _send_range(self, array: Array, first: int, count: int) -> bool:
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
                if error.answer is not Answer.LIMIT:
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
        if self._outcome.jobs == 0 and scheduler.queued_jobs(self._profile) == 0:
            raise SbatchError(error.message, Answer.REFUSED, hint=error.hint) from error
        self._outcome.reason = error.message.splitlines()[0]
        return False

    def _chunk(self, array: Array, first: int, count: int) -> Chunk:
        return Chunk(
            array=array.number,
            first=first,
            count=count,
            name=self._record.chunk_name(array.number, first, count),
            lane=next_lane(self._used_lanes, len(self._widths)) if self._widths else 0,
            is_array=array.jobs > 1,
        )

    def _options(self, chunk: Chunk, partition: str | None) -> list[str]:
        drop = self._profile.request_of(partition).drop
        options = [f"--{name}={chunk.name}" for name in ("job-name", "comment") if name not in drop]
        if chunk.is_array:
            width = self._widths[chunk.lane] if self._widths else chunk.count
            options.append(f"--array=0-{chunk.count - 1}" + (f"%{width}" if width < chunk.count else ""))
        if chunk.lane in self._last_of_lane:
            options.append(f"--dependency=afterany:{self._last_of_lane[chunk.lane]}")
        return options

    def _count(self, chunk: Chunk, job_id: str) -> None:
        self._outcome.jobs += chunk.count
        if self._widths:
            self._used_lanes.append(chunk.lane)
            self._last_of_lane[chunk.lane] = job_id
        if self._free is not None:
            self._free -= chunk.count

    def _finish(self, was_waiting: str) -> None:
        journal = read_journal(self._folder)
        rest = unsent(self._folder, self._record, journal)
        self._outcome.waiting = _count(rest)
        self._outcome.waiting += sum(chunk.count for chunk in journal.chunks if chunk.is_open)
        if self._outcome.reason != was_waiting:
            self._desk.writer.wait(self._outcome.reason)
