"""The state of every run: from its result, else from the scheduler, else from its attempts and its newest submission.

Failures that only the scheduler reports are recorded as results."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from hpcbench.config.run_spec import read_task
from hpcbench.errors import HpcbenchError, SubmitError
from hpcbench.fileio import read_tail
from hpcbench.results.attempts import Attempt, latest_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK, STATUSES, FailureRecord, ResultSummary, RunResult
from hpcbench.submit.journal import JobBatch, Journal, read_dropped_runs, read_journal
from hpcbench.submit.local_scheduler import is_queue_alive, queue_was_started
from hpcbench.submit.scheduler_settings import HasSchedulerSettings
from hpcbench.submit.slurm_queue import JobStatus, QueueQuery
from hpcbench.submit.submission_record import JobArray, Submission, job_log_path, list_submissions


class SubmittedRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run's place in its newest submission."""

    folder: Path
    record: Submission
    array: JobArray
    index: int
    """Line of the task file."""
    job_id: str | None = None
    """The scheduler's, once it has taken the job."""
    job_name: str = ""
    is_dropped: bool = False
    """It was struck from the submission."""
    is_open: bool = False
    """sbatch was called and its answer is not known."""
    waiting: str = ""
    """Why the submission's rest is not sent."""

    @property
    def number(self) -> int:
        """The job of the array that carries the run."""
        return self.index // self.array.pack

    def job_log(self) -> Path | None:
        """What the job's script said itself."""
        return job_log_path(self.folder, self.record, self.array.number, self.job_id) if self.job_id else None

    def last_words(self) -> str:
        """The last line that the job's script, or the queue before it, said; to be put behind a reason."""
        log = self.job_log()
        if log is None and self.record.scheduler == "local":
            log = self.folder / "queue.log"
        lines = read_tail(log).strip().splitlines() if log else []
        return f": {lines[-1].strip()}" if lines else ""


class SubmissionMatch(msgspec.Struct, frozen=True, gc=False):
    """A submission that some runs were submitted with last."""

    folder: Path
    record: Submission
    journal: Journal
    run_ids: set[str]


def find_submissions(tree: ClusterTree, wanted: Iterable[str]) -> list[SubmissionMatch]:
    """The submissions that ``wanted`` runs were submitted with last, the newest first, and no older ones than it takes.

    Runs that a scheduler refused belong to no submission.
    """
    left = set(wanted)
    places: list[SubmissionMatch] = []
    for folder, record in reversed(list_submissions(tree)) if left else ():
        found = {run_id for array in record.arrays for run_id in left.intersection(array.run_ids)}
        if not found:
            continue
        journal = read_journal(folder)
        found -= _refused_runs(record, journal)
        places.append(SubmissionMatch(folder, record, journal, found))
        left -= found
        if not left:
            break
    return places


def _refused_runs(record: Submission, journal: Journal) -> set[str]:
    refused: set[str] = set()
    for chunk in journal.chunks:
        if chunk.refused:
            array = record.arrays[chunk.array]
            refused.update(array.run_ids[chunk.first * array.pack : (chunk.first + chunk.count) * array.pack])
    return refused


def find_submitted_runs(tree: ClusterTree, wanted: Iterable[str]) -> dict[str, SubmittedRun]:
    """Per run its newest submission; runs that a scheduler refused there belong to none."""
    return {run_id: ticket for place in find_submissions(tree, wanted) for run_id, ticket in submitted_runs_of(place)}


def submitted_runs_of(place: SubmissionMatch) -> Iterator[tuple[str, SubmittedRun]]:
    """The tickets of the runs that were submitted last with one submission."""
    folder, record, journal, wanted = place.folder, place.record, place.journal, place.run_ids
    dropped = read_dropped_runs(folder)
    for array in record.arrays:
        chunks = _batches_by_job(journal, array)
        for index, run_id in enumerate(array.run_ids):
            if run_id not in wanted:
                continue
            job = index // array.pack
            chunk = chunks[job]
            is_sent = chunk is not None and chunk.job_id is not None
            yield (
                run_id,
                SubmittedRun(
                    folder=folder,
                    record=record,
                    array=array,
                    index=index,
                    job_id=chunk.job_of(job) if chunk is not None and is_sent else None,
                    job_name=chunk.name if chunk is not None else "",
                    is_dropped=run_id in dropped,
                    is_open=chunk is not None and not is_sent,
                    waiting=journal.waiting,
                ),
            )


