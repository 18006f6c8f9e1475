"""Submit what a sweep still lacks: decide under a lock, write one folder, hand it to the scheduler."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.spec import RunSpec, config_id
from hpcbench.errors import ConfigError, SubmitError
from hpcbench.fileio import make_folder
from hpcbench.results.schema import Failure, RunResult
from hpcbench.results.store import ClusterTree
from hpcbench.submit import scheduler
from hpcbench.submit.account import check_account
from hpcbench.submit.journal import read_journal
from hpcbench.submit.lock import exclusive
from hpcbench.submit.offer import Tell
from hpcbench.submit.plan import RERUN_ON_SUBMIT, Plan
from hpcbench.submit.queue_state import start_queue, was_started
from hpcbench.submit.record import write_sweep
from hpcbench.submit.send import Sent, send, unsent
from hpcbench.submit.settle import settle
from hpcbench.submit.state import ACTIVE, run_states
from hpcbench.submit.submission import render_submission, write_submission
from hpcbench.submit.submission_record import Submission, next_submission_folder, submissions_of


@dataclass(frozen=True)
class Choice:
    """Which runs are submitted beside those that have never been."""

    again: frozenset[str] = frozenset()
    """Further states (``timeout``, ``lost``, ...) whose runs are submitted once more."""
    only_again: bool = False
    """Leave out all others."""
    remeasure: bool = False
    """Also what was measured in another environment than today's."""
    over_budget: bool = False
    """Whatever it may cost."""


@dataclass
class Submitted:
    """What one submit did."""

    folder: Path | None = None
    record: Submission | None = None
    run_ids: list[str] = field(default_factory=list)
    active: list[str] = field(default_factory=list)
    """Runs that an earlier submission is taking care of."""
    sent: Sent = field(default_factory=Sent)
    """Of this submission and of what had been waiting in earlier ones."""


def _silent(text: str) -> None:
    pass


def submit(plan: Plan, tree: ClusterTree, choice: Choice = Choice(), tell: Tell = _silent) -> Submitted:
    """Submit the runs of ``plan`` that have no result and that nobody is taking care of.

    What of earlier submissions has not been sent yet goes first. Raises ``ConfigError`` where it would cost more than
    the budget, and ``SubmitError`` where there is no scheduler here; what the scheduler said is in ``sent``.
    """
    check_scheduler(plan.profile)
    make_folder(tree.submissions)
    with exclusive(tree.submissions / ".lock"):
        stale = plan.elsewhere if choice.remeasure else {}
        chosen, active = _choose(plan, tree, choice, stale)
        if not choice.over_budget:
            check_budget(plan, chosen)
        write_sweep(plan, tree)
        if not choice.only_again:
            write_skipped(plan, tree, active)
        if chosen:
            folder = next_submission_folder(tree, plan.sweep.name)
            rendered = render_submission(plan, chosen, tree, folder, stale, obeys_stops="skipped" not in choice.again)
            write_submission(rendered, folder)
    submitted = Submitted(active=active)
    if chosen:
        submitted = Submitted(folder, rendered.record, list(chosen), active)
    submitted.sent = send_waiting(tree, plan.runs, plan.profile, tell)
    if chosen and submitted.sent.refused:
        forget_if_empty(folder)
    return submitted


def _choose(
    plan: Plan, tree: ClusterTree, choice: Choice, stale: Collection[str]
) -> tuple[dict[str, RunSpec], list[str]]:
    finished = plan.finished
    missing = {
        key: spec for key, spec in plan.runs.items() if finished.get(key) in (None, *choice.again) or key in stale
    }
    states = run_states(tree, missing, plan.profile, time.time(), stale)
    settle(tree, states)
    active = [key for key, state in states.items() if state.state in ACTIVE]
    wanted = choice.again if choice.only_again else {"planned", *RERUN_ON_SUBMIT, *choice.again}
    stopped = () if "skipped" in choice.again else plan.stopped
    return {key: spec for key, spec in missing.items() if states[key].state in wanted and key not in stopped}, active


