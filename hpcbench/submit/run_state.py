"""The state of every run: from its result, else from the scheduler, else from its attempts and its newest submission.

    result ok ------------------------------------------> its status
    result failed, no newer attempt under way ----------> its status
    in no submission, or removed before it began -------> planned
    in a submission, job not submitted yet -------------> waiting
    job known to the scheduler -------------------------> pending, running, or how the job ended
    job of another account that may not be seen --------> pending or running; lost past its time limit
    job unknown to squeue and sacct, no result ---------> lost
    another attempt of it is at work -------------------> running

Failures that only the scheduler reports are recorded as results. Cancelled runs keep their measurements; ``submit``
runs them again."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import read_task
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import printable_text, read_tail
from hpcbench.identity import account_name
from hpcbench.results.attempts import AttemptStart, latest_start
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK, STATUSES, FailureRecord, ResultSummary, RunResult
from hpcbench.submit.journal import drop_runs
from hpcbench.submit.scheduler import JobStatus, QueueTable
from hpcbench.submit.scheduler_registry import scheduler_class
from hpcbench.submit.submission_record import (
    SubmittedRun,
    find_submitted_runs,
    started_attempt,
)
from hpcbench.units import format_bytes

ACTIVE_STATES = frozenset({"waiting", "pending", "running"})
"""States of runs that a submission is taking care of."""
RUN_STATES = frozenset({*STATUSES, *ACTIVE_STATES, "planned", "lost"})
"""All states, as ``status --state`` takes them."""
_OPEN_STATES = ACTIVE_STATES | {"planned"}
_REGISTRATION_DELAY_S = 30.0
"""Seconds after a submission in which a job that the scheduler does not list counts as pending."""
RESULT_DELAY_S = 60.0
"""A slow file system may show a result this long after its job has ended."""
_HIDDEN_JOB_MARGIN_S = 86400.0
"""A hidden job that started this much longer ago than its time limit has ended; it may have been suspended."""
_INTERRUPTED_STATUSES = frozenset({"preempted", "cancelled", "failed"})
"""Results that a run may have left before its job was put back into the queue."""
_ENDED_BEFORE_RUN = frozenset({"timeout", "preempted", "lost"})
"""States of a job that has ended before it began all runs of its pack: the others are still to be run."""


class RunState(msgspec.Struct, frozen=True, gc=False):
    """``planned, waiting, pending, running, lost`` or a result's status, and the reason as text."""

    state: str
    reason: str = ""
    submission: str | None = None
    job_id: str | None = None
    ended_unix_s: float | None = None
    """The date of its result, or the end of its job if it left none; ``None`` if unknown."""
    submitted_run: SubmittedRun | None = None
    nodes: str | None = None
    """The nodes of its job, in the scheduler's notation, if the run failed and left no reason itself."""


_PLANNED_STATE = RunState("planned")


def run_states(
    tree: ClusterTree,
    run_ids: Collection[str],
    profile: ClusterProfile,
    now_unix_s: float,
    stale: Collection[str] = (),
    queue: QueueTable | None = None,
) -> dict[str, RunState]:
    """The state of each run, by ``run_id``.

    Args:
        tree: results and submissions of one cluster.
        profile: the settings of the cluster's scheduler. If it does not answer, its runs are ``waiting``, with the
            reason; nothing is raised.
        now_unix_s: the time that ages are measured at.
        stale: runs whose results do not count, because they are to be measured again.
        queue: the whole queue, if it has been read already.

    Raises:
        StorageError: a file of the tree cannot be read; whether its run is at work is not known then.
    """
    heads = tree.summaries(run_ids)
    unfinished = [key for key in run_ids if key in stale or key not in heads or heads[key].status != STATUS_OK]
    runs = find_submitted_runs(tree, unfinished)
    if not heads and not runs:
        return dict.fromkeys(run_ids, _PLANNED_STATE)
    resolver = _StateResolver(tree, _query_jobs(tree, runs, profile, queue), now_unix_s)
    states: dict[str, RunState] = {}
    for key in run_ids:
        head, run = heads.get(key), runs.get(key)
        if key in stale and head is not None and head.status == STATUS_OK:
            head = None
        state = resolver.state(key, run, has_result=head is not None) if run else _PLANNED_STATE
        if head is None and state.state not in _OPEN_STATES and key not in stale:
            # It may have left its result since the tree was read.
            head = tree.summary(key)
        is_active = state.state in ACTIVE_STATES
        is_refusable = head is None or head.status not in (STATUS_OK, "unsupported")
        if run is not None and not is_active and is_refusable and not run.started_attempt(tree):
            refusal = _read_refusal(run)
            # A result that is there is of an earlier submission.
            head, state = (None, refusal) if refusal else (head, state)
        if head is None:
            # The old job of a stale run ended long ago: only an active job measures it again.
            states[key] = _PLANNED_STATE if key in stale and not is_active else state
        elif is_active and run is not None and resolver.replaces_result(key, run, state, head):
            states[key] = state
        elif head.status == STATUS_BROKEN:
            states[key] = RunState("lost", f"result.json is broken: {head.message}")
        else:
            states[key] = RunState(head.status, head.message, ended_unix_s=head.ended_at_s, nodes=head.failed_on)
    return states | _attempts_at_work(tree, states, heads, profile)