def _batches_by_job(journal: Journal, array: JobArray) -> list[JobBatch | None]:
    """Per job of an array the chunk that it was sent with."""
    found: list[JobBatch | None] = [None] * array.jobs
    for chunk in journal.of(array.number):
        last = min(chunk.first + chunk.count, array.jobs)
        found[chunk.first : last] = [chunk] * (last - chunk.first)
    return found


ACTIVE_STATES = frozenset({"waiting", "pending", "running"})
"""States of runs that somebody is taking care of."""
_OPEN_STATES = ACTIVE_STATES | {"planned"}
_REGISTRATION_DELAY_S = 30.0
"""For this long a job that no command of the scheduler knows is taken to be on its way."""
RESULT_DELAY_S = 60.0
"""A slow file system may show a result this long after its job has ended."""
RUN_LEASE_S = 7 * 86400.0
"""After this long a run of which nobody knows anything is anybody's again."""
_INTERRUPTED_STATUSES = frozenset({"preempted", "cancelled", "failed"})
"""What a run may have left before its job was put back into the queue."""
_ENDED_BEFORE_RUN = frozenset({"timeout", "preempted", "lost"})
"""How a job may end with runs of its pack that it never came to: they are still to be run."""


class RunState(msgspec.Struct, frozen=True, gc=False):
    """``planned, waiting, pending, running, lost`` or a result's status, and the reason in words."""

    state: str
    reason: str = ""
    submission: str | None = None
    job_id: str | None = None
    ended_unix_s: float | None = None
    """When its job ended, where that is all that is known: the run left no result itself."""
    ticket: SubmittedRun | None = None


_PLANNED_STATE = RunState("planned")

SchedulerReply = Mapping[str, JobStatus] | SubmitError


def run_states(
    tree: ClusterTree,
    run_ids: Collection[str],
    profile: HasSchedulerSettings,
    now_unix_s: float,
    stale: Collection[str] = (),
) -> dict[str, RunState]:
    """The state of each run. A scheduler that does not answer leaves its runs ``waiting``, with the reason.

    Results of ``stale`` runs do not count: they are to be measured anew.
    """
    heads = tree.summaries(run_ids)
    left = [key for key in run_ids if key in stale or key not in heads or heads[key].status != STATUS_OK]
    places = find_submissions(tree, left)
    if not heads and not places:
        return dict.fromkeys(run_ids, _PLANNED_STATE)
    question = QueueQuery(_slurm_job_ids(places), profile)
    tickets = {key: ticket for place in places for key, ticket in submitted_runs_of(place)}
    look = _StateResolver(tree, _query_scheduler(question, tickets), now_unix_s)
    states: dict[str, RunState] = {}
    for key in run_ids:
        head = heads.get(key)
        if key in stale and head is not None and head.status == STATUS_OK:
            head = None
        ticket = tickets.get(key)
        found = look.state(key, ticket, is_absent=head is None) if ticket else _PLANNED_STATE
        if head is None and found.state not in _OPEN_STATES and key not in stale:
            # It may have left its result since the tree was looked at.
            head = tree.summary(key)
        if head is None:
            states[key] = _ignore_if_stale(key, found, stale)
        elif (
            found.state in ACTIVE_STATES and ticket is not None and _will_replace_result(tree, key, head, found, ticket)
        ):
            states[key] = found
        else:
            states[key] = _state_from_result(head)
    return states


def _slurm_job_ids(places: Iterable[SubmissionMatch]) -> set[str]:
    """The numbers of the jobs that a scheduler has taken."""
    return {
        chunk.job_id
        for place in places
        if place.record.scheduler == "slurm"
        for chunk in place.journal.chunks
        if chunk.job_id is not None
    }


def _ignore_if_stale(run_id: str, found: RunState, stale: Collection[str]) -> RunState:
    """A stale run's old job has ended long ago; only an active one is measuring it anew."""
    return _PLANNED_STATE if run_id in stale and found.state not in ACTIVE_STATES else found


