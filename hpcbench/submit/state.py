"""The state of every run of a sweep: its result first, then the scheduler, then what its attempts left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from hpcbench.errors import SubmitError
from hpcbench.results.attempts import Attempt, latest_attempt
from hpcbench.results.schema import BROKEN, OK, ResultHead
from hpcbench.results.store import ClusterTree
from hpcbench.submit.address import Reachable
from hpcbench.submit.queue_state import queue_is_alive, was_started
from hpcbench.submit.scheduler import JobAnswer, QueueLook
from hpcbench.submit.tickets import Place, Ticket, find_places, tickets_of

ACTIVE = frozenset({"waiting", "pending", "running"})
"""States of runs that somebody is taking care of."""
_OPEN = ACTIVE | {"planned"}
_JUST_SUBMITTED_S = 30.0
"""For this long a job that no command of the scheduler knows is taken to be on its way."""
LATE_S = 60.0
"""A slow file system may show a result this long after its job has ended."""
LEASE_S = 7 * 86400.0
"""After this long a run of which nobody knows anything is anybody's again."""
_INTERRUPTED = frozenset({"preempted", "cancelled", "failed"})
"""What a run may have left before its job was put back into the queue."""
_NEVER_BEGAN = frozenset({"timeout", "preempted", "lost"})
"""How a job may end with runs of its pack that it never came to: they are still to be run."""


class RunState(msgspec.Struct, frozen=True, gc=False):
    """``planned, waiting, pending, running, lost`` or a result's status, and the reason in words."""

    state: str
    reason: str = ""
    submission: str | None = None
    job_id: str | None = None
    ended_unix_s: float | None = None
    """When its job ended, where that is all that is known: the run left no result itself."""
    ticket: Ticket | None = None


_PLANNED = RunState("planned")

Answers = Mapping[str, JobAnswer] | SubmitError


def run_states(
    tree: ClusterTree,
    run_ids: Collection[str],
    profile: Reachable,
    now_unix_s: float,
    stale: Collection[str] = (),
) -> dict[str, RunState]:
    """The state of each run. A scheduler that does not answer leaves its runs ``waiting``, with the reason.

    Results of ``stale`` runs do not count: they are to be measured anew.
    """
    heads = tree.heads(run_ids)
    left = [key for key in run_ids if key in stale or key not in heads or heads[key].status != OK]
    places = find_places(tree, left)
    if not heads and not places:
        return dict.fromkeys(run_ids, _PLANNED)
    question = QueueLook(_arrays_of(places), profile)
    tickets = {key: ticket for place in places for key, ticket in tickets_of(place)}
    look = _Look(tree, _ask(question, tickets), now_unix_s)
    states: dict[str, RunState] = {}
    for key in run_ids:
        head = heads.get(key)
        if key in stale and head is not None and head.status == OK:
            head = None
        ticket = tickets.get(key)
        found = look.state(key, ticket, is_absent=head is None) if ticket else _PLANNED
        if head is None and found.state not in _OPEN and key not in stale:
            # It may have left its result since the tree was looked at.
            head = tree.head(key)
        if head is None:
            states[key] = _unless_stale(key, found, stale)
        elif found.state in ACTIVE and ticket is not None and _is_newer(tree, key, head, found, ticket):
            states[key] = found
        else:
            states[key] = _of_head(head)
    return states


def _arrays_of(places: Iterable[Place]) -> set[str]:
    """The numbers of the jobs that a scheduler has taken."""
    return {
        chunk.job_id
        for place in places
        if place.record.scheduler == "slurm"
        for chunk in place.journal.chunks
        if chunk.job_id is not None
    }


def _unless_stale(run_id: str, found: RunState, stale: Collection[str]) -> RunState:
    """A stale run's old job has ended long ago; only an active one is measuring it anew."""
    return _PLANNED if run_id in stale and found.state not in ACTIVE else found


def _of_head(head: ResultHead) -> RunState:
    if head.status == BROKEN:
        return RunState("lost", f"result.json is broken: {head.message}")
    return RunState(head.status, head.message)


def _ask(question: QueueLook, tickets: Mapping[str, Ticket]) -> Answers:
    asked = [ticket for ticket in tickets.values() if ticket.job_id and ticket.record.scheduler == "slurm"]
    try:
        since_unix_s = min((ticket.record.created_unix_s for ticket in asked), default=0.0)
        return question.job_states({ticket.job_id for ticket in asked if ticket.job_id}, since_unix_s)
    except SubmitError as error:
        return error