def _attempts_at_work(
    tree: ClusterTree, states: Mapping[str, RunState], heads: Mapping[str, ResultSummary], profile: ClusterProfile
) -> dict[str, RunState]:
    """Return the runs whose newest attempt has no result and was started by another job than the one of their state.

    They are running while that job goes on.
    """
    starts: dict[str, tuple[AttemptStart, str]] = {}
    for key, state in states.items():
        ended = heads[key].attempt if key in heads else 0
        if state.state in ACTIVE_STATES or state.state == STATUS_OK:
            continue
        latest = latest_start(tree.run_folder(key))
        if latest and latest[0].number > ended and latest[1].job_id != (state.job_id or ""):
            batch = state.submitted_run.batch if state.submitted_run is not None else None
            starts[key] = latest[1], batch.job_cluster if batch is not None else ""
    at_work: dict[str, RunState] = {}
    for kind in ("slurm", "local") if starts else ():
        of_kind = {key: entry for key, entry in starts.items() if (entry[0].job_id is None) == (kind == "local")}
        try:
            reasons = scheduler_class(kind, tree.root.name)(profile).attempts_at_work(of_kind) if of_kind else {}
        except HpcbenchError as error:
            reasons = dict.fromkeys(of_kind, f"another attempt may be at work: {error.message}")
        for key, reason in reasons.items():
            at_work[key] = RunState("running", reason, states[key].submission, starts[key][0].job_id)
    return at_work


def _query_jobs(
    tree: ClusterTree, runs: Mapping[str, SubmittedRun], profile: ClusterProfile, queue: QueueTable | None
) -> dict[str, JobStatus]:
    """The statuses of the jobs of ``runs`` by one query for each kind of scheduler.

    Jobs of a scheduler that does not answer, or is unknown, are ``waiting``, with the reason.
    """
    by_kind: dict[str, dict[str, SubmittedRun]] = {}
    for key, run in runs.items():
        by_kind.setdefault(run.record.scheduler, {})[key] = run
    statuses: dict[str, JobStatus] = {}
    for kind, of_kind in by_kind.items():
        try:
            statuses |= scheduler_class(kind, tree.root.name)(profile).state(of_kind, queue)
        except HpcbenchError as error:
            statuses |= {key: JobStatus("waiting", error.message) for key, run in of_kind.items() if run.job_id}
    return statuses


