"""``submit``, ``run``, ``status``: jobs and their state."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import (
    cluster_option,
    console,
    json_option,
    load_plan,
    print_json,
    results_option,
    say,
    tree,
)
from hpcbench.errors import EXIT_RUNS_FAILED

if TYPE_CHECKING:
    from hpcbench.submit.plan import Plan
    from hpcbench.submit.state import RunState
    from hpcbench.submit.submit import Submitted


@click.command()
@click.argument("sweep")
@cluster_option()
@click.option("--wait", "waits", is_flag=True, help="Stay until all runs have ended.")
@results_option
@json_option
def submit(sweep: str, cluster_name: str, waits: bool, results: str | None, as_json: bool) -> None:
    """Submit the runs of SWEEP that have no result yet and return at once.

    Submitting again is harmless: what is done or on its way is left alone.
    """
    made, submitted = _submit(sweep, cluster_name, results)
    if as_json:
        print_json(
            {
                "submission": submitted.record.submission if submitted.record else None,
                "submitted": submitted.run_ids,
                "active": submitted.active,
                "done": list(made.finished),
                "jobs": [job for array in submitted.record.arrays for job in array.job_ids] if submitted.record else [],
            }
        )
    if waits:
        sys.exit(_exit_code(_watch(made, results)))


@click.command()
@click.argument("sweep")
@cluster_option("local")
@results_option
@json_option
def run(sweep: str, cluster_name: str, results: str | None, as_json: bool) -> None:
    """Submit SWEEP, wait with a progress bar, print the table."""
    from hpcbench.cli.results import show_table
    from hpcbench.submit.submit import stop_local

    made, submitted = _submit(sweep, cluster_name, results)
    try:
        states = _watch(made, results)
    except KeyboardInterrupt:
        if made.profile.scheduler.kind == "local" and submitted.folder is not None:
            say("stopping the runs of this submission ...")
            stop_local(submitted.folder)
            say(f"run the same command again to go on: {len(made.runs)} runs, done ones are kept")
        else:
            say(f"the jobs go on without this screen: hpcbench status {made.sweep.name}")
        raise
    show_table(tree(results), [made.sweep.name], [made.profile.name], as_json=as_json)
    sys.exit(_exit_code(states))


def _submit(sweep: str, cluster_name: str, results: str | None) -> tuple[Plan, Submitted]:
    from hpcbench.submit.submit import submit as submit_plan

    made = load_plan(sweep, cluster_name, results)
    for reason, count in _reasons(made).items():
        say(f"{count} point{'s' if count > 1 else ''} dropped: {reason}")
    submitted = submit_plan(made, tree(results).cluster(made.profile.name))
    parts = [f"{len(submitted.run_ids)} submitted", f"{len(made.finished)} done before"]
    if submitted.active:
        parts.append(f"{len(submitted.active)} already on their way")
    say(f"sweep {made.sweep.name} on {made.profile.name}: {len(made.runs)} runs, {', '.join(parts)}")
    for key, status in made.finished.items():
        if status != "ok":
            say(f"  {key} has ended as {status} and is not run again by submit")
    return made, submitted


def _reasons(made: Plan) -> dict[str, int]:
    counted: dict[str, int] = {}
    for point in made.dropped:
        counted[point.reason] = counted.get(point.reason, 0) + 1
    return counted


def _watch(made: Plan, results: str | None) -> dict[str, RunState]:
    from hpcbench.report.progress import Progress
    from hpcbench.submit.wait import wait

    cluster_tree = tree(results).cluster(made.profile.name)
    with Progress(console(stderr=True), made.sweep.name, made.runs, made.finished) as progress:
        return wait(cluster_tree, list(made.runs), made.profile, progress.update)


def _exit_code(states: dict[str, RunState]) -> int:
    from hpcbench.results.schema import FAILED

    return EXIT_RUNS_FAILED if any(state.state in (*FAILED, "lost") for state in states.values()) else 0


@click.command()
@click.argument("sweeps", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--watch", is_flag=True, help="Look again every few seconds until nothing is on its way.")
@results_option
@json_option
def status(sweeps: tuple[str, ...], cluster_name: str | None, watch: bool, results: str | None, as_json: bool) -> None:
    """Show the state of every run of SWEEPS, or of all sweeps in the tree."""
    import time

    from hpcbench.report.status import status_tables

    while True:
        found = _sweep_states(sweeps, cluster_name, results)
        if as_json:
            print_json({"sweeps": [_status_json(*entry) for entry in found]})
        else:
            screen = console()
            if watch and screen.is_terminal:
                screen.clear()
            for entry in found:
                screen.print(status_tables(*entry))
        if not watch or not _any_active(found):
            break
        time.sleep(5)
    sys.exit(max((_exit_code(states) for _, _, states in found), default=0))


def _sweep_states(
    sweeps: tuple[str, ...], cluster_name: str | None, results: str | None
) -> list[tuple[str, str, dict[str, RunState]]]:
    import time

    from hpcbench.config.load import load_cluster
    from hpcbench.report.select import select_sweeps
    from hpcbench.submit.state import run_states

    found = []
    for cluster, record in select_sweeps(tree(results), sweeps, cluster_name):
        profile, _ = load_cluster(cluster)
        states = run_states(tree(results).cluster(cluster), record.run_ids, profile, time.time())
        found.append((record.sweep, cluster, states))
    return found


def _any_active(found: list[tuple[str, str, dict[str, RunState]]]) -> bool:
    from hpcbench.submit.state import ACTIVE

    return any(state.state in ACTIVE for _, _, states in found for state in states.values())


def _status_json(sweep: str, cluster: str, states: dict[str, RunState]) -> dict[str, Any]:
    from hpcbench.submit.wait import counts

    return {
        "sweep": sweep,
        "cluster": cluster,
        "counts": counts(states),
        "runs": [
            {"run_id": key, "state": state.state, "reason": state.reason, "job_id": state.job_id}
            for key, state in states.items()
        ],
    }