class _Look:
    """One look at runs that have a place in a submission."""

    def __init__(self, tree: ClusterTree, answers: Answers, now_unix_s: float) -> None:
        self.tree, self.answers, self.now_unix_s = tree, answers, now_unix_s
        self._queues: dict[Path, tuple[bool, bool]] = {}
        """Of local submissions: whether their queue was ever started, and whether it lives."""

    def state(self, run_id: str, ticket: Ticket, *, is_absent: bool) -> RunState:
        """``is_absent``: the run has no result, not even a broken one."""
        if ticket.is_dropped and not self._attempt(run_id, ticket):
            return _found(ticket, "planned", "cancelled before it began")
        if ticket.record.scheduler == "local":
            return self._local(run_id, ticket)
        if ticket.job_id is None:
            return _unsent(ticket)
        if isinstance(self.answers, SubmitError):
            return _found(ticket, "waiting", self.answers.message)
        answer = self.answers.get(ticket.job_id)
        # A number that has begun anew belongs to somebody else's job.
        if answer is None or (answer.name != ticket.job_name and answer.name.startswith("hpcbench-")):
            return self._unknown(run_id, ticket)
        if answer.state == "running" and ticket.array.pack > 1 and not self._attempt(run_id, ticket):
            return _found(ticket, "pending", f"its job {ticket.job_id} comes to it later")
        if answer.state in ACTIVE:
            return _found(ticket, answer.state, answer.reason)
        if is_absent and self._is_late(run_id, ticket, answer):
            return _found(ticket, "running", "its job has ended, its result is not to be seen yet")
        return self._ended(run_id, ticket, answer)

    def _is_late(self, run_id: str, ticket: Ticket, answer: JobAnswer) -> bool:
        """Whether a job that ended well a moment ago may have left a result that cannot be seen yet."""
        ended_well = answer.state == "lost" and self.now_unix_s - (answer.ended_unix_s or 0.0) < LATE_S
        return ended_well and self._attempt(run_id, ticket) is not None

    def _ended(self, run_id: str, ticket: Ticket, answer: JobAnswer) -> RunState:
        if ticket.array.pack > 1 and answer.state in _NEVER_BEGAN and not self._attempt(run_id, ticket):
            return _found(ticket, "planned", f"its job ended ({answer.reason}) before it began")
        reason = f"{answer.reason}, no result was left{ticket.last_words()}"
        return _found(ticket, answer.state, reason, answer.ended_unix_s)

    def _unknown(self, run_id: str, ticket: Ticket) -> RunState:
        age_s = self.now_unix_s - ticket.record.created_unix_s
        if age_s < _JUST_SUBMITTED_S:
            return _found(ticket, "pending", "the scheduler does not list it yet")
        if ticket.array.pack > 1 and not self._attempt(run_id, ticket) and self._job_began(ticket):
            return _found(ticket, "planned", f"its job {ticket.job_id} ended before it began")
        reason = f"job {ticket.job_id} is unknown to the scheduler and left no result{ticket.last_words()}"
        attempt = self._attempt(run_id, ticket)
        marker = attempt.start_marker() if attempt else None
        since = max(ticket.record.created_unix_s, marker.started_unix_s if marker else 0.0)
        if self.now_unix_s - since > LEASE_S + ticket.array.job_limit_s:
            return _found(ticket, "planned", f"{reason}; its lease has passed")
        return _found(ticket, "lost", reason)

    def _local(self, run_id: str, ticket: Ticket) -> RunState:
        if ticket.folder not in self._queues:
            self._queues[ticket.folder] = (was_started(ticket.folder), queue_is_alive(ticket.folder))
        started, alive = self._queues[ticket.folder]
        if not started:
            return _found(ticket, "waiting", "not started yet; the next submit starts it")
        begun = ticket.job_id is not None and (ticket.array.pack == 1 or self._attempt(run_id, ticket) is not None)
        if alive:
            return _found(ticket, "running" if begun else "pending", "")
        if not begun:
            return _found(ticket, "planned", "its queue ended before it began" + ticket.last_words())
        return _found(ticket, "lost", "its job ended without a result" + ticket.last_words())

    def _attempt(self, run_id: str, ticket: Ticket) -> Attempt | None:
        """The newest attempt, if a job of this submission began it."""
        attempt = latest_attempt(self.tree.run_folder(run_id))
        marker = attempt.start_marker() if attempt else None
        return attempt if marker is not None and marker.is_of(ticket.record.submission) else None

    def _job_began(self, ticket: Ticket) -> bool:
        """Whether the job, of which the scheduler knows no more, has begun any of its runs."""
        return any(self._attempt(run_id, ticket) for run_id in ticket.array.runs_of(ticket.number))


def _unsent(ticket: Ticket) -> RunState:
    reason = ticket.waiting or ("its sbatch was not heard to answer" if ticket.is_open else "not sent yet")
    return _found(ticket, "waiting", f"{reason}; the next submit sends it")


def _found(ticket: Ticket, state: str, reason: str, ended_unix_s: float | None = None) -> RunState:
    return RunState(state, reason, ticket.record.submission, ticket.job_id, ended_unix_s, ticket)


def _is_newer(tree: ClusterTree, run_id: str, head: ResultHead, found: RunState, ticket: Ticket) -> bool:
    """Whether an active submission will replace the result that is there.

    It will where it has begun no attempt, or a later one, or where its job was put back into the queue: what that one
    left then tells nothing, nor does it while the job is running, for that may be the first run or the second.
    """
    attempt = latest_attempt(tree.run_folder(run_id))
    marker = attempt.start_marker() if attempt else None
    if attempt is None or marker is None or not marker.is_of(ticket.record.submission):
        return not ticket.is_dropped
    if attempt.number > head.attempt:
        return True
    if head.status == "preempted":
        return True
    is_alone = ticket.array.pack == 1 and ticket.record.scheduler == "slurm"
    return is_alone and found.state in ("pending", "running") and head.status in _INTERRUPTED


def counts(states: Mapping[str, RunState]) -> dict[str, int]:
    """How many runs are in each state."""
    return dict(sorted(Counter(state.state for state in states.values()).items()))
