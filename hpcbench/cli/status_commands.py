"""The commands ``status`` and ``logs``, and the live screen of ``status``, ``run`` and ``submit --wait``."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec

from hpcbench.cli.common import (
    cluster_filter_option,
    json_option,
    make_console,
    print_json,
    print_message,
    results_option,
    results_tree,
    runs_exit_code,
    where_option,
    why_nothing,
)
from hpcbench.cli.completion import complete_choices, complete_runs, complete_sweeps
from hpcbench.config.run_spec import RunSpec, spec_document
from hpcbench.errors import ConfigError, StorageError, did_you_mean
from hpcbench.fileio import UnsafeFileError, open_regular, printable_text
from hpcbench.report.status_text import RunDetails, status_text, suspect_nodes_text
from hpcbench.results.attempts import Attempt, attempt_numbers, latest_attempt
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.results.schema import FAILED_STATUSES, STATUSES
from hpcbench.submit.run_state import ACTIVE_STATES, RunState, count_states, run_states
from hpcbench.submit.scheduler import announce_silence, job_log, read_scheduler_settings
from hpcbench.submit.submission_record import (
    SweepRecord,
    find_submitted_runs,
    folder_owner,
    list_submissions,
    read_run_specs,
    select_sweeps,
)
from hpcbench.submit.watcher import SweepSnapshot, SweepWatcher, Watched, has_active_runs, refresh_until_query

if TYPE_CHECKING:
    from rich.text import Text

    States = list[tuple[str, str, dict[str, RunState]]]
    """Sweep, cluster and the state of each run."""

RUN_STATES = frozenset({*STATUSES, *ACTIVE_STATES, "planned", "lost"})
"""The choices of ``--state``."""
_LOG_PART_CHARACTERS = 2**20
_FOLLOW_PAUSE_S = 0.5


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
@click.argument("sweeps", nargs=-1, shell_complete=complete_sweeps)
@cluster_filter_option
@click.option("--watch", is_flag=True, help="Stay and show every change until no run is queued or running.")
@where_option
@click.option(
    "--state", "wanted", metavar="STATE", multiple=True, shell_complete=complete_choices,
    help="Only runs in this state; may be repeated.",
)  # fmt: skip
@click.option("--all", "lists_all", is_flag=True, help="Give every run a row.")
@results_option
@json_option
def status(
    *, sweeps: tuple[str, ...], cluster_name: str | None, watch: bool, where: str | None, wanted: tuple[str, ...],
    lists_all: bool, results: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show the state of every run of SWEEPS, or of all sweeps in the tree.

    Runs that are neither ok nor planned have a row each: model, strategy, nodes x ranks, batch size, elapsed time.
    """
    for name in wanted:
        if name not in RUN_STATES:
            raise ConfigError(f"--state {name}: no state", hint=did_you_mean(name, RUN_STATES))
    if watch:
        states = _watch_states(sweeps, cluster_name, results, as_json)
    else:
        watchers = _make_watchers(select_sweeps(results_tree(results), sweeps, cluster_name), results)
        with announce_silence(print_message):
            states = _states_by_sweep([(watcher, watcher.query()) for watcher in watchers])
    catalogs = {cluster: RunCatalog(results_tree(results).cluster(cluster)) for _, cluster, _ in states}
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
        print_message(why_nothing(results_tree(results), sweeps, 0))
    elif not watch:
        width = _text_width(sys.stdout)
        texts = [status_text(*entry, width, catalogs[entry[1]].details, lists_all=lists_all) for entry in states]
        _print_states("\n\n".join(texts), sys.stdout)
    for _, cluster, runs in states:
        if text := suspect_nodes_text((state.nodes for state in runs.values()), cluster):
            print_message(text)
    sys.exit(max((runs_exit_code(states_of_runs) for _, _, states_of_runs in states), default=0))


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

    def details(self, run_id: str) -> RunDetails:
        """All that is known of a run."""
        spec, folder = self._submitted.get(run_id, (None, None))
        attempt = latest_attempt(self._tree.run_folder(run_id))
        start = attempt.read_start() if attempt else None
        elapsed_s = owner = None
        if start is not None:
            try:
                ended_unix_s = (self._tree.run_folder(run_id) / "result.json").lstat().st_mtime
            except OSError:
                ended_unix_s = 0.0
            elapsed_s = (ended_unix_s if ended_unix_s >= start.started_unix_s else time.time()) - start.started_unix_s
        if folder is not None:
            owner = folder_owner(folder)
        return RunDetails(spec, elapsed_s, owner)

    def satisfying(self, states: Mapping[str, RunState], where: str) -> dict[str, RunState]:
        """Those of ``states`` whose parameters satisfy the expression ``where``."""
        # Imported here: `status` without a condition starts without pydantic.
        from hpcbench.config.expression import Expression
        from hpcbench.config.sweep_loader import COMPUTED_NAMES, expression_values

        condition = Expression(where, [*RunSpec.__struct_fields__, *COMPUTED_NAMES], "--where")
        return {
            run_id: state
            for run_id, state in states.items()
            if run_id in self._submitted
            and condition.holds(expression_values(msgspec.structs.asdict(self._submitted[run_id][0])))
        }


def _text_width(stream: TextIO) -> int | None:
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _states_text(states: States, stream: TextIO) -> str:
    """The states as text; reasons are broken into lines on a terminal alone."""
    return "\n\n".join(status_text(*entry, _text_width(stream)) for entry in states)


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


