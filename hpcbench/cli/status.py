"""``status``: how the runs of sweeps are, once or live."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import click

from hpcbench.cli.common import exit_code, json_option, print_json, results_option, tree

if TYPE_CHECKING:
    from hpcbench.submit.record import SweepRecord
    from hpcbench.submit.state import RunState
    from hpcbench.submit.watch import Watcher

    States = list[tuple[str, str, dict[str, RunState]]]


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

    watchers = _watchers(select_sweeps(tree(results), sweeps, cluster_name), results)
    return _states([(watcher, watcher.ask()) for watcher in watchers])


def _watchers(
    selected: list[tuple[str, SweepRecord]], results: str | None, known: Iterable[Watcher] = ()
) -> list[Watcher]:
    """One watcher for all selected sweeps of a cluster; those that are ``known`` go on with what they remember."""
    from hpcbench.submit.address import read_address
    from hpcbench.submit.watch import Watcher

    wanted: dict[str, dict[str, list[str]]] = {}
    for cluster, record in selected:
        wanted.setdefault(cluster, {})[record.sweep] = record.run_ids
    watchers = {watcher.tree.root.name: watcher for watcher in known}
    for cluster, sweeps in wanted.items():
        if cluster in watchers:
            watchers[cluster].sweeps = sweeps
        else:
            watchers[cluster] = Watcher(tree(results).cluster(cluster).root, read_address(cluster), sweeps)
    return [watchers[cluster] for cluster in wanted]


def _states(looked: list[tuple[Watcher, dict[str, RunState]]]) -> States:
    return [
        (sweep, watcher.tree.root.name, {key: states[key] for key in run_ids})
        for watcher, states in looked
        for sweep, run_ids in watcher.sweeps.items()
    ]


def _watch(sweeps: tuple[str, ...], cluster_name: str | None, results: str | None, as_json: bool) -> States:
    """Look again and again until nothing is on its way; on a terminal in place."""
    from hpcbench.report.select import select_sweeps
    from hpcbench.submit.state import ACTIVE
    from hpcbench.submit.wait import ASK_EVERY_S, pause_s

    watchers: list[Watcher] = []
    stamp = None
    # With --json the one document is for standard output alone.
    with _shown(sys.stderr if as_json else sys.stdout) as show:
        while True:
            began_s = time.monotonic()
            if (now := _stamp(results)) != stamp:
                watchers = _watchers(select_sweeps(tree(results), sweeps, cluster_name), results, watchers)
                stamp = now
            looked = [(watcher, watcher.ask()) for watcher in watchers]
            show(looked)
            active = [state for _, states in looked for state in states.values() if state.state in ACTIVE]
            if not active:
                return _states(looked)
            every_s = max(ASK_EVERY_S[state.ticket.record.scheduler] for state in active if state.ticket)
            time.sleep(pause_s(every_s, time.monotonic() - began_s))


def _stamp(results: str | None) -> list[tuple[str, int]]:
    """Changes when a sweep is submitted again, or another one."""
    root = tree(results)
    folders = [(name, root.cluster(name).root / "sweeps") for name in root.clusters()]
    return [(name, folder.stat().st_mtime_ns) for name, folder in folders if folder.is_dir()]


@contextlib.contextmanager
def _shown(stream: TextIO) -> Iterator[Callable[[list[tuple[Watcher, dict[str, RunState]]]], None]]:
    """What to call with every look: draws on a terminal; elsewhere a block of text whenever something has changed."""
    if stream.isatty():
        from hpcbench.cli.watch import Screen

        with Screen(stream) as screen:
            yield lambda looked: screen.show(
                [snapshot for watcher, states in looked for snapshot in watcher.snapshots(states)]
            )
        return
    last = None

    def tell(looked: list[tuple[Watcher, dict[str, RunState]]]) -> None:
        nonlocal last
        if (text := _text(_states(looked), stream)) != last:
            _echo(f"{text}\n", stream)
            last = text

    yield tell


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
