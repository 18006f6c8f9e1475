"""``status``: how the runs of sweeps are, once or live."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import console, json_option, print_json, results_option, tree

if TYPE_CHECKING:
    from hpcbench.submit.state import RunState

    States = list[tuple[str, str, dict[str, RunState]]]

_LOOK_EVERY_S = {"local": 1.0, "slurm": 10.0}


@click.command()
@click.argument("sweeps", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--watch", is_flag=True, help="Stay and show every change until nothing is on its way.")
@results_option
@json_option
def status(sweeps: tuple[str, ...], cluster_name: str | None, watch: bool, results: str | None, as_json: bool) -> None:
    """Show the state of every run of SWEEPS, or of all sweeps in the tree."""
    from hpcbench.cli.runs import exit_code

    found = _watch(sweeps, cluster_name, results) if watch else _look(sweeps, cluster_name, results)
    if as_json:
        print_json({"sweeps": [_json(*entry) for entry in found]})
    elif not watch:
        from hpcbench.report.status import status_tables

        for entry in found:
            console().print(status_tables(*entry))
    sys.exit(max((exit_code(states) for _, _, states in found), default=0))


def _look(sweeps: tuple[str, ...], cluster_name: str | None, results: str | None) -> States:
    """One look at all runs; what only the scheduler knows is written down on the way."""
    from hpcbench.report.select import select_sweeps
    from hpcbench.submit.address import read_address
    from hpcbench.submit.settle import settle
    from hpcbench.submit.state import run_states

    found = []
    for cluster, record in select_sweeps(tree(results), sweeps, cluster_name):
        cluster_tree = tree(results).cluster(cluster)
        states = run_states(cluster_tree, record.run_ids, read_address(cluster), time.time())
        settle(cluster_tree, states)
        found.append((record.sweep, cluster, states))
    return found


def _watch(sweeps: tuple[str, ...], cluster_name: str | None, results: str | None) -> States:
    """Look again and again, on a screen that changes in place, or line by line where nobody watches."""
    from rich.console import Group
    from rich.live import Live

    from hpcbench.report.status import status_tables
    from hpcbench.submit.state import ACTIVE

    # With --json the one document is for standard output alone.
    with Live(console=console(stderr=True), auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            found = _look(sweeps, cluster_name, results)
            live.update(Group(*(status_tables(*entry) for entry in found)), refresh=True)
            if not any(state.state in ACTIVE for _, _, states in found for state in states.values()):
                return found
            time.sleep(max(_LOOK_EVERY_S["local" if cluster == "local" else "slurm"] for _, cluster, _ in found))


def _json(sweep: str, cluster: str, states: dict[str, RunState]) -> dict[str, Any]:
    from hpcbench.submit.state import counts

    return {
        "sweep": sweep,
        "cluster": cluster,
        "counts": counts(states),
        "runs": [
            {"run_id": key, "state": state.state, "reason": state.reason, "job_id": state.job_id}
            for key, state in states.items()
        ],
    }