class _StateResolver:
    """The states of runs that are in a submission, at one moment."""

    def __init__(self, tree: ClusterTree, statuses: Mapping[str, JobStatus], now_unix_s: float) -> None:
        self._tree, self._statuses, self._now_unix_s = tree, statuses, now_unix_s

    def state(self, run_id: str, run: SubmittedRun, *, has_result: bool) -> RunState:
        """The state of a run by its job. ``has_result``: even a broken one."""
        status = self._statuses.get(run_id)
        if run.is_dropped and not run.started_attempt(self._tree):
            return _make_state(run, "planned", "cancelled before it began, or its result was removed")
        if status is None and run.job_id is None:
            return _make_state(run, "waiting", _waiting_reason(run))
        if status is None:
            return self._unknown(run)
        if status.state == "hidden":
            return self._hidden(run, status.reason)
        return self._listed(run, status, has_result=has_result)

    def _listed(self, run: SubmittedRun, status: JobStatus, *, has_result: bool) -> RunState:
        """The state of a run whose job the scheduler lists."""
        is_packed = run.array.pack > 1
        if not is_packed and status.state in ACTIVE_STATES:
            # Most runs: their files need not be read.
            return _make_state(run, status.state, status.reason)
        attempt = run.started_attempt(self._tree)
        if status.state == "running" and is_packed and not attempt:
            return _make_state(run, "pending", f"its job {run.job_id} comes to it later")
        if status.state in ACTIVE_STATES:
            return _make_state(run, status.state, status.reason)
        if status.state == "planned":
            return _make_state(run, "planned", status.reason + _last_log_line(run))
        ended_now = status.state == "lost" and self._now_unix_s - (status.ended_unix_s or 0.0) < RESULT_DELAY_S
        if ended_now and not has_result and attempt:
            return _make_state(run, "running", "its job has ended, its result is not to be seen yet")
        if is_packed and status.state in _ENDED_BEFORE_RUN and not attempt:
            return _make_state(run, "planned", f"its job ended ({status.reason}) before it began")
        nodes = f" on {status.nodes}" if status.nodes else ""
        reason = f"{status.reason}{nodes}, no result was left{_last_log_line(run)}"
        if run.is_dropped:
            return _make_state(run, "cancelled", f"cancelled; its job: {reason}", status.ended_unix_s, status.nodes)
        return _make_state(run, status.state, reason, status.ended_unix_s, status.nodes)

    def _unknown(self, run: SubmittedRun) -> RunState:
        """The state of a run whose job the scheduler does not list, or no longer."""
        if abs(self._now_unix_s - run.record.created_unix_s) < _REGISTRATION_DELAY_S:
            return _make_state(run, "pending", "the scheduler does not list it yet")
        attempt = run.started_attempt(self._tree)
        job_runs = run.array.runs_of(run.number)
        job_began = any(started_attempt(self._tree, run_id, run.record.submission) for run_id in job_runs)
        if run.array.pack > 1 and not attempt and job_began:
            return _make_state(run, "planned", f"its job {run.job_id} ended before it began")
        reason = f"job {run.job_id} is unknown to the scheduler and left no result{_last_log_line(run)}"
        return _make_state(run, "cancelled" if run.is_dropped else "lost", reason)

    def _hidden(self, run: SubmittedRun, reason: str) -> RunState:
        """The state of a run whose job this account may not see: only its files can show that it has ended."""
        attempt = run.started_attempt(self._tree)
        if attempt is None:
            return _make_state(run, "pending", reason)
        age_s = self._now_unix_s - attempt[1].started_unix_s
        if age_s > run.array.job_limit_s + _HIDDEN_JOB_MARGIN_S:
            return _make_state(run, "lost", f"job {run.job_id} is past its time limit and left no result; {reason}")
        return _make_state(run, "running", reason)

    def replaces_result(self, run_id: str, run: SubmittedRun, state: RunState, head: ResultSummary) -> bool:
        """Whether an active submission will replace the result that is there.

        It does if it has begun no attempt yet, or one later than the result's. It also does if the scheduler started
        its job a second time: then the result is of the first start, and does not count while the job runs.
        """
        attempt = run.started_attempt(self._tree)
        if attempt is None:
            return not run.is_dropped
        if attempt[0].number > head.attempt or head.status == "preempted":
            return True
        may_restart = run.array.pack == 1 and state.state in ("pending", "running")
        if not may_restart or head.status not in _INTERRUPTED_STATUSES:
            return False
        return scheduler_class(run.record.scheduler, run.record.cluster).requeues


def _waiting_reason(run: SubmittedRun) -> str:
    """The reason why a run has no job yet, and the command that gives it one."""
    if run.batch is None:
        return f"{run.waiting or 'not sent yet'}; the next submit sends it"
    me, caller = account_name(), run.batch.user
    whose = "the next submit" if caller == me else f"the next submit of {caller}, who called it,"
    return f"{run.waiting or 'sbatch was not heard to answer'}; {whose} finds out whether it was sent"


def _make_state(
    run: SubmittedRun, state: str, reason: str, ended_unix_s: float | None = None, nodes: str = ""
) -> RunState:
    return RunState(state, reason, run.record.submission, run.job_id, ended_unix_s, run, nodes or None)


def _read_refusal(run: SubmittedRun) -> RunState | None:
    """The state of a run that its job script did not start, by the record that the script left; else ``None``."""
    path = run.folder / f"{run.array.number}.{run.index}.unsupported"
    try:
        reason, ended_unix_s = printable_text(read_tail(path).strip()), path.lstat().st_mtime
    except OSError:
        return None
    return _make_state(run, "unsupported", reason, ended_unix_s) if reason else None


_NEEDED_BYTES = 2**20
"""Less free space than this on the tree's file system may be why a result is missing: one has 10 to 500 kB."""


def _last_log_line(run: SubmittedRun) -> str:
    """The last error in the job's log, or of the queue process before it; to be put behind a reason."""
    scheduler = scheduler_class(run.record.scheduler, run.record.cluster)
    logs = (scheduler.job_log(run), run.folder / scheduler.queue_log if scheduler.queue_log else None)
    text = next(filter(None, (closing_lines(read_tail(log)) for log in logs if log)), "")
    with contextlib.suppress(OSError):
        # A full disk keeps the log empty, too.
        if not text and (free_bytes := shutil.disk_usage(run.folder).free) < _NEEDED_BYTES:
            text = f"the file system of {run.folder} is full: {format_bytes(free_bytes)} are free"
    return f": {text}" if text else ""


_CONSEQUENCE_PATTERN = re.compile(
    r"hpcbench: the worker could not begin|srun: error: .*(?:Exited with|Terminated|Killed)"
)


