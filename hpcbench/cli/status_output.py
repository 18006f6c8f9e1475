"""The output of ``status`` and ``logs``, and the live screen of ``status``, ``run`` and ``submit --wait``."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import click

from hpcbench.cli.common import make_console, print_json, print_message, progress_bar, why_nothing
from hpcbench.config.run_spec import RunSpec, spec_document
from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError, StorageError, did_you_mean
from hpcbench.fileio import UnsafeFileError, open_regular, printable_text
from hpcbench.report.status_text import RunDetails, status_text, suspect_nodes_text
from hpcbench.results.attempts import Attempt, attempt_numbers, latest_attempt
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.results.schema import FAILED_STATUSES
from hpcbench.submit.run_state import ACTIVE_STATES, RUN_STATES, RunState, count_states, run_states
from hpcbench.submit.scheduler import job_log, read_scheduler_settings
from hpcbench.submit.silence import announce_silence
from hpcbench.submit.submission_record import (
    SweepRecord,
    find_submitted_runs,
    folder_owner,
    list_submissions,
    read_run_specs,
    select_sweeps,
)
from hpcbench.submit.watcher import SweepWatcher, Watched, has_active_runs, refresh_until_query

if TYPE_CHECKING:
    from rich.progress import TaskID

    States = list[tuple[str, str, dict[str, RunState]]]
    """Sweep, cluster and the state of each run."""

_LOG_PART_CHARACTERS = 2**20
_FOLLOW_PAUSE_S = 0.5
_REDRAW_S = 5.0
"""Period of the live screen's elapsed and remaining times where no run changes its state."""


class LiveScreen:
    """A bar for each sweep over the rows of ``status``, drawn in place.

    A terminal that has gone, as that of a closed laptop, does not end the command: nothing more is drawn.
    """

    def __init__(self, stream: TextIO) -> None:
        # Imported here: plain `status` starts without rich.
        from rich.live import Live

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
        from rich.console import Group
        from rich.text import Text

        width, entries = self._console.width, _states_by_sweep(watched)
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


def show_status(
    *, sweeps: tuple[str, ...], cluster_name: str | None, watch: bool, where: str | None, wanted: tuple[str, ...],
    lists_all: bool, results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Run the command ``status``; ends it with its exit code."""
    for name in wanted:
        if name not in RUN_STATES:
            raise ConfigError(f"--state {name}: no state", hint=did_you_mean(name, RUN_STATES))
    if watch:
        states = _watch_states(sweeps, cluster_name, results, as_json)
    else:
        with announce_silence(print_message):
            states = _query_sweeps(results, sweeps, cluster_name)
    catalogs = {cluster: RunCatalog(results.cluster(cluster)) for _, cluster, _ in states}
    if where is not None:
        states = [(sweep, cluster, catalogs[cluster].satisfying(runs, where)) for sweep, cluster, runs in states]
    if wanted:
        states = [
            (sweep, cluster, {run_id: state for run_id, state in runs.items() if state.state in wanted})
            for sweep, cluster, runs in states
        ]
    if as_json:
        print_json({"sweeps": [_states_json(*entry, catalogs[entry[1]]) for entry in states]})
    elif not watch and not states:
        print_message(why_nothing(results, sweeps, 0))
    elif not watch:
        width = _text_width(sys.stdout)
        texts = [status_text(*entry, width, catalogs[entry[1]].details, lists_all=lists_all) for entry in states]
        _print_states("\n\n".join(texts), sys.stdout)
    for _, cluster, runs in states:
        if text := suspect_nodes_text((state.nodes for state in runs.values()), cluster):
            print_message(text)
    sys.exit(max((runs_exit_code(states_of_runs) for _, _, states_of_runs in states), default=0))


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
        # Imported here: `status` without a condition starts without pydantic.
        from hpcbench.cli.load_plan import spec_condition

        is_wanted = spec_condition(where)
        return {
            run_id: state
            for run_id, state in states.items()
            if run_id in self._submitted and is_wanted(self._submitted[run_id][0])
        }


def _text_width(stream: TextIO) -> int | None:
    if not stream.isatty():
        return None
    # Imported here: it imports the compression libraries.
    import shutil

    return shutil.get_terminal_size().columns


def _print_states(text: str, stream: TextIO) -> None:
    click.echo(text, file=stream, color=False if os.environ.get("NO_COLOR") else None)


def _make_watchers(
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
            watchers[cluster] = SweepWatcher(root, read_scheduler_settings(profiles[cluster]), sweeps)
    return [watchers[cluster] for cluster in sweeps_by_cluster]


def _query_sweeps(results: ResultsTree, sweeps: Sequence[str], cluster: str | None) -> States:
    watchers = _make_watchers(select_sweeps(results, sweeps, cluster), results)
    return _states_by_sweep([(watcher, watcher.query()) for watcher in watchers])


def _states_by_sweep(watched: Watched) -> States:
    return [
        (sweep, watcher.tree.root.name, {run_id: states[run_id] for run_id in run_ids})
        for watcher, states in watched
        for sweep, run_ids in watcher.sweeps.items()
    ]


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
        text = "\n\n".join(status_text(*entry, None) for entry in _states_by_sweep(watched))
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
                watchers = _make_watchers(select_sweeps(results, sweeps, cluster_name), results, watchers)
                last_mtimes_ns = mtimes_ns
            seen = dict(watched)
            watched = [(one, one.query_again(seen[one]) if one in seen else one.query()) for one in watchers]
            show(watched)
            watched = refresh_until_query(watched, time.monotonic() - began_s, show)
            if not has_active_runs(watched):
                return _states_by_sweep(watched)


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


def show_logs(
    *, run_id: str, cluster_name: str | None, attempt: int | None, failed: bool, where: str | None, follow: bool,
    results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Run the command ``logs``."""
    runs = _select_runs(run_id, cluster_name, results, failed=failed, where=where)
    if as_json:
        print_json({"logs": [_log_json(tree, full_id, attempt) for tree, full_id in runs]})
        return
    printed: dict[Path, int] = {}
    for tree, full_id in runs:
        files = _log_files(tree, full_id, attempt)
        if not files and not follow:
            print_message(f"run {full_id} on {tree.root.name} has not begun")
            continue
        if files:
            number, last = files[0].parent.name, attempt_numbers(tree.run_folder(full_id))[-1]
            print_message(f"run {full_id} on {tree.root.name}, attempt {number} of {last}")
        for path in files:
            printed[path] = _print_log(tree, path)
    while follow and _has_active_run(runs):
        time.sleep(_FOLLOW_PAUSE_S)
        for tree, full_id in runs:
            for path in _log_files(tree, full_id, attempt):
                printed[path] = _print_log(tree, path, printed.get(path, 0))


def _has_active_run(runs: Sequence[tuple[ClusterTree, str]]) -> bool:
    by_cluster: dict[str, tuple[ClusterTree, list[str]]] = {}
    for tree, run_id in runs:
        by_cluster.setdefault(tree.root.name, (tree, []))[1].append(run_id)
    states = (
        run_states(tree, run_ids, read_scheduler_settings(cluster), time.time())
        for cluster, (tree, run_ids) in by_cluster.items()
    )
    return any(state.state in ACTIVE_STATES for of_cluster in states for state in of_cluster.values())


def _select_runs(
    source: str, cluster: str | None, results: ResultsTree, *, failed: bool, where: str | None
) -> list[tuple[ClusterTree, str]]:
    """The run whose id begins with ``source``, or the runs of the sweep of that name that pass the filters."""
    trees = [results.cluster(name) for name in results.clusters() if cluster in (None, name)]
    runs = [(tree, run_id) for tree in trees for run_id in tree.run_ids() if run_id.startswith(source)]
    is_sweep = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", source) and any(
        tree.sweep_path(source).is_file() for tree in trees
    )
    if len(runs) == 1:
        return runs
    if runs or not is_sweep:
        if not runs:
            hint = "hpcbench status lists the runs; a sweep has logs once it was submitted"
            message = f"no runs begin with {source!r} in {results.root}, and no submitted sweep has that name"
            raise ConfigError(message, hint=hint)
        names = ", ".join(f"{tree.root.name}/{run_id}" for tree, run_id in runs[:10])
        raise ConfigError(f"{len(runs)} runs begin with {source!r} in {results.root}", hint=f"it could be: {names}")
    failures = {*FAILED_STATUSES, "lost", "unsupported", "oom"}
    chosen = []
    for _, name, states in _query_sweeps(results, (source,), cluster):
        matching = states if where is None else RunCatalog(results.cluster(name)).satisfying(states, where)
        chosen += [
            (results.cluster(name), run_id)
            for run_id, state in matching.items()
            if not failed or state.state in failures
        ]
    if not chosen:
        print_message(f"no run of {source} {'has failed' if failed and where is None else 'matches'}")
    return chosen