def _state_from_result(head: ResultSummary) -> RunState:
    if head.status == STATUS_BROKEN:
        return RunState("lost", f"result.json is broken: {head.message}")
    return RunState(head.status, head.message)


def _query_scheduler(question: QueueQuery, tickets: Mapping[str, SubmittedRun]) -> SchedulerReply:
    asked = [ticket for ticket in tickets.values() if ticket.job_id and ticket.record.scheduler == "slurm"]
    try:
        since_unix_s = min((ticket.record.created_unix_s for ticket in asked), default=0.0)
        return question.job_states({ticket.job_id for ticket in asked if ticket.job_id}, since_unix_s)
    except SubmitError as error:
        return error


class _StateResolver:
    """One look at runs that have a place in a submission."""

    def __init__(self, tree: ClusterTree, answers: SchedulerReply, now_unix_s: float) -> None:
        self.tree, self.answers, self.now_unix_s = tree, answers, now_unix_s
        self._queues: dict[Path, tuple[bool, bool]] = {}
        """Of local submissions: whether their queue was ever started, and whether it lives."""

    def state(self, run_id: str, ticket: SubmittedRun, *, is_absent: bool) -> RunState:
        """``is_absent``: the run has no result, not even a broken one."""
        if ticket.is_dropped and not self._attempt(run_id, ticket):
            return _make_state(ticket, "planned", "cancelled before it began")
        if ticket.record.scheduler == "local":
            return self._local(run_id, ticket)
        if ticket.job_id is None:
            return _unsent_state(ticket)
        if isinstance(self.answers, SubmitError):
            return _make_state(ticket, "waiting", self.answers.message)
        answer = self.answers.get(ticket.job_id)
        # A number that has begun anew belongs to somebody else's job.
        if answer is None or (answer.name != ticket.job_name and answer.name.startswith("hpcbench-")):
            return self._unknown(run_id, ticket)
        if answer.state == "running" and ticket.array.pack > 1 and not self._attempt(run_id, ticket):
            return _make_state(ticket, "pending", f"its job {ticket.job_id} comes to it later")
        if answer.state in ACTIVE_STATES:
            return _make_state(ticket, answer.state, answer.reason)
        if is_absent and self._is_late(run_id, ticket, answer):
            return _make_state(ticket, "running", "its job has ended, its result is not to be seen yet")
        return self._ended(run_id, ticket, answer)

    def _is_late(self, run_id: str, ticket: SubmittedRun, answer: JobStatus) -> bool:
        """Whether a job that ended well a moment ago may have left a result that cannot be seen yet."""
        ended_well = answer.state == "lost" and self.now_unix_s - (answer.ended_unix_s or 0.0) < RESULT_DELAY_S
        return ended_well and self._attempt(run_id, ticket) is not None

    def _ended(self, run_id: str, ticket: SubmittedRun, answer: JobStatus) -> RunState:
        if ticket.array.pack > 1 and answer.state in _ENDED_BEFORE_RUN and not self._attempt(run_id, ticket):
            return _make_state(ticket, "planned", f"its job ended ({answer.reason}) before it began")
        reason = f"{answer.reason}, no result was left{ticket.last_words()}"
        return _make_state(ticket, answer.state, reason, answer.ended_unix_s)

    def _unknown(self, run_id: str, ticket: SubmittedRun) -> RunState:
        age_s = self.now_unix_s - ticket.record.created_unix_s
        if age_s < _REGISTRATION_DELAY_S:
            return _make_state(ticket, "pending", "the scheduler does not list it yet")
        if ticket.array.pack > 1 and not self._attempt(run_id, ticket) and self._job_began(ticket):
            return _make_state(ticket, "planned", f"its job {ticket.job_id} ended before it began")
        reason = f"job {ticket.job_id} is unknown to the scheduler and left no result{ticket.last_words()}"
        attempt = self._attempt(run_id, ticket)
        marker = attempt.read_start() if attempt else None
        since = max(ticket.record.created_unix_s, marker.started_unix_s if marker else 0.0)
        if self.now_unix_s - since > RUN_LEASE_S + ticket.array.job_limit_s:
            return _make_state(ticket, "planned", f"{reason}; its lease has passed")
        return _make_state(ticket, "lost", reason)

    def _local(self, run_id: str, ticket: SubmittedRun) -> RunState:
        if ticket.folder not in self._queues:
            self._queues[ticket.folder] = (queue_was_started(ticket.folder), is_queue_alive(ticket.folder))
        started, alive = self._queues[ticket.folder]
        if not started:
            return _make_state(ticket, "waiting", "not started yet; the next submit starts it")
        begun = ticket.job_id is not None and (ticket.array.pack == 1 or self._attempt(run_id, ticket) is not None)
        if alive:
            return _make_state(ticket, "running" if begun else "pending", "")
        if not begun:
            return _make_state(ticket, "planned", "its queue ended before it began" + ticket.last_words())
        return _make_state(ticket, "lost", "its job ended without a result" + ticket.last_words())

    def _attempt(self, run_id: str, ticket: SubmittedRun) -> Attempt | None:
        """The newest attempt, if a job of this submission began it."""
        attempt = latest_attempt(self.tree.run_folder(run_id))
        marker = attempt.read_start() if attempt else None
        return attempt if marker is not None and marker.belongs_to(ticket.record.submission) else None

    def _job_began(self, ticket: SubmittedRun) -> bool:
        """Whether the job, of which the scheduler knows no more, has begun any of its runs."""
        return any(self._attempt(run_id, ticket) for run_id in ticket.array.runs_of(ticket.number))