def _states_by_sweep(watched: Watched) -> States:
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
            watched = refresh_until_query(watched, time.monotonic() - began_s, show)
            if not has_active_runs(watched):
                return _states_by_sweep(watched)


def _sweeps_mtimes_ns(results: str | None) -> list[tuple[str, int]]:
    """Return for each cluster a modification time that changes with every submission."""
    tree = results_tree(results)
    folders = [(name, tree.cluster(name).root / "sweeps") for name in tree.clusters()]
    return [(name, folder.stat().st_mtime_ns) for name, folder in folders if folder.is_dir()]


@contextlib.contextmanager
def _watch_display(stream: TextIO) -> Iterator[Callable[[Watched], None]]:
    """Yield a function that draws the states on a terminal; elsewhere it prints them whenever something has changed."""
    if stream.isatty():
        with LiveScreen(stream) as screen:
            yield lambda watched: screen.show(
                [snapshot for watcher, states in watched for snapshot in watcher.snapshots(states)]
            )
        return
    last_text = None

    def print_changes(watched: Watched) -> None:
        nonlocal last_text
        if (text := _states_text(_states_by_sweep(watched), stream)) != last_text:
            _print_states(f"{text}\n", stream)
            last_text = text

    yield print_changes


def _states_json(sweep: str, cluster: str, states: dict[str, RunState], catalog: RunCatalog) -> dict[str, Any]:
    return {
        "sweep": sweep,
        "cluster": cluster,
        "counts": count_states(states),
        "runs": [_run_json(run_id, state, catalog.details(run_id)) for run_id, state in states.items()],
    }


def _run_json(run_id: str, state: RunState, details: RunDetails) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "state": state.state,
        "reason": state.reason,
        "job_id": state.job_id,
        "spec": spec_document(details.spec) if details.spec is not None else None,
        "elapsed_s": details.elapsed_s,
        "submitted_by": details.submitted_by,
    }


@click.command()
@click.argument("run_id", metavar="RUN_ID|SWEEP", shell_complete=complete_runs)
@cluster_filter_option
@click.option("--attempt", type=int, help="Number of the attempt (default: the newest).")
@click.option("--failed", is_flag=True, help="Of a sweep: only runs that failed, timed out, were stopped or lost.")
@where_option
@click.option("--follow", is_flag=True, help="Print what is added until the runs have ended.")
@results_option
@json_option
def logs(
    *, run_id: str, cluster_name: str | None, attempt: int | None, failed: bool, where: str | None, follow: bool,
    results: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Print the logs of the ranks of a run, and of its job's script; or those of the runs of a sweep.

    The first digits of a run's id are enough.
    """
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
    while follow and any(is_active for _, is_active in _activity(runs)):
        time.sleep(_FOLLOW_PAUSE_S)
        for tree, full_id in runs:
            for path in _log_files(tree, full_id, attempt):
                printed[path] = _print_log(tree, path, printed.get(path, 0))


def _activity(runs: Sequence[tuple[ClusterTree, str]]) -> Iterator[tuple[str, bool]]:
    """Each run, and whether it is queued or running."""
    by_cluster: dict[str, tuple[ClusterTree, list[str]]] = {}
    for tree, run_id in runs:
        by_cluster.setdefault(tree.root.name, (tree, []))[1].append(run_id)
    for cluster, (tree, run_ids) in by_cluster.items():
        states = run_states(tree, run_ids, read_scheduler_settings(cluster), time.time())
        yield from ((run_id, state.state in ACTIVE_STATES) for run_id, state in states.items())


def _select_runs(
    source: str, cluster: str | None, results: str | None, *, failed: bool, where: str | None
) -> list[tuple[ClusterTree, str]]:
    """The run whose id begins with ``source``, or the runs of the sweep of that name that pass the filters."""
    tree = results_tree(results)
    trees = [tree.cluster(name) for name in tree.clusters() if cluster in (None, name)]
    runs = [(one, run_id) for one in trees for run_id in one.run_ids() if run_id.startswith(source)]
    is_sweep = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", source) and any(
        one.sweep_path(source).is_file() for one in trees
    )
    if runs or not is_sweep:
        return [_single_run(runs, source, tree)]
    selected = select_sweeps(tree, (source,), cluster)
    watchers = _make_watchers(selected, results)
    chosen = []
    for _, name, states in _states_by_sweep([(watcher, watcher.query()) for watcher in watchers]):
        matching = states if where is None else RunCatalog(tree.cluster(name)).satisfying(states, where)
        failures = {*FAILED_STATUSES, "lost", "unsupported", "oom"}
        chosen += [
            (tree.cluster(name), run_id) for run_id, state in matching.items() if not failed or state.state in failures
        ]
    if not chosen:
        print_message(f"no run of {source} {'has failed' if failed and where is None else 'matches'}")
    return chosen


def _single_run(runs: list[tuple[ClusterTree, str]], prefix: str, tree: ResultsTree) -> tuple[ClusterTree, str]:
    if len(runs) != 1:
        names = [f"{one.root.name}/{run_id}" for one, run_id in runs[:10]]
        hint = f"it could be: {', '.join(names)}" if runs else "hpcbench status lists the runs"
        raise ConfigError(f"{len(runs) or 'no'} runs begin with {prefix!r} in {tree.root}", hint=hint)
    return runs[0]


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