def _log_files(tree: ClusterTree, run_id: str, attempt: int | None) -> list[Path]:
    """The logs of the ranks, and of the job's script; none if the run has not begun."""
    folder = tree.run_folder(run_id)
    numbers = attempt_numbers(folder)
    if attempt is not None and attempt not in numbers:
        available = ", ".join(str(number) for number in numbers) or "none"
        raise ConfigError(f"run {run_id} has no attempt {attempt}", hint=f"it has: {available}")
    if not numbers:
        return []
    chosen = Attempt(folder, attempt or numbers[-1])
    submitted_run = find_submitted_runs(tree, {run_id}).get(run_id)
    script_log = job_log(submitted_run) if submitted_run else None
    return [chosen.folder / "out.log", chosen.folder / "err.log", *([script_log] if script_log else [])]


def _log_json(tree: ClusterTree, run_id: str, attempt: int | None) -> dict[str, Any]:
    files = []
    for path in _log_files(tree, run_id, attempt):
        with contextlib.suppress(StorageError, UnsafeFileError, OSError):
            tree.path(*path.relative_to(tree.root).parts)
            with open(open_regular(path), encoding="utf-8", errors="replace", newline="") as file:
                files.append({"path": str(path), "text": file.read()})
    return {"run_id": run_id, "cluster": tree.root.name, "files": files}


def _print_log(tree: ClusterTree, path: Path, offset: int = 0) -> int:
    """Print a log of any length from ``offset`` (bytes) on, part by part; return where the next call goes on.

    Nothing is printed if there is nothing more or it cannot be read.
    """
    try:
        tree.path(*path.relative_to(tree.root).parts)
        descriptor = open_regular(path)
    except (StorageError, UnsafeFileError) as error:
        if not offset:
            print_message(f"---- {path} ----\npassed over: {error}")
        return 1
    except OSError:
        return offset
    with open(descriptor, "rb") as binary, io.TextIOWrapper(binary, "utf-8", errors="replace", newline="") as file:
        binary.seek(offset)
        last = ""
        while part := file.read(_LOG_PART_CHARACTERS):
            if not last and not offset:
                print_message(f"---- {path} ----")
            click.echo(printable_text(part), nl=False)
            last = part
        if last and not last.endswith("\n"):
            click.echo()
        return binary.tell()
