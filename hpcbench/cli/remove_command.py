"""The command ``results rm``: measurements that are no longer wanted."""

from __future__ import annotations

import contextlib
import shutil
import time

import click

from hpcbench.cli.common import (
    cluster_filter_option,
    filter_runs,
    print_json,
    print_message,
    read_options,
    run_prefix_option,
    runs_with_prefix,
    sweep_argument,
)
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.fileio import write_error
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.submit.journal import drop_runs
from hpcbench.submit.leftovers import folder_size
from hpcbench.submit.lock import LeaseLock, announce_silence, exclusive_lock
from hpcbench.submit.run_state import ACTIVE_STATES, run_states
from hpcbench.submit.submission_record import SweepRecord, find_submitted_runs, select_sweeps
from hpcbench.submit.watcher import RunCatalog
from hpcbench.units import format_bytes, pluralize


@click.group("results")
def results_group() -> None:
    """Remove measurements that are no longer wanted."""


@results_group.command("rm")
@sweep_argument
@cluster_filter_option
@run_prefix_option
@click.option("--where", metavar="EXPR", help="Only runs whose parameters satisfy the expression.")
@click.option("--yes", "removes", is_flag=True, help="Remove them. Without this option nothing is changed.")
@read_options
def remove_results(
    *, sweep: str, cluster_name: str | None, prefix: str | None, where: str | None, removes: bool,
    results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Show the runs of SWEEP that have files, with their size; --yes removes their results, logs and attempts.

    submit then measures them anew. Runs that are queued or running, and those that are also in another sweep, are kept.
    Without --run and --where the record of the sweep is removed, too.
    """
    documents = []
    for cluster, record in select_sweeps(results, (sweep,), cluster_name):
        tree = results.cluster(cluster)
        with announce_silence(print_message), contextlib.ExitStack() as stack:
            # A tree that may only be read is shown, too.
            lock = stack.enter_context(exclusive_lock(tree.submissions / ".lock")) if removes else None
            chosen = _removable_runs(tree, record, cluster, prefix, where)
            size_bytes = sum(folder_size(tree.run_folder(run_id)) for run_id in chosen)
            if lock is not None:
                _remove_runs(tree, chosen, lock)
                if where is None and prefix is None and not tree.existing_runs() & {*record.run_ids}:
                    tree.sweep_path(record.sweep).unlink(missing_ok=True)
                    tree.sweep_path(record.sweep).with_suffix(".toml").unlink(missing_ok=True)
        outcome = "removed" if removes else "to remove; nothing was changed, --yes removes them"
        counted = f"{pluralize(len(chosen), 'run')}, {format_bytes(size_bytes)}"
        print_message(f"{record.sweep} on {cluster}: {counted} {outcome}")
        documents.append({"sweep": record.sweep, "cluster": cluster, "run_ids": chosen, "size_bytes": size_bytes})
    if as_json:
        print_json({"removed": removes, "sweeps": documents})


def _removable_runs(
    tree: ClusterTree, record: SweepRecord, cluster: str, prefix: str | None, where: str | None
) -> list[str]:
    """Return the runs with files that may be removed; a message counts the others."""
    profile, _ = load_cluster(record.profile)
    states = run_states(tree, record.run_ids, profile, time.time())
    if prefix is not None:
        states = runs_with_prefix(states, prefix, record.sweep)
    if where is not None:
        states = filter_runs(RunCatalog(tree), states, where, record.sweep)
    others = select_sweeps(ResultsTree(tree.root.parent), (), cluster)
    shared = {run_id for _, other in others if other.sweep != record.sweep for run_id in other.run_ids}
    active = {run_id for run_id, state in states.items() if state.state in ACTIVE_STATES}
    there = tree.existing_runs() & states.keys()
    reasons = {f"queued or running: hpcbench cancel {record.sweep}": active, "in another sweep, too": shared}
    for reason, kept in reasons.items():
        if count := len(kept & there):
            print_message(f"{pluralize(count, 'run')} kept: {reason}")
    return sorted(there - active - shared)


def _remove_runs(tree: ClusterTree, run_ids: list[str], lock: LeaseLock) -> None:
    """Remove runs from their submissions, so that they count as never begun, and then their folders."""
    by_submission: dict[str, list[str]] = {}
    for run_id, run in find_submitted_runs(tree, set(run_ids)).items():
        by_submission.setdefault(run.folder.name, []).append(run_id)
    for name, dropped in by_submission.items():
        drop_runs(tree.submissions / name, dropped)
    for run_id in run_ids:
        lock.check_held()
        folder = tree.run_folder(run_id)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise write_error(error, folder) from error
