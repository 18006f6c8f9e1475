"""The actions of the commands ``submit``, ``run`` and ``retry``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import click
import msgspec

from hpcbench.cli.common import (
    RETRY_STATES,
    cluster_option,
    complete_choices,
    complete_sweeps,
    output_options,
    overrides_option,
    plan_options,
    print_json,
    print_message,
)
from hpcbench.cli.load_plan import keep_one_off, load_plan, one_off_sweep, sweep_argument
from hpcbench.cli.status_command import LiveScreen, runs_exit_code
from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError, SubmitError
from hpcbench.report.status_text import EndedRunLog, suspect_nodes_text
from hpcbench.results.results_tree import ResultsTree
from hpcbench.site.profile_check import closed_partitions
from hpcbench.submit.journal import read_journal
from hpcbench.submit.plan import SweepPlan
from hpcbench.submit.run_state import RunState
from hpcbench.submit.scheduler import SendOutcome
from hpcbench.submit.submission_record import read_sweep_record
from hpcbench.submit.submit import RunSelection, SubmitOutcome, accepted_runs
from hpcbench.submit.submit import submit as submit_plan
from hpcbench.submit.watcher import SweepWatcher, wait_for_runs
from hpcbench.units import parse_quantity, pluralize

DEFAULT_RETRY_STATES = ("failed", "timeout", "cancelled", "preempted", "lost")

over_budget_option = click.option(
    "--yes", "over_budget", is_flag=True,
    help="Submit even if the runs may cost more than the budget of the sweep or the cluster, or are over 20,000 jobs.",
)  # fmt: skip
remeasure_option = click.option(
    "--remeasure", is_flag=True,
    help="Also repeat runs that were measured in another environment; their results move to the archive.",
)  # fmt: skip


@click.command("submit")
@plan_options
@click.option("--wait", "waits", is_flag=True, help="Stay until all runs have ended; send the jobs that had to wait.")
@over_budget_option
@remeasure_option
@output_options
def submit_sweep(
    *, sweep: str, cluster_name: str, overrides: tuple[str, ...], waits: bool,
    over_budget: bool, remeasure: bool, results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Submit the runs of SWEEP that have no result yet and return at once.

    Submitting again is harmless: finished, queued and running runs are left alone, and jobs that could not be sent
    before are sent.
    """
    plan = load_plan(sweep, cluster_name, results, overrides)
    outcome = _submit_and_print(plan, over_budget=over_budget, remeasure=remeasure)
    if as_json:
        print_json(_submit_outcome_json(plan, outcome))
    check_send_outcome(outcome.sent, waits=waits)
    if waits:
        sys.exit(runs_exit_code(watch_runs(plan, plan.elsewhere if remeasure else {})))


def _submit_outcome_json(plan: SweepPlan, outcome: SubmitOutcome) -> dict[str, Any]:
    journal = read_journal(outcome.folder) if outcome.folder else None
    return {
        "submission": outcome.record.submission if outcome.record else None,
        "submitted": accepted_runs(outcome) if outcome.sent.refused else outcome.run_ids,
        "active": outcome.active,
        "done": list(plan.finished),
        "jobs": journal.job_ids() if journal else [],
        "waiting_jobs": outcome.sent.waiting,
    }


def check_send_outcome(sent: SendOutcome, *, waits: bool) -> None:
    """Check that the scheduler took the jobs.

    Raises:
        SubmitError: The scheduler refused a job; or it did not answer, and the command does not wait (``waits``).
    """
    if sent.refused:
        raise sent.refused[0]
    if sent.failed is not None and not waits:
        hint = f"{pluralize(sent.waiting, 'job')} not sent yet: run submit again, or submit --wait"
        raise SubmitError(sent.failed.message, hint=hint)


