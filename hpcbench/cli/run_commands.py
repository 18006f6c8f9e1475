"""The commands ``submit``, ``run``, ``logs``, ``cancel`` and ``retry``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import (
    cluster_option,
    json_option,
    load_plan,
    print_json,
    print_message,
    results_option,
    results_tree,
    runs_exit_code,
)

if TYPE_CHECKING:
    from hpcbench.results.results_tree import ClusterTree
    from hpcbench.submit.plan import SweepPlan
    from hpcbench.submit.run_state import RunState
    from hpcbench.submit.scheduler import SendOutcome
    from hpcbench.submit.submit import SubmitOutcome
    from hpcbench.submit.watcher import SweepWatcher


def over_budget_option(function: Any) -> Any:
    """``--yes``."""
    text = "Submit even what may cost more than the budget of the sweep or the cluster."
    return click.option("--yes", "over_budget", is_flag=True, help=text)(function)


def remeasure_option(function: Any) -> Any:
    """``--remeasure``."""
    text = "Also run again what was measured in another environment; its results move to the archive."
    return click.option("--remeasure", is_flag=True, help=text)(function)


@click.command()
@click.argument("sweep")
@cluster_option()
@click.option("--wait", "waits", is_flag=True, help="Stay until all runs have ended; send what had to wait.")
@over_budget_option
@remeasure_option
@results_option
@json_option
def submit(
    sweep: str,
    cluster_name: str,
    waits: bool,
    over_budget: bool,
    remeasure: bool,
    results: str | None,
    as_json: bool,
) -> None:
    """Submit the runs of SWEEP that have no result yet and return at once.

    Submitting again is harmless: what is done or on its way is left alone, and what could not be sent before goes
    out.
    """
    made, submitted = _load_and_submit(sweep, cluster_name, results, over_budget=over_budget, remeasure=remeasure)
    if as_json:
        print_json(_submit_outcome_json(made, submitted))
    check_send_outcome(submitted.sent, waits=waits)
    if waits:
        sys.exit(runs_exit_code(watch_runs(made, results, made.elsewhere if remeasure else {})))


def _submit_outcome_json(made: SweepPlan, submitted: SubmitOutcome) -> dict[str, Any]:
    from hpcbench.submit.journal import read_journal

    journal = read_journal(submitted.folder) if submitted.folder else None
    return {
        "submission": submitted.record.submission if submitted.record else None,
        "submitted": submitted.run_ids,
        "active": submitted.active,
        "done": list(made.finished),
        "jobs": journal.job_ids() if journal else [],
        "waiting_jobs": submitted.sent.waiting,
    }


def check_send_outcome(sent: SendOutcome, *, waits: bool) -> None:
    """Raise ``SubmitError`` for what the scheduler refused, and, unless somebody waits, for what it did not answer."""
    from hpcbench.errors import SubmitError

    if sent.refused:
        raise sent.refused[0]
    if sent.failed is not None and not waits:
        hint = f"{sent.waiting} jobs wait in their submission's folder: submit again, or use --wait"
        raise SubmitError(sent.failed.message, hint=hint)


@click.command()
@click.argument("sweep")
@cluster_option("local")
@over_budget_option
@remeasure_option
@results_option
@json_option
def run(sweep: str, cluster_name: str, over_budget: bool, remeasure: bool, results: str | None, as_json: bool) -> None:
    """Submit SWEEP, wait with a live screen, print the table. Leaving it with Ctrl-C leaves the runs alone."""
    from hpcbench.cli.results_commands import show_table

    made, submitted = _load_and_submit(sweep, cluster_name, results, over_budget=over_budget, remeasure=remeasure)
    check_send_outcome(submitted.sent, waits=True)
    states = watch_runs(made, results, made.elsewhere if remeasure else {})
    show_table(results_tree(results), [made.sweep.name], [made.profile.name], as_json=as_json)
    sys.exit(runs_exit_code(states))


def _load_and_submit(
    sweep: str, cluster_name: str, results: str | None, *, over_budget: bool, remeasure: bool
) -> tuple[SweepPlan, SubmitOutcome]:
    from hpcbench.submit.submit import RunSelection
    from hpcbench.submit.submit import submit as submit_plan

    made = load_plan(sweep, cluster_name, results)
    for reason, count in _count_drop_reasons(made).items():
        print_message(f"{count} point{'s' if count > 1 else ''} dropped: {reason}")
    choice = RunSelection(remeasure=remeasure, over_budget=over_budget)
    submitted = submit_plan(made, results_tree(results).cluster(made.profile.name), choice, print_message)
    print_submit_outcome(made, submitted)
    if made.elsewhere and not remeasure:
        print_message(f"  {len(made.elsewhere)} were measured in another environment: --remeasure runs them again")
    for key, status in made.finished.items():
        if status != "ok":
            print_message(f"  {key} has ended as {status} and is not run again by submit")
    return made, submitted


def print_submit_outcome(made: SweepPlan, submitted: SubmitOutcome) -> None:
    """What a submit did, in one line or two."""
    parts = [f"{len(submitted.run_ids)} submitted", f"{len(made.finished)} done before"]
    if submitted.active:
        parts.append(f"{len(submitted.active)} already on their way")
    print_message(f"sweep {made.sweep.name} on {made.profile.name}: {len(made.runs)} runs, {', '.join(parts)}")
    sent = submitted.sent
    if sent.waiting:
        print_message(f"  {sent.waiting} jobs wait to be sent: {sent.reason}")


def _count_drop_reasons(made: SweepPlan) -> dict[str, int]:
    counted: dict[str, int] = {}
    for point in made.dropped:
        counted[point.reason] = counted.get(point.reason, 0) + 1
    return counted


def watch_runs(made: SweepPlan, results: str | None, superseded: Mapping[str, str]) -> dict[str, RunState]:
    """Wait until no run is on its way; whoever leaves earlier is told how to come back."""
    from hpcbench.submit.run_control import wait_for_runs
    from hpcbench.submit.watcher import SweepWatcher

    root = results_tree(results).cluster(made.profile.name).root
    watcher = SweepWatcher(root, made.profile, {made.sweep.name: list(made.runs)}, superseded=superseded)
    if made.profile.scheduler.kind == "local":
        # What others have in a cluster's queue nobody can foretell.
        from hpcbench.forecast.forecast import forecast_plan
        from hpcbench.submit.plan import available_cores

        left_s = forecast_plan(made, results_tree(results).cluster(made.profile.name)).remaining_s(
            made.missing, available_cores()
        )
        watcher.predicted_s |= {} if left_s is None else {made.sweep.name: left_s}
    try:
        with _progress_display(made, watcher) as tell:
            return wait_for_runs(watcher, made.profile, tell)
    except KeyboardInterrupt:
        name = made.sweep.name
        print_message(
            f"the runs go on: hpcbench status {name} --watch shows them again, hpcbench cancel {name} stops them"
        )
        raise


@contextlib.contextmanager
def _progress_display(made: SweepPlan, watcher: SweepWatcher) -> Iterator[Callable[[dict[str, RunState]], None]]:
    """What to call with every look: draws on a terminal, tells every run that has ended elsewhere."""
    if not sys.stderr.isatty():
        from hpcbench.report.status_text import EndedRunLog

        yield EndedRunLog(print_message, made.runs, made.finished).update
        return
    from hpcbench.cli.status_commands import LiveScreen

    with LiveScreen(sys.stderr) as screen:
        yield lambda states: screen.show(watcher.snapshots(states))


RETRY_STATES = ("failed", "timeout", "cancelled", "preempted", "oom", "unsupported", "skipped", "lost")

DEFAULT_RETRY_STATES = ("failed", "timeout", "cancelled", "preempted", "lost")
_LOG_PART_CHARACTERS = 2**20


@click.command()
@click.argument("run_id")
@click.option("--attempt", type=int, help="Which attempt (default: the newest).")
@results_option
def logs(run_id: str, attempt: int | None, results: str | None) -> None:
    """Print what the ranks of RUN_ID said, and its job's script. The first digits of the id are enough."""
    from hpcbench.errors import ConfigError
    from hpcbench.results.attempts import Attempt, attempt_numbers

    cluster_tree, full = _find_run(run_id, results)
    folder = cluster_tree.run_folder(full)
    numbers = attempt_numbers(folder)
    if attempt is not None and attempt not in numbers:
        have = ", ".join(str(number) for number in numbers) or "none"
        raise ConfigError(f"run {full} has no attempt {attempt}", hint=f"it has: {have}")
    if not numbers:
        print_message(f"run {full} on {cluster_tree.root.name} has not begun")
        return
    chosen = Attempt(folder, attempt or numbers[-1])
    print_message(f"run {full} on {cluster_tree.root.name}, attempt {chosen.number} of {numbers[-1]}")
    for path in (chosen.folder / "out.log", chosen.folder / "err.log", *_job_log_paths(cluster_tree, full)):
        _print_log(cluster_tree, path)


