"""Submission of the runs that a sweep still lacks: selected under a lock, written as one folder, sent to the
scheduler.

    check the scheduler
    lock the tree:  select runs -> check the budget -> write skipped results -> write the submission's folder
    unlock
    send every job that was not sent yet, of this submission and of earlier ones
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.errors import ConfigError
from hpcbench.fileio import make_folder
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RunResult
from hpcbench.submit.journal import read_journal
from hpcbench.submit.lock import exclusive_lock
from hpcbench.submit.plan import RERUN_ON_SUBMIT, SweepPlan
from hpcbench.submit.run_state import ACTIVE_STATES, record_scheduler_failures, run_states
from hpcbench.submit.scheduler import Notify, SendOutcome, check_scheduler, ignore_message, send_unsent
from hpcbench.submit.submission import render_submission, write_submission
from hpcbench.submit.submission_record import Submission, next_submission_folder, write_sweep_record


@dataclass(frozen=True)
class RunSelection:
    """The runs that are submitted besides those that were never submitted."""

    again: frozenset[str] = frozenset()
    """Further states (``timeout``, ``lost``, ...) whose runs are submitted once more."""
    only_again: bool = False
    """Submit only the runs in the states ``again``."""
    remeasure: bool = False
    """Also submit runs that were measured in another environment than the current one."""
    over_budget: bool = False
    """Submit even if the budget is exceeded."""


@dataclass
class SubmitOutcome:
    """The outcome of one submit."""

    folder: Path | None = None
    record: Submission | None = None
    run_ids: list[str] = field(default_factory=list)
    active: list[str] = field(default_factory=list)
    """Runs that an earlier submission is taking care of."""
    sent: SendOutcome = field(default_factory=SendOutcome)
    """The jobs of this submission, and of earlier ones that had been waiting."""


def submit(
    plan: SweepPlan,
    tree: ClusterTree,
    choice: RunSelection = RunSelection(),
    notify: Notify = ignore_message,
) -> SubmitOutcome:
    """Submit the runs of ``plan`` that have no result and that no earlier submission is taking care of.

    Jobs of earlier submissions that were not sent yet are sent first.

    Args:
        plan: the sweep on one cluster.
        tree: the cluster's results.
        choice: which further runs are submitted.
        notify: called with messages about retries.

    Raises:
        ConfigError: the cost exceeds the budget, or the profile lacks an account.
        SubmitError: there is no scheduler here. Its refusal of single jobs is not raised but in ``sent``.
        LockHeldError: another submit holds the lock of the tree.
    """
    check_scheduler(plan.profile)
    make_folder(tree.submissions)
    outcome = SubmitOutcome()
    with exclusive_lock(tree.submissions / ".lock"):
        superseded = plan.elsewhere if choice.remeasure else {}
        runs, outcome.active = _select_runs(plan, tree, choice, superseded)
        if not choice.over_budget:
            _check_budget(plan, runs)
        write_sweep_record(plan, tree)
        if not choice.only_again:
            _write_skipped_results(plan, tree, outcome.active)
        if runs:
            outcome.folder = next_submission_folder(tree, plan.sweep.name)
            rendered = render_submission(
                plan, runs, tree, outcome.folder, superseded, obeys_stops="skipped" not in choice.again
            )
            write_submission(rendered, outcome.folder)
            outcome.record, outcome.run_ids = rendered.record, list(runs)
    outcome.sent = send_unsent(tree, plan.runs, plan.profile, notify)
    if outcome.folder and outcome.sent.refused and all(batch.refused for batch in read_journal(outcome.folder).batches):
        # The scheduler accepted nothing of it, and nothing is sent again.
        shutil.rmtree(outcome.folder, ignore_errors=True)
    return outcome


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


def _write_skipped_results(plan: SweepPlan, tree: ClusterTree, active: Collection[str]) -> None:
    """Write the result ``skipped`` of the runs that a stop rule excludes, unless they are active already."""
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


def _check_budget(plan: SweepPlan, runs: dict[str, RunSpec]) -> None:
    """Raise ``ConfigError`` if ``runs`` may cost more node-hours than the sweep or the profile allows at once."""
    if plan.budget is None:
        return
    budget, owner = plan.budget
    cost = plan.node_hours(runs)
    if cost > budget:
        raise ConfigError(
            f"{len(runs)} runs may cost {cost:.2f} node-hours at their time limits, "
            f"the budget of {owner} is {budget:g}",
            where=str(plan.sweep.source.path),
            hint="lower time_limit_min, submit fewer runs, raise budget_node_hours, or say --yes",
        )
