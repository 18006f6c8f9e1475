"""The command ``status``, and the live screen that ``run`` and ``submit --wait`` share with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

import click
from rich.console import Group
from rich.live import Live
from rich.progress import TaskID
from rich.text import Text

from hpcbench.cli.cancel_command import show_audit
from hpcbench.cli.common import (
    cluster_filter_option,
    complete_choices,
    complete_sweeps,
    filter_runs,
    make_console,
    print_json,
    print_message,
    read_options,
    where_option,
    why_nothing,
)
from hpcbench.cli.progress import progress_bar
from hpcbench.config.run_spec import spec_document
from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError, did_you_mean
from hpcbench.fileio import printable_text
from hpcbench.report.status_text import status_text, suspect_nodes_text
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import FAILED_STATUSES
from hpcbench.submit.lock import announce_silence
from hpcbench.submit.run_state import ACTIVE_STATES, RUN_STATES, RunState, count_states
from hpcbench.submit.submission_record import select_sweeps
from hpcbench.submit.watcher import (
    RunCatalog,
    States,
    SweepWatcher,
    Watched,
    has_active_runs,
    make_watchers,
    query_sweeps,
    refresh_until_query,
    states_by_sweep,
)

_REDRAW_S = 5.0
"""Period of the live screen's elapsed and remaining times where no run changes its state."""


class LiveScreen:
    """A bar for each sweep over the rows of ``status``, drawn in place.

    A terminal that has gone, as that of a closed laptop, does not end the command: nothing more is drawn.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = make_console(stderr=stream is sys.stderr)
        self._live = Live(console=self._console, auto_refresh=False)
        self._bars = progress_bar()
        self._tasks: dict[str, TaskID] = {}
        self._catalogs: dict[str, RunCatalog] = {}
        self._shown: tuple[int, States] | None = None
        self._next_s = 0.0

    def __enter__(self) -> LiveScreen:
        with contextlib.suppress(OSError):
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()

    def show(self, watched: Watched) -> None:
        """Draw the present states: at once where they have changed, else every ``_REDRAW_S``."""
        width, entries = self._console.width, states_by_sweep(watched)
        if (width, entries) == self._shown and time.monotonic() < self._next_s:
            return
        self._shown, self._next_s = (width, entries), time.monotonic() + _REDRAW_S
        for watcher, _ in watched:
            self._catalogs.setdefault(watcher.tree.root.name, RunCatalog(watcher.tree))
        parts = []
        for sweep, cluster, states in entries:
            ended = sum(state.state not in (*ACTIVE_STATES, "planned") for state in states.values())
            name = printable_text(f"{sweep} on {cluster}")
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name)
            self._bars.update(self._tasks[name], completed=ended, total=len(states))
            rows = status_text(sweep, cluster, states, width, self._catalogs[cluster].details)
            parts.append(Text.from_ansi(f"\n{rows}"))
        if has_active_runs(watched):
            name = f" {entries[0][0]}" if len(entries) == 1 else ""
            hint = f"\nCtrl-C leaves this screen, the runs go on; back: hpcbench status{name} --watch"
            parts.append(Text(printable_text(hint), "dim"))
        with contextlib.suppress(OSError):
            self._live.update(Group(self._bars, *parts), refresh=True)


def runs_exit_code(states: Mapping[str, RunState]) -> int:
    """1 if a run failed, timed out, was stopped or lost; 0 otherwise."""
    return EXIT_RUNS_FAILED if {state.state for state in states.values()} & {*FAILED_STATUSES, "lost"} else 0


@click.command()
@click.argument("sweeps", nargs=-1, shell_complete=complete_sweeps)
@cluster_filter_option
@click.option("--watch", is_flag=True, help="Stay and show every change until no run is queued or running.")
@where_option
@click.option(
    "--state", "wanted", metavar="STATE", multiple=True, shell_complete=complete_choices,
    help="Only runs in this state; may be repeated.",
)  # fmt: skip
@click.option("--all", "lists_all", is_flag=True, help="List every run.")
@click.option(
    "--audit", "audits", is_flag=True,
    help="Compare the scheduler's whole queue with the tree: jobs sent twice, held or empty, and what frees them.",
)  # fmt: skip
@read_options
def status(
    *, sweeps: tuple[str, ...], cluster_name: str | None, watch: bool, where: str | None, wanted: tuple[str, ...],
    lists_all: bool, audits: bool, results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Show the state of every run of SWEEPS, or of all sweeps in the tree.

    Runs that are neither ok nor planned have a row each: model, strategy, nodes x ranks, batch size, elapsed time.
    """
    if audits:
        if any((watch, where, wanted, lists_all)):
            raise ConfigError("--audit looks at the whole queue", hint="leave out --watch, --where, --state and --all")
        show_audit(sweeps, cluster_name, results, as_json=as_json)
    if unknown := [name for name in wanted if name not in RUN_STATES]:
        raise ConfigError(f"--state {unknown[0]}: no state", hint=did_you_mean(unknown[0], RUN_STATES))
    if watch:
        states = _watch_states(sweeps, cluster_name, results, as_json)
    else:
        with announce_silence(print_message):
            states = query_sweeps(results, sweeps, cluster_name)
    catalogs = {cluster: RunCatalog(results.cluster(cluster)) for _, cluster, _ in states}
    if where is not None:
        states = [
            (sweep, cluster, filter_runs(catalogs[cluster], runs, where, sweep)) for sweep, cluster, runs in states
        ]
    if wanted:
        states = [
            (sweep, cluster, {run_id: state for run_id, state in runs.items() if state.state in wanted})
            for sweep, cluster, runs in states
        ]
    if as_json:
        print_json({"sweeps": [_states_json(*entry, catalogs[entry[1]]) for entry in states]})
    elif not states:
        print_message(why_nothing(results, sweeps, 0))
    elif not watch:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        texts = [status_text(*entry, width, catalogs[entry[1]].details, lists_all=lists_all) for entry in states]
        _print_states("\n\n".join(texts), sys.stdout)
    for _, cluster, runs in states:
        if text := suspect_nodes_text((state.nodes for state in runs.values()), cluster):
            print_message(text)
    sys.exit(max((runs_exit_code(states_of_runs) for _, _, states_of_runs in states), default=0))


