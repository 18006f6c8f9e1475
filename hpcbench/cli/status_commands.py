"""The commands ``status`` and ``logs``, and the live screen of ``status``, ``run`` and ``submit --wait``."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import click

from hpcbench.cli.common import (
    cluster_filter_option,
    json_option,
    make_console,
    print_json,
    print_message,
    results_option,
    results_tree,
    runs_exit_code,
)
from hpcbench.errors import ConfigError, StorageError
from hpcbench.fileio import UnsafeFileError, open_regular, printable_text
from hpcbench.report.status_text import status_text
from hpcbench.report.sweep_selection import select_sweeps
from hpcbench.results.attempts import Attempt, attempt_numbers
from hpcbench.results.results_tree import ClusterTree
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, count_states
from hpcbench.submit.scheduler import job_log, scheduler_class
from hpcbench.submit.scheduler_settings import read_scheduler_settings
from hpcbench.submit.submission_record import SweepRecord, find_submitted_runs
from hpcbench.submit.watcher import SweepSnapshot, SweepWatcher, poll_pause_s

if TYPE_CHECKING:
    from rich.text import Text

    States = list[tuple[str, str, dict[str, RunState]]]
    """Sweep, cluster and the state of each run."""
    WatchedStates = list[tuple[SweepWatcher, dict[str, RunState]]]

_LOG_PART_CHARACTERS = 2**20


class LiveScreen:
    """Draws snapshots of sweeps in place, and only if they differ from the last ones.

    A terminal that has gone, as that of a closed laptop, does not end the command: nothing more is drawn.
    """

    def __init__(self, stream: TextIO) -> None:
        # Imported here: plain `status` starts without rich.
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
        from rich.console import Group

        from hpcbench.report.live_screen import live_screen_lines

        options = self._console.options
        lines = live_screen_lines(snapshots, options.max_width, ascii_only=options.ascii_only)
        if (options.max_width, lines) != self._shown:
            self._shown = (options.max_width, lines)
            with contextlib.suppress(OSError):
                self._live.update(Group(*lines), refresh=True)


@click.command()
@click.argument("sweeps", nargs=-1)
@cluster_filter_option
@click.option("--watch", is_flag=True, help="Stay and show every change until no run is queued or running.")
@results_option
@json_option
def status(sweeps: tuple[str, ...], cluster_name: str | None, watch: bool, results: str | None, as_json: bool) -> None:
    """Show the state of every run of SWEEPS, or of all sweeps in the tree."""
    if watch:
        states = _watch_states(sweeps, cluster_name, results, as_json)
    else:
        watchers = _make_watchers(select_sweeps(results_tree(results), sweeps, cluster_name), results)
        states = _states_by_sweep([(watcher, watcher.query()) for watcher in watchers])
    if as_json:
        print_json({"sweeps": [_states_json(*entry) for entry in states]})
    elif not watch:
        _print_states(_states_text(states, sys.stdout), sys.stdout)
    sys.exit(max((runs_exit_code(states_of_runs) for _, _, states_of_runs in states), default=0))


def _states_text(states: States, stream: TextIO) -> str:
    """The states as text; reasons are broken into lines on a terminal alone."""
    width = shutil.get_terminal_size().columns if stream.isatty() else None
    return "\n\n".join(status_text(*entry, width) for entry in states)


def _print_states(text: str, stream: TextIO) -> None:
    click.echo(text, file=stream, color=False if os.environ.get("NO_COLOR") else None)


def _make_watchers(
    selected: list[tuple[str, SweepRecord]], results: str | None, existing: Iterable[SweepWatcher] = ()
) -> list[SweepWatcher]:
    """One watcher for all selected sweeps of a cluster; ``existing`` ones are reused with their caches."""
    sweeps_by_cluster: dict[str, dict[str, list[str]]] = {}
    profiles: dict[str, str] = {}
    for cluster, record in selected:
        profiles[cluster] = record.profile
        sweeps_by_cluster.setdefault(cluster, {})[record.sweep] = record.run_ids
    watchers = {watcher.tree.root.name: watcher for watcher in existing}
    for cluster, sweeps in sweeps_by_cluster.items():
        if cluster in watchers:
            watchers[cluster].sweeps = sweeps
        else:
            root = results_tree(results).cluster(cluster).root
            watchers[cluster] = SweepWatcher(root, read_scheduler_settings(profiles[cluster]), sweeps)
    return [watchers[cluster] for cluster in sweeps_by_cluster]


def _states_by_sweep(watched: WatchedStates) -> States:
    return [
        (sweep, watcher.tree.root.name, {run_id: states[run_id] for run_id in run_ids})
        for watcher, states in watched
        for sweep, run_ids in watcher.sweeps.items()
    ]


def _watch_states(sweeps: tuple[str, ...], cluster_name: str | None, results: str | None, as_json: bool) -> States:
    """Query again and again until no run is queued or running; on a terminal the screen is drawn in place."""
    watchers: list[SweepWatcher] = []
    last_mtimes_ns = None
    # With --json, standard output is for the one document alone.
    with _watch_display(sys.stderr if as_json else sys.stdout) as show:
        while True:
            began_s = time.monotonic()
            if (mtimes_ns := _sweeps_mtimes_ns(results)) != last_mtimes_ns:
                watchers = _make_watchers(select_sweeps(results_tree(results), sweeps, cluster_name), results, watchers)
                last_mtimes_ns = mtimes_ns
            watched = [(watcher, watcher.query()) for watcher in watchers]
            show(watched)
            active = [state for _, states in watched for state in states.values() if state.state in ACTIVE_STATES]
            if not active:
                return _states_by_sweep(watched)
            records = [state.submitted_run.record for state in active if state.submitted_run]
            every_s = max(scheduler_class(record.scheduler, record.cluster).poll_s for record in records)
            time.sleep(poll_pause_s(every_s, time.monotonic() - began_s))


def _sweeps_mtimes_ns(results: str | None) -> list[tuple[str, int]]:
    """For each cluster a time that changes when a sweep is submitted."""
    tree = results_tree(results)
    folders = [(name, tree.cluster(name).root / "sweeps") for name in tree.clusters()]
    return [(name, folder.stat().st_mtime_ns) for name, folder in folders if folder.is_dir()]


@contextlib.contextmanager
def _watch_display(stream: TextIO) -> Iterator[Callable[[WatchedStates], None]]:
    """Yield a function that draws the states on a terminal; elsewhere it prints them whenever something has changed."""
    if stream.isatty():
        with LiveScreen(stream) as screen:
            yield lambda watched: screen.show(
                [snapshot for watcher, states in watched for snapshot in watcher.snapshots(states)]
            )
        return
    last_text = None

    def print_changes(watched: WatchedStates) -> None:
        nonlocal last_text
        if (text := _states_text(_states_by_sweep(watched), stream)) != last_text:
            _print_states(f"{text}\n", stream)
            last_text = text

    yield print_changes


def _states_json(sweep: str, cluster: str, states: dict[str, RunState]) -> dict[str, Any]:
    return {
        "sweep": sweep,
        "cluster": cluster,
        "counts": count_states(states),
        "runs": [
            {"run_id": run_id, "state": state.state, "reason": state.reason, "job_id": state.job_id}
            for run_id, state in states.items()
        ],
    }


@click.command()
@click.argument("run_id")
@click.option("--attempt", type=int, help="Number of the attempt (default: the newest).")
@results_option
def logs(run_id: str, attempt: int | None, results: str | None) -> None:
    """Print the logs of the ranks of RUN_ID, and of its job's script. The first digits of the id are enough."""
    tree, full_id = _find_run(run_id, results)
    folder = tree.run_folder(full_id)
    numbers = attempt_numbers(folder)
    if attempt is not None and attempt not in numbers:
        available = ", ".join(str(number) for number in numbers) or "none"
        raise ConfigError(f"run {full_id} has no attempt {attempt}", hint=f"it has: {available}")
    if not numbers:
        print_message(f"run {full_id} on {tree.root.name} has not begun")
        return
    chosen = Attempt(folder, attempt or numbers[-1])
    print_message(f"run {full_id} on {tree.root.name}, attempt {chosen.number} of {numbers[-1]}")
    submitted_run = find_submitted_runs(tree, {full_id}).get(full_id)
    script_log = job_log(submitted_run) if submitted_run else None
    for path in (chosen.folder / "out.log", chosen.folder / "err.log", script_log):
        if path is not None:
            _print_log(tree, path)


def _find_run(prefix: str, results: str | None) -> tuple[ClusterTree, str]:
    trees = [results_tree(results).cluster(name) for name in results_tree(results).clusters()]
    runs = [(tree, run_id) for tree in trees for run_id in tree.run_ids() if run_id.startswith(prefix)]
    if len(runs) != 1:
        names = [f"{tree.root.name}/{run_id}" for tree, run_id in runs[:10]]
        hint = f"it could be: {', '.join(names)}" if runs else "hpcbench status lists the runs"
        raise ConfigError(f"{len(runs) or 'no'} runs begin with {prefix!r} in {results_tree(results).root}", hint=hint)
    return runs[0]


def _print_log(tree: ClusterTree, path: Path) -> None:
    """Print a log of any length part by part; nothing if it is empty or cannot be read."""
    try:
        tree.path(*path.relative_to(tree.root).parts)
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
