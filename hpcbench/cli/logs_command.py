"""The command ``logs``."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpcbench.cli.common import (
    cluster_filter_option,
    complete_runs,
    print_json,
    print_message,
    read_options,
    where_option,
)
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.errors import ConfigError, StorageError
from hpcbench.fileio import UnsafeFileError, open_regular, printable_text
from hpcbench.results.attempts import Attempt, attempt_numbers
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.results.schema import FAILED_STATUSES
from hpcbench.submit.run_state import ACTIVE_STATES, run_states
from hpcbench.submit.scheduler_registry import job_log
from hpcbench.submit.submission_record import find_submitted_runs
from hpcbench.submit.watcher import RunCatalog, query_sweeps

_LOG_PART_CHARACTERS = 2**20
_FOLLOW_PAUSE_S = 0.5


@click.command()
@click.argument("run_id", metavar="RUN_ID|SWEEP", shell_complete=complete_runs)
@cluster_filter_option
@click.option("--attempt", type=int, help="Number of the attempt (default: the newest).")
@click.option("--failed", is_flag=True, help="Of a sweep: only runs that failed, timed out, were stopped or lost.")
@where_option
@click.option("--follow", is_flag=True, help="Print new lines until the runs have ended.")
@read_options
def logs(
    *, run_id: str, cluster_name: str | None, attempt: int | None, failed: bool, where: str | None, follow: bool,
    results: ResultsTree, as_json: bool,
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
        run_states(tree, run_ids, load_cluster(cluster)[0], time.time())
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
    for _, name, states in query_sweeps(results, (source,), cluster):
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
    # The output of a user's own command has a file for each rank.
    ranks = sorted(chosen.folder.glob("rank-*.log"), key=lambda path: int(path.stem.removeprefix("rank-")))
    return [chosen.folder / "out.log", chosen.folder / "err.log", *ranks, *([script_log] if script_log else [])]


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