def _print_states(text: str, stream: TextIO) -> None:
    click.echo(text, file=stream, color=False if os.environ.get("NO_COLOR") else None)


def _watch_states(sweeps: tuple[str, ...], cluster_name: str | None, results: ResultsTree, as_json: bool) -> States:
    """Query again and again until no run is queued or running; show the states after each query.

    A terminal's screen is drawn in place; elsewhere the states are printed whenever something has changed.
    """
    # With --json, standard output is for the one document alone.
    stream = sys.stderr if as_json else sys.stdout
    screen = LiveScreen(stream) if stream.isatty() else None
    last_text: str | None = None

    def show(watched: Watched) -> None:
        nonlocal last_text
        if screen is not None:
            screen.show(watched)
            return
        text = "\n\n".join(status_text(*entry, None) for entry in states_by_sweep(watched))
        if text != last_text:
            _print_states(f"{text}\n", stream)
            last_text = text

    watchers: list[SweepWatcher] = []
    watched: Watched = []
    last_mtimes_ns = None
    with screen or contextlib.nullcontext():
        while True:
            began_s = time.monotonic()
            # A cluster's folder of sweeps changes with every submission.
            folders = [(name, results.cluster(name).root / "sweeps") for name in results.clusters()]
            mtimes_ns = [(name, folder.stat().st_mtime_ns) for name, folder in folders if folder.is_dir()]
            if mtimes_ns != last_mtimes_ns:
                watchers = make_watchers(select_sweeps(results, sweeps, cluster_name), results, watchers)
                last_mtimes_ns = mtimes_ns
            seen = dict(watched)
            watched = [(one, one.query_again(seen[one]) if one in seen else one.query()) for one in watchers]
            show(watched)
            watched = refresh_until_query(watched, time.monotonic() - began_s, show)
            if not has_active_runs(watched):
                return states_by_sweep(watched)


def _states_json(sweep: str, cluster: str, states: dict[str, RunState], catalog: RunCatalog) -> dict[str, Any]:
    runs = []
    for run_id, state in states.items():
        details = catalog.details(run_id, state)
        runs.append(
            {
                "run_id": run_id,
                "state": state.state,
                "reason": state.reason,
                "job_id": state.job_id,
                "spec": spec_document(details.spec) if details.spec is not None else None,
                "elapsed_s": details.elapsed_s,
                "submitted_by": details.submitted_by,
            }
        )
    return {"sweep": sweep, "cluster": cluster, "counts": count_states(states), "runs": runs}