@click.command("run")
@click.argument("sweep", required=False, shell_complete=complete_sweeps)
@cluster_option()
@overrides_option
@click.option(
    "--model", metavar="M", shell_complete=complete_choices, help="Without SWEEP: run this model once, with --strategy."
)
@click.option("--strategy", metavar="S", shell_complete=complete_choices, help="The strategy of that run.")
@click.option(
    "--dataset", metavar="D", shell_complete=complete_choices, help="Its data set. (default: by the kind of the model)"
)
@click.option("--nodes", metavar="N", type=click.IntRange(min=1), help="Its nodes. (default: 1)")
@click.option("--tasks-per-node", metavar="T", type=click.IntRange(min=1), help="Its ranks on each node. (default: 1)")
@click.option("--batch-size", metavar="B", type=click.IntRange(min=1), help="Its samples per replica. (default: 32)")
@click.option("--name", metavar="N", help="Its name as a sweep. (default: model, strategy and a hash)")
@over_budget_option
@remeasure_option
@output_options
def run_sweep(
    *, sweep: str | None, cluster_name: str, overrides: tuple[str, ...], name: str | None, over_budget: bool,
    remeasure: bool, results: ResultsTree, as_json: bool, **parameters: Any,
) -> None:  # fmt: skip
    """Submit SWEEP, wait with a live screen, print the table. Ctrl-C ends the screen, not the runs.

    `run --model M --strategy S` runs one configuration without a sweep's file; --set sets its other parameters.

    \b
    hpcbench run quickstart
    hpcbench run --model resnet18 --strategy ddp --tasks-per-node 2 --set steps=50
    """
    # Imported here: `submit` and `retry` need no polars.
    from hpcbench.cli.results_commands import show_table

    surplus = [f"--{key.replace('_', '-')}" for key, value in {**parameters, "name": name}.items() if value is not None]
    if sweep is None and not surplus:
        raise ConfigError("no sweep is given", hint="run SWEEP, or run --model M --strategy S")
    if sweep is not None and surplus:
        raise ConfigError(f"{surplus[0]} is for a run without a sweep", hint="--set KEY=VALUE changes a sweep")
    one_off = None if sweep is not None else one_off_sweep(name, parameters, overrides)
    plan = load_plan(one_off or str(sweep), cluster_name, results, overrides)
    if one_off is not None:
        keep_one_off(one_off, results.cluster(plan.profile.name))
    outcome = _submit_and_print(plan, over_budget=over_budget, remeasure=remeasure)
    check_send_outcome(outcome.sent, waits=True)
    states = watch_runs(plan, plan.elsewhere if remeasure else {})
    if text := suspect_nodes_text((state.nodes for state in states.values()), plan.profile_name):
        print_message(text)
    show_table(results, [plan.sweep.name], [plan.profile.name], as_json=as_json)
    absent = sum(state.state == "planned" for state in states.values())
    if absent:
        print_message(f"{absent} of {pluralize(len(states), 'run')} ended without a result: run it again")
    sys.exit(max(runs_exit_code(states), EXIT_RUNS_FAILED if absent else 0))


def submit_and_watch(plan: SweepPlan, selection: RunSelection, go_on: str) -> dict[str, RunState]:
    """Submit the runs of ``plan`` that ``selection`` takes, wait until all have ended, and return how.

    ``go_on`` is printed if the user leaves meanwhile. Where all have ended no scheduler is needed.
    """
    if plan.missing or (selection.remeasure and plan.elsewhere):
        outcome = submit_plan(plan, plan.tree, selection, print_message)
        print_submit_outcome(plan, outcome)
        check_send_outcome(outcome.sent, waits=True)
    try:
        return watch_runs(plan, plan.elsewhere if selection.remeasure else {})
    except KeyboardInterrupt:
        print_message(go_on)
        raise


def _submit_and_print(plan: SweepPlan, *, over_budget: bool, remeasure: bool) -> SubmitOutcome:
    """Submit the runs of ``plan`` that have no result; print what was submitted and what was left alone, and why."""
    for reason, count in Counter(point.reason for point in plan.dropped).items():
        print_message(f"{count} point{'s' if count > 1 else ''} infeasible: {reason}")
    earlier = read_sweep_record(plan.tree, plan.sweep.name)
    if hidden := set(earlier.run_ids if earlier else ()) - plan.runs.keys():
        print_message(
            f"{pluralize(len(hidden), 'earlier run')} of {plan.sweep.name!r} "
            f"{'is' if len(hidden) == 1 else 'are'} not part of this sweep and no longer listed under its name; "
            f"to keep both, give this sweep another name (hpcbench table without a sweep lists every result)"
        )
    if text := suspect_nodes_text((head.failed_on for head in plan.heads.values()), plan.profile_name):
        print_message(text)
    if plan.may_be_supported:
        healed = pluralize(len(plan.may_be_supported), "run")
        print_message(f"{healed} lacked a package or module in another environment: submitted again")
    selection = RunSelection(remeasure=remeasure, over_budget=over_budget)
    outcome = submit_plan(plan, plan.tree, selection, print_message)
    print_submit_outcome(plan, outcome)
    if plan.elsewhere and not remeasure:
        print_message(f"  {len(plan.elsewhere)} were measured in another environment: --remeasure runs them again")
    left = Counter(status for status in plan.finished.values() if status != "ok")
    left.update(state.state for state in outcome.states.values() if state.state == "lost")
    for status, count in left.items():
        print_message(
            f"  {count} ended as {status} and {'is' if count == 1 else 'are'} not run again by submit: "
            f"hpcbench retry {sweep_argument(plan.sweep)} --cluster {plan.profile_name} --status {status}"
        )
    return outcome


