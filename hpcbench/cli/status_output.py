"""States and details of submitted runs, and the live screen of ``status``, ``run`` and ``submit --wait``."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.progress import TaskID
from rich.text import Text

from hpcbench.cli.common import make_console, progress_bar
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_loader import spec_condition
from hpcbench.errors import EXIT_RUNS_FAILED
from hpcbench.fileio import printable_text
from hpcbench.report.status_text import RunDetails, status_text
from hpcbench.results.attempts import latest_attempt
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.results.schema import FAILED_STATUSES
from hpcbench.submit.run_state import ACTIVE_STATES, RunState
from hpcbench.submit.submission_record import (
    SweepRecord,
    folder_owner,
    list_submissions,
    read_run_specs,
    select_sweeps,
)
from hpcbench.submit.watcher import SweepWatcher, Watched, has_active_runs

States = list[tuple[str, str, dict[str, RunState]]]
"""Sweep, cluster and the state of each run."""
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


class RunCatalog:
    """Specifications, times and owners of the runs of one cluster, read when they are first asked for."""

    def __init__(self, tree: ClusterTree) -> None:
        self._tree = tree

    @functools.cached_property
    def _submitted(self) -> dict[str, tuple[RunSpec, Path]]:
        """Specification and newest submission of each run."""
        return {
            run_id: (spec, folder)
            for folder, record in list_submissions(self._tree)
            for run_id, spec in read_run_specs(folder, record).items()
        }

    def details(self, run_id: str, state: RunState) -> RunDetails:
        """All that is known of a run."""
        spec, folder = self._submitted.get(run_id, (None, None))
        attempt = latest_attempt(self._tree.run_folder(run_id))
        start = attempt.read_start() if attempt else None
        elapsed_s = None
        if start is not None:
            ended_unix_s = 0.0
            with contextlib.suppress(OSError):
                ended_unix_s = self._tree.result_path(run_id).lstat().st_mtime
            if ended_unix_s < start.started_unix_s:
                # Without a result only the scheduler can have the time at which a run ended.
                ended_unix_s = time.time() if state.state in ACTIVE_STATES else state.ended_unix_s or 0.0
            elapsed_s = ended_unix_s - start.started_unix_s if ended_unix_s >= start.started_unix_s else None
        return RunDetails(spec, elapsed_s, folder_owner(folder) if folder is not None else None)

    def satisfying(self, states: Mapping[str, RunState], where: str) -> dict[str, RunState]:
        """Those of ``states`` whose parameters satisfy the expression ``where``."""
        is_wanted = spec_condition(where)
        return {
            run_id: state
            for run_id, state in states.items()
            if run_id in self._submitted and is_wanted(self._submitted[run_id][0])
        }


def make_watchers(
    selected: list[tuple[str, SweepRecord]], results: ResultsTree, existing: Iterable[SweepWatcher] = ()
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
            root = results.cluster(cluster).root
            watchers[cluster] = SweepWatcher(root, load_cluster(profiles[cluster])[0], sweeps)
    return [watchers[cluster] for cluster in sweeps_by_cluster]


def query_sweeps(results: ResultsTree, sweeps: Sequence[str], cluster: str | None) -> States:
    watchers = make_watchers(select_sweeps(results, sweeps, cluster), results)
    return states_by_sweep([(watcher, watcher.query()) for watcher in watchers])


def states_by_sweep(watched: Watched) -> States:
    return [
        (sweep, watcher.tree.root.name, {run_id: states[run_id] for run_id in run_ids})
        for watcher, states in watched
        for sweep, run_ids in watcher.sweeps.items()
    ]