def write_skipped(plan: Plan, tree: ClusterTree, active: Collection[str]) -> None:
    """Give the runs that a stop rule has made pointless their result, unless they are on their way already."""
    for run_id, reason in plan.stopped.items():
        if run_id not in active:
            spec = plan.runs[run_id]
            result = RunResult(
                run_id=run_id,
                config_id=config_id(spec),
                attempt=0,
                sweep=plan.sweep.name,
                cluster=plan.profile.name,
                status="skipped",
                spec=spec,
                error=Failure(type="Stopped", message=reason),
            )
            tree.write_result(result)


def check_budget(plan: Plan, chosen: dict[str, RunSpec]) -> None:
    """Raise ``ConfigError`` where ``chosen`` may cost more node-hours than the sweep or the profile allows at once."""
    if plan.budget is None:
        return
    budget, owner = plan.budget
    cost = plan.node_hours(chosen)
    if cost > budget:
        raise ConfigError(
            f"{len(chosen)} runs may cost {cost:.2f} node-hours at their time limits, "
            f"the budget of {owner} is {budget:g}",
            where=str(plan.sweep.source.path),
            hint="lower time_limit_min, submit fewer runs, raise budget_node_hours, or say --yes",
        )


_NOT_SENT = {
    "pbs": (
        "is run by PBS, which hpcbench writes for but does not submit to",
        "hpcbench render SWEEP --cluster NAME --out DIR writes complete jobs: qsub DIR/0.sh, and so on",
    ),
    "none": ("is only predicted for: no job reaches it", "plan and predict take it; hpcbench cluster list has others"),
}


def check_scheduler(profile: ClusterProfile) -> None:
    """Raise ``SubmitError`` where the scheduler is not here, before anything is written; ``ConfigError`` where it would
    take no job for want of an account.
    """
    if profile.scheduler.kind == "local":
        return
    if profile.scheduler.kind in _NOT_SENT:
        why, hint = _NOT_SENT[profile.scheduler.kind]
        raise ConfigError(f"cluster {profile.name} {why}", hint=hint)
    check_account(profile)
    config = profile.scheduler.config_file
    if config and not Path(config).exists():
        hint = "is the cluster up? the profile's scheduler.config_file names it"
        raise SubmitError(f"cluster {profile.name}: no file {config}", hint=hint)
    if scheduler.which("sbatch", profile) is None:
        hint = "run this on a login node of the cluster, or set scheduler.bin_folder in its profile"
        raise SubmitError(f"cluster {profile.name}: sbatch is not on PATH", hint=hint)


def send_waiting(tree: ClusterTree, run_ids: Iterable[str], profile: ClusterProfile, tell: Tell = _silent) -> Sent:
    """Send what the scheduler has not taken yet of every submission that has to do with ``run_ids``, oldest first."""
    wanted = set(run_ids)
    total = Sent()
    for folder, record in submissions_of(tree):
        if wanted.isdisjoint(run_id for array in record.arrays for run_id in array.run_ids):
            continue
        if record.scheduler == "local":
            _start_local(folder, profile)
            continue
        journal = read_journal(folder)
        if not any(chunk.is_open for chunk in journal.chunks) and not any(unsent(folder, record, journal).values()):
            continue
        _add(total, send(folder, record, profile, tree, tell))
        if total.failed is not None:
            break
    return total


def _add(total: Sent, sent: Sent) -> None:
    total.jobs += sent.jobs
    total.waiting += sent.waiting
    total.reason = total.reason or sent.reason
    total.refused += sent.refused
    total.failed = total.failed or sent.failed


def _start_local(folder: Path, profile: ClusterProfile) -> None:
    if was_started(folder):
        return
    with exclusive(folder / ".sending"):
        if not was_started(folder):
            start_queue(folder, scheduler.slurm_environment(profile), profile.scheduler.warning_s)


def forget_if_empty(folder: Path) -> None:
    """Remove a submission of which the scheduler took nothing and will be offered nothing again."""
    if all(chunk.refused for chunk in read_journal(folder).chunks):
        shutil.rmtree(folder, ignore_errors=True)
