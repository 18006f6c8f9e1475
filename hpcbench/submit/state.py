"""The state of every run of a sweep: its result first, then the scheduler, then what its attempts left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.fileio import tail
from hpcbench.results.attempts import latest_attempt
from hpcbench.results.store import ClusterTree
from hpcbench.submit.local_queue import dropped_runs, queue_process
from hpcbench.submit.scheduler import job_states
from hpcbench.submit.submission import Submission, job_log, submissions_of

ACTIVE = frozenset({"waiting", "pending", "running"})
"""States of runs that somebody is taking care of."""
_JUST_SUBMITTED_S = 30.0
"""For this long a job that no command of the scheduler knows is taken to be on its way."""


@dataclass(frozen=True)
class RunState:
    """``planned, waiting, pending, running, lost`` or a result's status, and the reason in words."""

    state: str
    reason: str = ""
    submission: str | None = None
    job_id: str | None = None


@dataclass(frozen=True)
class _Ticket:
    """Where a run was submitted last."""

    folder: Path
    record: Submission
    number: int
    job_id: str | None

    def last_words(self) -> str:
        """The last line that the job's script said itself, to be put behind a reason."""
        if self.job_id is None and self.record.scheduler != "local":
            return ""
        log = job_log(self.folder, self.record, self.number, self.job_id) if self.job_id else self.folder / "queue.log"
        lines = tail(log).strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""


def run_states(
    tree: ClusterTree, run_ids: Iterable[str], profile: ClusterProfile, now_unix_s: float
) -> dict[str, RunState]:
    """The state of each run. A scheduler that does not answer leaves its runs ``waiting``, with the reason."""
    wanted = list(run_ids)
    states: dict[str, RunState] = {}
    for run_id in wanted:
        status = result_state(tree, run_id)
        if status is not None:
            states[run_id] = status
    open_runs = [run_id for run_id in wanted if run_id not in states]
    tickets = _tickets(tree, set(wanted))
    open_runs += [key for key, state in states.items() if state.state != "ok" and key in tickets]
    answers = _ask(tickets, open_runs, profile)
    for run_id in open_runs:
        ticket = tickets.get(run_id)
        found = _open_state(run_id, ticket, answers, now_unix_s) if ticket else RunState("planned")
        if run_id not in states or (found.state in ACTIVE and _is_newer(tree, run_id, found)):
            states[run_id] = found
    return {run_id: states[run_id] for run_id in wanted}


def result_state(tree: ClusterTree, run_id: str) -> RunState | None:
    """What a run's result says; ``None`` without one; ``lost`` where its file is broken."""
    try:
        result = tree.read_result(run_id)
    except msgspec.MsgspecError as error:
        return RunState("lost", f"result.json is broken: {error}")
    if result is None:
        return None
    return RunState(result.status, result.error.message if result.error else "")


def _tickets(tree: ClusterTree, wanted: set[str]) -> dict[str, _Ticket]:
    """Per run its newest submission."""
    tickets: dict[str, _Ticket] = {}
    for folder, record in submissions_of(tree):
        for array in record.arrays:
            for index, run_id in enumerate(array.run_ids):
                if run_id in wanted:
                    job_id = array.job_ids[index] if index < len(array.job_ids) else None
                    tickets[run_id] = _Ticket(folder, record, array.number, job_id)
    return tickets


def _ask(
    tickets: dict[str, _Ticket], open_runs: list[str], profile: ClusterProfile
) -> dict[str, tuple[str, str]] | SubmitError:
    asked = [
        tickets[run_id] for run_id in open_runs if run_id in tickets and tickets[run_id].record.scheduler == "slurm"
    ]
    job_ids = {ticket.job_id for ticket in asked if ticket.job_id}
    if not job_ids:
        return {}
    try:
        return job_states(job_ids, profile, min(ticket.record.created_unix_s for ticket in asked))
    except SubmitError as error:
        return error


def _open_state(
    run_id: str,
    ticket: _Ticket,
    answers: dict[str, tuple[str, str]] | SubmitError,
    now_unix_s: float,
) -> RunState:
    name = ticket.record.submission
    if ticket.record.scheduler == "local":
        return _local_state(run_id, ticket)
    age_s = now_unix_s - ticket.record.created_unix_s
    if ticket.job_id is None:
        if age_s < _JUST_SUBMITTED_S:
            return RunState("waiting", "being submitted", name)
        return RunState("lost", "its submission ended before sbatch answered", name)
    if isinstance(answers, SubmitError):
        return RunState("waiting", answers.message, name, ticket.job_id)
    if ticket.job_id in answers:
        state, reason = answers[ticket.job_id]
        if state not in ACTIVE:
            reason = f"{reason}, no result was left{ticket.last_words()}"
        return RunState(state, reason, name, ticket.job_id)
    if age_s < _JUST_SUBMITTED_S:
        return RunState("pending", "the scheduler does not list it yet", name, ticket.job_id)
    reason = f"job {ticket.job_id} is unknown to the scheduler and left no result{ticket.last_words()}"
    return RunState("lost", reason, name, ticket.job_id)


def _local_state(run_id: str, ticket: _Ticket) -> RunState:
    name = ticket.record.submission
    if not ticket.job_id and run_id in dropped_runs(ticket.folder):
        return RunState("planned", "cancelled before it began", name)
    alive = queue_process(ticket.folder) is not None
    if alive:
        state = "running" if ticket.job_id else "pending"
        return RunState(state, "", name, ticket.job_id)
    reason = "its job ended without a result" if ticket.job_id else "its queue ended before it began"
    reason += ticket.last_words()
    return RunState("lost", reason, name, ticket.job_id)


def _is_newer(tree: ClusterTree, run_id: str, found: RunState) -> bool:
    """Whether an active submission will replace the result that is there: it has begun no attempt, or a later one."""
    result = tree.read_result(run_id)
    attempt = latest_attempt(tree.run_folder(run_id))
    if result is None or attempt is None:
        return True
    marker = attempt.start_marker()
    own = marker is not None and marker.task_file is not None and found.submission == Path(marker.task_file).parent.name
    return attempt.number > result.attempt or not own