def closing_lines(log: str) -> str:
    """The last line of a log; with the line before it if the last one only follows from that.

    Indented lines are hints of the line before them.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith((" ", "\t"))] or [line.strip() for line in lines]
    is_consequence = bool(lines) and _CONSEQUENCE_PATTERN.match(lines[-1]) is not None
    return "; ".join(lines[-2:] if is_consequence else lines[-1:])


_MIN_NODE_FAILURES = 3


def suspect_nodes(failed_on: Iterable[str | None]) -> dict[str, int]:
    """Nodes that seem broken, with the number of runs that failed there.

    A node is one if three or more runs failed on it, and more than twice as many as on any other: a cause that all
    nodes share fails on each of them.

    Args:
        failed_on: the nodes of each failed run's job, in the scheduler's notation; jobs of several nodes do not count.
    """
    counts = Counter(nodes for nodes in failed_on if nodes and "," not in nodes and "[" not in nodes)
    (node, count), (_, next_count), *_ = [*counts.most_common(2), ("", 0), ("", 0)]
    return {node: count} if count >= _MIN_NODE_FAILURES and count > 2 * next_count else {}


def count_states(states: Mapping[str, RunState]) -> dict[str, int]:
    return dict(sorted(Counter(state.state for state in states.values()).items()))


def record_scheduler_failures(tree: ClusterTree, states: Mapping[str, RunState], again: Collection[str] = ()) -> None:
    """Write the result of every run whose job ended without one, with the scheduler's reason.

    The scheduler forgets a job after a while; the tree does not. A job that ended a moment ago is left for later, since
    its result may still appear. Runs that are submitted ``again`` are always recorded, so that their new job finds how
    the old one ended. Nothing is recorded if this user may not write.
    """
    for run_id, state in states.items():
        if state.submitted_run is None or state.state not in (*STATUSES, "lost"):
            continue
        is_old = state.ended_unix_s is not None and time.time() - state.ended_unix_s >= RESULT_DELAY_S
        if run_id in again or (is_old and state.state != "lost"):
            with contextlib.suppress(HpcbenchError):
                tree.write_result(_scheduler_failure_result(tree, run_id, state, state.submitted_run))


def _scheduler_failure_result(tree: ClusterTree, run_id: str, state: RunState, run: SubmittedRun) -> RunResult:
    header, task = read_task(run.folder / f"{run.array.number}.jsonl", run.index)
    started = run.started_attempt(tree)
    if state.state == "unsupported":
        error = FailureRecord.of_module(state.reason)
    else:
        message = f"job {state.job_id}: {state.reason}"
        error = FailureRecord(type="SchedulerEnded", message=message, nodes=state.nodes)
    return RunResult(
        run_id=run_id,
        config_id=task.config_id,
        attempt=started[0].number if started else 0,
        sweep=task.sweep,
        cluster=header.cluster,
        status="failed" if state.state == "lost" else state.state,
        ended_at_s=state.ended_unix_s or time.time(),
        spec=task.spec,
        error=error,
    )


@dataclass
class CancelOutcome:
    """The effect of a cancellation."""

    run_ids: list[str]
    """The runs that were asked to stop: those that have not begun are removed from their submissions."""
    refused: dict[str, str] = field(default_factory=dict)
    """The reason by run of those whose job the scheduler did not cancel: it stays in the queue."""


def cancel_runs(tree: ClusterTree, states: Mapping[str, RunState], profile: ClusterProfile) -> CancelOutcome:
    """Cancel the active runs among ``states``.

    They are removed from their submissions first, so that none is sent or begun meanwhile. Then jobs that carry
    nothing else are cancelled; of jobs that carry more, only the running run is stopped.
    """
    active = {key for key, state in states.items() if state.state in ACTIVE_STATES}
    by_submission: dict[str, list[str]] = {}
    for key, run in find_submitted_runs(tree, active).items():
        by_submission.setdefault(run.folder.name, []).append(key)
    for folder, run_ids in by_submission.items():
        drop_runs(tree.submissions / folder, run_ids)
    # Some may have been submitted since their state was computed.
    runs = {key: run for key, run in find_submitted_runs(tree, active).items() if run.job_id}
    outcome = CancelOutcome(sorted(active))
    for kind in {run.record.scheduler for run in runs.values()}:
        of_kind = {key: run for key, run in runs.items() if run.record.scheduler == kind}
        # Jobs that carry nothing but active runs.
        whole = {run.job_id: run for run in of_kind.values() if active.issuperset(run.array.runs_of(run.number))}
        parts = [run for key, run in of_kind.items() if run.job_id not in whole and states[key].state == "running"]
        refused = scheduler_class(kind, tree.root.name)(profile).cancel(list(whole.values()), parts)
        for key, run in of_kind.items():
            reason = refused.get((run.job_id or "").partition("_")[0])
            if reason is not None:
                outcome.refused[key] = reason
    return outcome
