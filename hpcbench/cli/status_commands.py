"""The command ``status`` and the live screen that ``run`` and ``submit --wait`` share with it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import click

from hpcbench.cli.common import json_option, make_console, print_json, results_option, results_tree, runs_exit_code

if TYPE_CHECKING:
    from rich.text import Text

    from hpcbench.submit.watcher import SweepSnapshot


class LiveScreen:
    """Draws looks at sweeps in place, and only what differs from the last one.

    A terminal that has gone, as that of a closed laptop, is no reason to stop: there is only nothing more to draw.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.live import Live

        self._console = make_console(stderr=stream is sys.stderr)
        self._live = Live(console=self._console, auto_refresh=False)
        self._shown: tuple[int, list[Text]] | None = None

    def __enter__(self) -> LiveScreen:
        with contextlib.suppress(OSError):
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()

    def show(self, snapshots: Sequence[SweepSnapshot]) -> None:
        """A new look at every sweep."""
        from rich.console import Group

        from hpcbench.report.live_screen import live_screen_lines

        options = self._console.options
        lines = live_screen_lines(snapshots, options.max_width, ascii_only=options.ascii_only)
        if (options.max_width, lines) != self._shown:
            self._shown = (options.max_width, lines)
            with contextlib.suppress(OSError):
                self._live.update(Group(*lines), refresh=True)


if TYPE_CHECKING:
    from hpcbench.submit.run_state import RunState
    from hpcbench.submit.submission_record import SweepRecord
    from hpcbench.submit.watcher import SweepWatcher

    States = list[tuple[str, str, dict[str, RunState]]]


@click.command()
@click.argument("sweeps", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--watch", is_flag=True, help="Stay and show every change until nothing is on its way.")
@results_option
@json_option
def status(sweeps: tuple[str, ...], cluster_name: str | None, watch: bool, results: str | None, as_json: bool) -> None:
    """Show the state of every run of SWEEPS, or of all sweeps in the tree."""
    found = (
        _watch_states(sweeps, cluster_name, results, as_json) if watch else _query_once(sweeps, cluster_name, results)
    )
    if as_json:
        print_json({"sweeps": [_states_json(*entry) for entry in found]})
    elif not watch:
        _print_states(_states_text(found, sys.stdout), sys.stdout)
    sys.exit(max((runs_exit_code(states) for _, _, states in found), default=0))


def _states_text(found: States, stream: TextIO) -> str:
    """What is shown of a look; reasons are broken into lines on a terminal alone."""
    from hpcbench.report.status_text import status_text

    width = None
    if stream.isatty():
        import shutil

        width = shutil.get_terminal_size().columns
    return "\n\n".join(status_text(*entry, width) for entry in found)


def _print_states(text: str, stream: TextIO) -> None:
    click.echo(text, file=stream, color=False if os.environ.get("NO_COLOR") else None)


def _query_once(sweeps: tuple[str, ...], cluster_name: str | None, results: str | None) -> States:
    """One look at all runs; what only the scheduler knows is written down on the way."""
    from hpcbench.report.sweep_selection import select_sweeps

    watchers = _make_watchers(select_sweeps(results_tree(results), sweeps, cluster_name), results)
    return _states_by_sweep([(watcher, watcher.query()) for watcher in watchers])


def _make_watchers(
    selected: list[tuple[str, SweepRecord]], results: str | None, known: Iterable[SweepWatcher] = ()
) -> list[SweepWatcher]:
    """One watcher for all selected sweeps of a cluster; those that are ``known`` go on with what they remember."""
    from hpcbench.submit.scheduler_settings import read_scheduler_settings
    from hpcbench.submit.watcher import SweepWatcher

    wanted: dict[str, dict[str, list[str]]] = {}
    for cluster, record in selected:
        wanted.setdefault(cluster, {})[record.sweep] = record.run_ids
    watchers = {watcher.tree.root.name: watcher for watcher in known}
    for cluster, sweeps in wanted.items():
        if cluster in watchers:
            watchers[cluster].sweeps = sweeps
        else:
            watchers[cluster] = SweepWatcher(
                results_tree(results).cluster(cluster).root, read_scheduler_settings(cluster), sweeps
            )
    return [watchers[cluster] for cluster in wanted]


def _states_by_sweep(looked: list[tuple[SweepWatcher, dict[str, RunState]]]) -> States:
    return [
        (sweep, watcher.tree.root.name, {key: states[key] for key in run_ids})
        for watcher, states in looked
        for sweep, run_ids in watcher.sweeps.items()
    ]


def _watch_states(sweeps: tuple[str, ...], cluster_name: str | None, results: str | None, as_json: bool) -> States:
    """Look again and again until nothing is on its way; on a terminal in place."""
    from hpcbench.report.sweep_selection import select_sweeps
    from hpcbench.submit.run_state import ACTIVE_STATES
    from hpcbench.submit.watcher import poll_interval_s, poll_pause_s

    watchers: list[SweepWatcher] = []
    stamp = None
    # With --json the one document is for standard output alone.
    with _watch_display(sys.stderr if as_json else sys.stdout) as show:
        while True:
            began_s = time.monotonic()
            if (now := _sweeps_stamp(results)) != stamp:
                watchers = _make_watchers(select_sweeps(results_tree(results), sweeps, cluster_name), results, watchers)
                stamp = now
            looked = [(watcher, watcher.query()) for watcher in watchers]
            show(looked)
            active = [state for _, states in looked for state in states.values() if state.state in ACTIVE_STATES]
            if not active:
                return _states_by_sweep(looked)
            records = [state.submitted_run.record for state in active if state.submitted_run]
            every_s = max(poll_interval_s(record.scheduler, record.cluster) for record in records)
            time.sleep(poll_pause_s(every_s, time.monotonic() - began_s))


def _sweeps_stamp(results: str | None) -> list[tuple[str, int]]:
    """Changes when a sweep is submitted again, or another one."""
    root = results_tree(results)
    folders = [(name, root.cluster(name).root / "sweeps") for name in root.clusters()]
    return [(name, folder.stat().st_mtime_ns) for name, folder in folders if folder.is_dir()]


@contextlib.contextmanager
def _watch_display(stream: TextIO) -> Iterator[Callable[[list[tuple[SweepWatcher, dict[str, RunState]]]], None]]:
    """What to call with every look: draws on a terminal; elsewhere a block of text whenever something has changed."""
    if stream.isatty():
        with LiveScreen(stream) as screen:
            yield lambda looked: screen.show(
                [snapshot for watcher, states in looked for snapshot in watcher.snapshots(states)]
            )
        return
    last = None

    def tell(looked: list[tuple[SweepWatcher, dict[str, RunState]]]) -> None:
        nonlocal last
        if (text := _states_text(_states_by_sweep(looked), stream)) != last:
            _print_states(f"{text}\n", stream)
            last = text

    yield tell


def _states_json(sweep: str, cluster: str, states: dict[str, RunState]) -> dict[str, Any]:
    from hpcbench.submit.run_state import count_states

    return {
        "sweep": sweep,
        "cluster": cluster,
        "counts": count_states(states),
        "runs": [
            {"run_id": key, "state": state.state, "reason": state.reason, "job_id": state.job_id}
            for key, state in states.items()
        ],
    }