def _unsent_state(ticket: SubmittedRun) -> RunState:
    reason = ticket.waiting or ("its sbatch was not heard to answer" if ticket.is_open else "not sent yet")
    return _make_state(ticket, "waiting", f"{reason}; the next submit sends it")


def _make_state(ticket: SubmittedRun, state: str, reason: str, ended_unix_s: float | None = None) -> RunState:
    return RunState(state, reason, ticket.record.submission, ticket.job_id, ended_unix_s, ticket)


def _will_replace_result(
    tree: ClusterTree, run_id: str, head: ResultSummary, found: RunState, ticket: SubmittedRun
) -> bool:
    """Whether an active submission will replace the result that is there.

    It will where it has begun no attempt, or a later one, or where its job was put back into the queue: what that one
    left then tells nothing, nor does it while the job is running, for that may be the first run or the second.
    """
    attempt = latest_attempt(tree.run_folder(run_id))
    marker = attempt.read_start() if attempt else None
    if attempt is None or marker is None or not marker.belongs_to(ticket.record.submission):
        return not ticket.is_dropped
    if attempt.number > head.attempt:
        return True
    if head.status == "preempted":
        return True
    is_alone = ticket.array.pack == 1 and ticket.record.scheduler == "slurm"
    return is_alone and found.state in ("pending", "running") and head.status in _INTERRUPTED_STATUSES


def count_states(states: Mapping[str, RunState]) -> dict[str, int]:
    """How many runs are in each state."""
    return dict(sorted(Counter(state.state for state in states.values()).items()))


def record_scheduler_failures(tree: ClusterTree, states: Mapping[str, RunState]) -> list[str]:
    """Give every run whose job ended without leaving a result the one that the scheduler's word amounts to.

    Runs whose job ended a moment ago are left for later, and so are all where this user may not write.
    Returns the ``run_id``s that got a result. The scheduler forgets a job after a while; the tree does not.
    """
    settled = []
    for run_id, state in states.items():
        if state.ended_unix_s is None or state.state not in STATUSES or state.ticket is None:
            continue
        if time.time() - state.ended_unix_s < RESULT_DELAY_S:
            continue
        with contextlib.suppress(HpcbenchError):
            if tree.write_result(_scheduler_failure_result(tree, run_id, state)):
                settled.append(run_id)
    return settled


def _scheduler_failure_result(tree: ClusterTree, run_id: str, state: RunState) -> RunResult:
    ticket = state.ticket
    assert ticket is not None
    header, task = read_task(ticket.folder / f"{ticket.array.number}.jsonl", ticket.index)
    attempt = latest_attempt(tree.run_folder(run_id))
    return RunResult(
        run_id=run_id,
        config_id=task.config_id,
        attempt=attempt.number if attempt else 0,
        sweep=task.sweep,
        cluster=header.cluster,
        status=state.state,
        spec=task.spec,
        error=FailureRecord(type="SchedulerEnded", message=f"job {state.job_id}: {state.reason}"),
    )
