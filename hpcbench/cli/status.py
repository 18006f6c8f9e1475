"""``status``: how the runs of sweeps are, once or live."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import click

from hpcbench.cli.common import console, exit_code, json_option, print_json, results_option, tree

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
    found = _watch(sweeps, cluster_name, results, as_json) if watch else _look(sweeps, cluster_name, results)
    if as_json:
        print_json({"sweeps": [_json(*entry) for entry in found]})
    elif not watch:
        _echo(_text(found, sys.stdout), sys.stdout)
    sys.exit(max((exit_code(states) for _, _, states in found), default=0))


def _text(found: States, stream: TextIO) -> str:
    """What is shown of a look; reasons are broken into lines on a terminal alone."""
    from hpcbench.report.status import status_text

    width = None
    if stream.isatty():
        import shutil

        width = shutil.get_terminal_size().columns
    return "\n\n".join(status_text(*entry, width) for entry in found)


def _echo(text: str, stream: TextIO) -> None:
    click.echo(text, file=stream, color=False if os.environ.get("NO_COLOR") else None)


def _look(sweeps: tuple[str, ...], cluster_name: str | None, results: str | None) -> States:
    """One look at all runs; what only the scheduler knows is written down on the way."""
    from hpcbench.report.select import select_sweeps
    from hpcbench.submit.address import read_address
    from hpcbench.submit.state import run_states

    found = []
    for cluster, record in select_sweeps(tree(results), sweeps, cluster_name):
        cluster_tree = tree(results).cluster(cluster)
        states = run_states(cluster_tree, record.run_ids, read_address(cluster), time.time())
        if any(state.ended_unix_s is not None for state in states.values()):
            from hpcbench.submit.settle import settle

            settle(cluster_tree, states)
        found.append((record.sweep, cluster, states))
    return found


def _watch(sweeps: tuple[str, ...], cluster_name: str | None, results: str | None, as_json: bool) -> States:
    """Look again and again, on a terminal in place, elsewhere with a block of text whenever something has changed."""
    from hpcbench.submit.state import ACTIVE

    # With --json the one document is for standard output alone.
    stream = sys.stderr if as_json else sys.stdout
    shown = None
    with _screen(stream) as show:
        while True:
            found = _look(sweeps, cluster_name, results)
            if (text := _text(found, stream)) != shown:
                show(text)
                shown = text
            active = [state for _, _, states in found for state in states.values() if state.state in ACTIVE]
            if not active:
                return found
            time.sleep(max(_LOOK_EVERY_S[state.ticket.record.scheduler] for state in active if state.ticket))


@contextlib.contextmanager
def _screen(stream: TextIO) -> Iterator[Callable[[str], None]]:
    if not stream.isatty():
        yield lambda text: _echo(f"{text}\n", stream)
        return
    from rich.live import Live
    from rich.text import Text

    with Live(console=console(stderr=stream is sys.stderr), auto_refresh=False) as live:
        yield lambda text: live.update(Text.from_ansi(text), refresh=True)


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