def _find_run(prefix: str, results: str | None) -> tuple[ClusterTree, str]:
    from hpcbench.errors import ConfigError

    found = [
        (one, run_id)
        for name in results_tree(results).clusters()
        for one in [results_tree(results).cluster(name)]
        for run_id in one.run_ids()
        if run_id.startswith(prefix)
    ]
    if len(found) != 1:
        names = [f"{one.root.name}/{run_id}" for one, run_id in found[:10]]
        hint = f"it could be: {', '.join(names)}" if found else "hpcbench status lists the runs"
        raise ConfigError(f"{len(found) or 'no'} runs begin with {prefix!r} in {results_tree(results).root}", hint=hint)
    return found[0]


def _job_log_paths(cluster_tree: ClusterTree, run_id: str) -> list[Path]:
    from hpcbench.submit.scheduler import job_log
    from hpcbench.submit.submission_record import find_submitted_runs

    submitted_run = find_submitted_runs(cluster_tree, {run_id}).get(run_id)
    log = job_log(submitted_run) if submitted_run else None
    return [log] if log else []


def _print_log(cluster_tree: ClusterTree, path: Path) -> None:
    """Print a log part by part, however long it is; nothing where it is empty or cannot be read."""
    from hpcbench.errors import StorageError
    from hpcbench.fileio import UnsafeFileError, open_regular, printable_text

    try:
        cluster_tree.path(*path.relative_to(cluster_tree.root).parts)
        descriptor = open_regular(path)
    except (StorageError, UnsafeFileError) as error:
        print_message(f"---- {path} ----\npassed over: {error}")
        return
    except OSError:
        return
    with open(descriptor, encoding="utf-8", errors="replace", newline="") as file:
        last = ""
        while part := file.read(_LOG_PART_CHARACTERS):
            if not last:
                print_message(f"---- {path} ----")
            click.echo(printable_text(part), nl=False)
            last = part
        if last and not last.endswith("\n"):
            click.echo()


