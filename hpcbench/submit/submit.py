"""Submission of the runs that a sweep still lacks: selected under a lock, written as one folder, sent to the
scheduler.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.errors import ConfigError, SubmitError
from hpcbench.fileio import make_folder
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RunResult
from hpcbench.submit import slurm_queue
from hpcbench.submit.journal import read_journal
from hpcbench.submit.local_scheduler import queue_was_started, start_local_queue
from hpcbench.submit.lock import exclusive_lock
from hpcbench.submit.plan import RERUN_ON_SUBMIT, SweepPlan, check_account
from hpcbench.submit.run_state import ACTIVE_STATES, record_scheduler_failures, run_states
from hpcbench.submit.sbatch import Notify
from hpcbench.submit.send import SendOutcome, send_submission, unsent_jobs
from hpcbench.submit.submission import render_submission, write_submission
from hpcbench.submit.submission_record import Submission, list_submissions, next_submission_folder, write_sweep_record


@dataclass(frozen=True)
class RunSelection:
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
class SubmitOutcome:
    """What one submit did."""

    folder: Path | None = None
    record: Submission | None = None
    run_ids: list[str] = field(default_factory=list)
    active: list[str] = field(default_factory=list)
    """Runs that an earlier submission is taking care of."""
    sent: SendOutcome = field(default_factory=SendOutcome)
    """Of this submission and of what had been waiting in earlier ones."""


def _ignore_message(text: str) -> None:
    pass


def submit(
    plan: SweepPlan, tree: ClusterTree, choice: RunSelection = RunSelection(), tell: Notify = _ignore_message
) -> SubmitOutcome:
    """Submit the runs of ``plan`` that have no result and that nobody is taking care of.

    What of earlier submissions has not been sent yet goes first. Raises ``ConfigError`` where it would cost more than
    the budget, and ``SubmitError`` where there is no scheduler here; what the scheduler said is in ``sent``.
    """
    check_scheduler(plan.profile)
    make_folder(tree.submissions)
    with exclusive_lock(tree.submissions / ".lock"):
        stale = plan.elsewhere if choice.remeasure else {}
        chosen, active = _select_runs(plan, tree, choice, stale)
        if not choice.over_budget:
            check_budget(plan, chosen)
        write_sweep_record(plan, tree)
        if not choice.only_again:
            write_skipped_results(plan, tree, active)
        if chosen:
            folder = next_submission_folder(tree, plan.sweep.name)
            rendered = render_submission(plan, chosen, tree, folder, stale, obeys_stops="skipped" not in choice.again)
            write_submission(rendered, folder)
    submitted = SubmitOutcome(active=active)
    if chosen:
        submitted = SubmitOutcome(folder, rendered.record, list(chosen), active)
    submitted.sent = send_unsent(tree, plan.runs, plan.profile, tell)
    if chosen and submitted.sent.refused:
        remove_if_refused(folder)
    return submitted


def _select_runs(
    plan: SweepPlan, tree: ClusterTree, choice: RunSelection, stale: Collection[str]
) -> tuple[dict[str, RunSpec], list[str]]:
    finished = plan.finished
    missing = {
        key: spec for key, spec in plan.runs.items() if finished.get(key) in (None, *choice.again) or key in stale
    }
    states = run_states(tree, missing, plan.profile, time.time(), stale)
    record_scheduler_failures(tree, states)
    active = [key for key, state in states.items() if state.state in ACTIVE_STATES]
    wanted = choice.again if choice.only_again else {"planned", *RERUN_ON_SUBMIT, *choice.again}
    stopped = () if "skipped" in choice.again else plan.stopped
    return {key: spec for key, spec in missing.items() if states[key].state in wanted and key not in stopped}, active


def write_skipped_results(plan: SweepPlan, tree: ClusterTree, active: Collection[str]) -> None:
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
                error=FailureRecord(type="Stopped", message=reason),
            )
            tree.write_result(result)


def check_budget(plan: SweepPlan, chosen: dict[str, RunSpec]) -> None:
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


_UNSUPPORTED_SCHEDULERS = {
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
    if profile.scheduler.kind in _UNSUPPORTED_SCHEDULERS:
        why, hint = _UNSUPPORTED_SCHEDULERS[profile.scheduler.kind]
        raise ConfigError(f"cluster {profile.name} {why}", hint=hint)
    check_account(profile)
    config = profile.scheduler.config_file
    if config and not Path(config).exists():
        hint = "is the cluster up? the profile's scheduler.config_file names it"
        raise SubmitError(f"cluster {profile.name}: no file {config}", hint=hint)
    if slurm_queue.find_command("sbatch", profile) is None:
        hint = "run this on a login node of the cluster, or set scheduler.bin_folder in its profile"
        raise SubmitError(f"cluster {profile.name}: sbatch is not on PATH", hint=hint)


def send_unsent(
    tree: ClusterTree, run_ids: Iterable[str], profile: ClusterProfile, tell: Notify = _ignore_message
) -> SendOutcome:
    """Send what the scheduler has not taken yet of every submission that has to do with ``run_ids``, oldest first."""
    wanted = set(run_ids)
    total = SendOutcome()
    for folder, record in list_submissions(tree):
        if wanted.isdisjoint(run_id for array in record.arrays for run_id in array.run_ids):
            continue
        if record.scheduler == "local":
            _start_queue_once(folder, profile)
            continue
        journal = read_journal(folder)
        if not any(chunk.is_open for chunk in journal.chunks) and not any(
            unsent_jobs(folder, record, journal).values()
        ):
            continue
        _add_outcome(total, send_submission(folder, record, profile, tree, tell))
        if total.failed is not None:
            break
    return total


def _add_outcome(total: SendOutcome, sent: SendOutcome) -> None:
    total.jobs += sent.jobs
    total.waiting += sent.waiting
    total.reason = total.reason or sent.reason
    total.refused += sent.refused
    total.failed = total.failed or sent.failed


def _start_queue_once(folder: Path, profile: ClusterProfile) -> None:
    if queue_was_started(folder):
        return
    with exclusive_lock(folder / ".sending"):
        if not queue_was_started(folder):
            start_local_queue(folder, slurm_queue.slurm_environment(profile), profile.scheduler.warning_s)


def remove_if_refused(folder: Path) -> None:
    """Remove a submission of which the scheduler took nothing and will be offered nothing again."""
    if all(chunk.refused for chunk in read_journal(folder).chunks):
        shutil.rmtree(folder, ignore_errors=True)
