"""``submit``, ``run``, ``status``: jobs and their state."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import (
    cluster_option,
    exit_code,
    json_option,
    load_plan,
    print_json,
    results_option,
    say,
    tree,
)

if TYPE_CHECKING:
    from hpcbench.submit.plan import Plan
    from hpcbench.submit.send import Sent
    from hpcbench.submit.state import RunState
    from hpcbench.submit.submit import Submitted
    from hpcbench.submit.watch import Watcher


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
    made, submitted = _submit(sweep, cluster_name, results, over_budget=over_budget, remeasure=remeasure)
    if as_json:
        print_json(_submitted_json(made, submitted))
    check_sent(submitted.sent, waits=waits)
    if waits:
        sys.exit(exit_code(watch(made, results, made.elsewhere if remeasure else {})))


def _submitted_json(made: Plan, submitted: Submitted) -> dict[str, Any]:
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


def check_sent(sent: Sent, *, waits: bool) -> None:
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
    from hpcbench.cli.results import show_table

    made, submitted = _submit(sweep, cluster_name, results, over_budget=over_budget, remeasure=remeasure)
    check_sent(submitted.sent, waits=True)
    states = watch(made, results, made.elsewhere if remeasure else {})
    show_table(tree(results), [made.sweep.name], [made.profile.name], as_json=as_json)
    sys.exit(exit_code(states))


def _submit(
    sweep: str, cluster_name: str, results: str | None, *, over_budget: bool, remeasure: bool
) -> tuple[Plan, Submitted]:
    from hpcbench.submit.submit import Choice
    from hpcbench.submit.submit import submit as submit_plan

    made = load_plan(sweep, cluster_name, results)
    for reason, count in _reasons(made).items():
        say(f"{count} point{'s' if count > 1 else ''} dropped: {reason}")
    choice = Choice(remeasure=remeasure, over_budget=over_budget)
    submitted = submit_plan(made, tree(results).cluster(made.profile.name), choice, say)
    say_submitted(made, submitted)
    if made.elsewhere and not remeasure:
        say(f"  {len(made.elsewhere)} were measured in another environment: --remeasure runs them again")
    for key, status in made.finished.items():
        if status != "ok":
            say(f"  {key} has ended as {status} and is not run again by submit")
    return made, submitted


def say_submitted(made: Plan, submitted: Submitted) -> None:
    """What a submit did, in one line or two."""
    parts = [f"{len(submitted.run_ids)} submitted", f"{len(made.finished)} done before"]
    if submitted.active:
        parts.append(f"{len(submitted.active)} already on their way")
    say(f"sweep {made.sweep.name} on {made.profile.name}: {len(made.runs)} runs, {', '.join(parts)}")
    sent = submitted.sent
    if sent.waiting:
        say(f"  {sent.waiting} jobs wait to be sent: {sent.reason}")


def _reasons(made: Plan) -> dict[str, int]:
    counted: dict[str, int] = {}
    for point in made.dropped:
        counted[point.reason] = counted.get(point.reason, 0) + 1
    return counted


def watch(made: Plan, results: str | None, superseded: Mapping[str, str]) -> dict[str, RunState]:
    """Wait until no run is on its way; whoever leaves earlier is told how to come back."""
    from hpcbench.submit.wait import wait
    from hpcbench.submit.watch import Watcher

    root = tree(results).cluster(made.profile.name).root
    watcher = Watcher(root, made.profile, {made.sweep.name: list(made.runs)}, superseded=superseded)
    if made.profile.scheduler.kind == "local":
        # What others have in a cluster's queue nobody can foretell.
        from hpcbench.submit.outlook import outlook
        from hpcbench.submit.plan import local_cores

        left_s = outlook(made, tree(results).cluster(made.profile.name)).left_s(made.missing, local_cores())
        watcher.predicted_s |= {} if left_s is None else {made.sweep.name: left_s}
    try:
        with _shown(made, watcher) as tell:
            return wait(watcher, made.profile, tell)
    except KeyboardInterrupt:
        name = made.sweep.name
        say(f"the runs go on: hpcbench status {name} --watch shows them again, hpcbench cancel {name} stops them")
        raise


@contextlib.contextmanager
def _shown(made: Plan, watcher: Watcher) -> Iterator[Callable[[dict[str, RunState]], None]]:
    """What to call with every look: draws on a terminal, tells every run that has ended elsewhere."""
    if not sys.stderr.isatty():
        from hpcbench.report.progress import Progress

        yield Progress(say, made.runs, made.finished).update
        return
    from hpcbench.cli.watch import Screen

    with Screen(sys.stderr) as screen:
        yield lambda states: screen.show(watcher.snapshots(states))