@click.command()
@click.argument("sweep")
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only on this cluster.")
@click.option("--run", "prefix", metavar="RUN_ID", help="Only this run; its first digits are enough.")
@click.option("--where", metavar="EXPR", help="Only runs for which the expression over their parameters holds.")
@click.option("--wait", "waits", is_flag=True, help="Stay until they have ended.")
@results_option
def cancel(
    sweep: str, cluster_name: str | None, prefix: str | None, where: str | None, waits: bool, results: str | None
) -> None:
    """Stop the runs of SWEEP that are queued or running. They leave what they measured; submit runs them again.

    A run that is under way needs a moment to end, and until then submit takes it for one that goes on: wait for it.
    """
    import time

    from hpcbench.config.cluster_profile import load_cluster
    from hpcbench.report.sweep_selection import select_sweeps
    from hpcbench.submit.run_control import cancel_runs
    from hpcbench.submit.run_state import run_states

    for cluster, record in select_sweeps(results_tree(results), (sweep,), cluster_name):
        profile, _ = load_cluster(cluster)
        cluster_tree = results_tree(results).cluster(cluster)
        states = run_states(cluster_tree, record.run_ids, profile, time.time())
        states = {key: state for key, state in states.items() if key.startswith(prefix or "")}
        if where is not None:
            states = _filter_by_expression(cluster_tree, states, where)
        cancelled = cancel_runs(cluster_tree, states, profile)
        running = sum(states[key].state == "running" for key in cancelled)
        still = f", {running} of them under way: --wait stays until they have ended" if running and not waits else ""
        print_message(f"{record.sweep} on {cluster}: {len(cancelled)} runs told to stop{still}")
        if waits:
            from hpcbench.submit.run_control import wait_for_runs
            from hpcbench.submit.watcher import SweepWatcher

            wait_for_runs(SweepWatcher(cluster_tree.root, profile, {record.sweep: cancelled}), profile, lambda _: None)


def _filter_by_expression(cluster_tree: ClusterTree, states: dict[str, RunState], text: str) -> dict[str, RunState]:
    import msgspec

    from hpcbench.config.expression import Expression
    from hpcbench.config.run_spec import RunSpec
    from hpcbench.config.sweep_expansion import expression_values
    from hpcbench.config.sweep_loader import COMPUTED_NAMES
    from hpcbench.submit.submission_record import list_submissions, read_run_specs

    condition = Expression(text, [*RunSpec.__struct_fields__, *COMPUTED_NAMES], "--where")
    specs = {key: spec for entry in list_submissions(cluster_tree) for key, spec in read_run_specs(*entry).items()}
    return {
        key: state
        for key, state in states.items()
        if key in specs and condition.holds(expression_values(msgspec.structs.asdict(specs[key])))
    }


@click.command()
@click.argument("sweep")
@cluster_option()
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(RETRY_STATES),
    help="Which (default: all but oom, unsupported, skipped).",
)
@over_budget_option
@click.option("--time-limit", metavar="TIME", help="A larger limit, for instance '2 h'; the runs stay the same runs.")
@results_option
def retry(
    sweep: str,
    cluster_name: str,
    statuses: tuple[str, ...],
    over_budget: bool,
    time_limit: str | None,
    results: str | None,
) -> None:
    """Submit again the runs of SWEEP that failed, timed out, were stopped or lost."""
    import msgspec

    from hpcbench.errors import ConfigError
    from hpcbench.submit.submit import RunSelection, submit
    from hpcbench.units import parse_quantity

    made = load_plan(sweep, cluster_name, results)
    if time_limit is not None:
        try:
            minutes = parse_quantity(time_limit, "time") / 60
        except ValueError as error:
            raise ConfigError(str(error), where="--time-limit") from None
        made.runs = {key: msgspec.structs.replace(spec, time_limit_min=minutes) for key, spec in made.runs.items()}
    choice = RunSelection(frozenset(statuses or DEFAULT_RETRY_STATES), only_again=True, over_budget=over_budget)
    submitted = submit(made, results_tree(results).cluster(made.profile.name), choice, print_message)
    print_message(f"sweep {made.sweep.name} on {made.profile.name}: {len(submitted.run_ids)} runs submitted again")
    check_send_outcome(submitted.sent, waits=False)