def print_submit_outcome(plan: SweepPlan, outcome: SubmitOutcome) -> None:
    """Print how many runs the scheduler took, and which partitions keep them waiting."""
    submitted = len(outcome.run_ids)
    if outcome.sent.refused or outcome.sent.waiting or outcome.sent.failed is not None:
        # A run is submitted once the scheduler has answered.
        submitted = len(accepted_runs(outcome))
    counts = [f"{submitted} submitted", f"{len(plan.finished)} done before"]
    if submitted < len(outcome.run_ids):
        counts.insert(1, f"{len(outcome.run_ids) - submitted} not")
    active = [outcome.states[key] for key in outcome.active]
    waiting = [state for state in active if state.state == "waiting"]
    unsent = sum(state.job_id is None for state in waiting)
    if len(waiting) < len(active):
        counts.append(f"{len(active) - len(waiting)} already queued or running")
    if unsent:
        counts.append(f"{unsent} of earlier submissions that were not sent before")
    if unsent < len(waiting):
        counts.append(f"{len(waiting) - unsent} of which it is not known whether they run")
    print_message(
        f"sweep {plan.sweep.name} on {plan.profile.name}: {pluralize(len(plan.runs), 'run')}, {', '.join(counts)}"
    )
    if outcome.sent.waiting:
        held_back = pluralize(outcome.sent.waiting, "job")
        print_message(f"  {held_back} held back ({outcome.sent.reason}): run submit again, or submit --wait")
    _warn_of_closed_partitions(plan, outcome)


def _warn_of_closed_partitions(plan: SweepPlan, outcome: SubmitOutcome) -> None:
    """State which partitions of the submitted runs start no job of this user at present."""
    partitions = {plan.shape(plan.runs[run_id]).partition.key for run_id in accepted_runs(outcome)}
    for name, reason in closed_partitions(plan.profile, partitions).items():
        print_message(f"warning: partition {name} {reason}: its jobs wait until that changes")


def watch_runs(plan: SweepPlan, superseded: Mapping[str, str]) -> dict[str, RunState]:
    """Wait until no run of ``plan`` is queued or running, and show the progress.

    Args:
        plan: Its runs are watched.
        superseded: Environment key of the old result of each run that is measured again.

    Raises:
        KeyboardInterrupt: The user left; how to watch and cancel the runs has been printed.
    """
    name = plan.sweep.name
    watcher = SweepWatcher(plan.tree.root, plan.profile, {name: list(plan.runs)}, superseded=superseded)
    try:
        if sys.stderr.isatty():
            with LiveScreen(sys.stderr) as screen:
                return wait_for_runs(watcher, lambda states: screen.show([(watcher, states)]))
        return wait_for_runs(watcher, EndedRunLog(print_message, plan.runs, plan.finished).update)
    except KeyboardInterrupt:
        print_message(
            f"the runs go on: hpcbench status {name} --watch shows them again, hpcbench cancel {name} stops them"
        )
        raise


@click.command("retry")
@plan_options
@click.option(
    "--status", "statuses", multiple=True, type=click.Choice(RETRY_STATES),
    help="Statuses to submit again (default: all but oom, unsupported, skipped).",
)  # fmt: skip
@over_budget_option
@click.option("--time-limit", metavar="TIME", help="A longer limit, for example '2 h'; the run ids stay the same.")
@output_options
def retry_sweep(
    *, sweep: str, cluster_name: str, overrides: tuple[str, ...], statuses: tuple[str, ...], over_budget: bool,
    time_limit: str | None, results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Submit again the runs of SWEEP that failed, timed out, were stopped or lost."""
    plan = load_plan(sweep, cluster_name, results, overrides)
    if time_limit is not None:
        try:
            minutes = parse_quantity(time_limit, "time") / 60
        except ValueError as error:
            raise ConfigError(str(error), where="--time-limit") from None
        plan.runs = {
            run_id: msgspec.structs.replace(spec, time_limit_min=minutes) for run_id, spec in plan.runs.items()
        }
    again = frozenset(statuses or DEFAULT_RETRY_STATES)
    selection = RunSelection(again, only_again=True, over_budget=over_budget)
    outcome = submit_plan(plan, plan.tree, selection, print_message)
    if as_json:
        print_json(_submit_outcome_json(plan, outcome))
    runs = pluralize(len(outcome.run_ids), "run")
    print_message(f"sweep {plan.sweep.name} on {plan.profile.name}: {runs} submitted again")
    _warn_of_closed_partitions(plan, outcome)
    if not outcome.run_ids:
        print_message(_why_none(plan, outcome, again))
    check_send_outcome(outcome.sent, waits=False)


def _why_none(plan: SweepPlan, outcome: SubmitOutcome, again: Collection[str]) -> str:
    """The states that the runs are in instead, and the command that takes them."""
    counts = Counter({**plan.finished, **{key: state.state for key, state in outcome.states.items()}}.values())
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    text = f"  none of the {len(plan.runs)} is in a state that retry takes ({', '.join(sorted(again))}): {states}"
    if further := [state for state in counts if state in RETRY_STATES]:
        text += f"\n  to take them, too: {' '.join(f'--status {state}' for state in further)}"
    if counts.keys() <= {"planned"}:
        text += f"\n  nothing was submitted: hpcbench submit {sweep_argument(plan.sweep)} --cluster {plan.profile_name}"
    return text
