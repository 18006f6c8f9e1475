"""The command ``clean``: shows, and with ``--yes`` removes, the leftovers in a results tree."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict

import click

from hpcbench.cli.common import (
    cluster_filter_option,
    complete_sweeps,
    output_options,
    print_json,
    print_message,
    project_relative,
)
from hpcbench.errors import EXIT_SYSTEM_REFUSED, ConfigError, did_you_mean
from hpcbench.fileio import printable_text
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.submit.leftovers import LeftoverSearch, find_leftovers, remove_leftovers
from hpcbench.submit.lock import announce_silence
from hpcbench.submit.submission_record import select_sweeps
from hpcbench.units import format_bytes, parse_quantity, pluralize

_MAX_ROWS_OF_KIND = 20


@click.command()
@click.argument("sweep", required=False, shell_complete=complete_sweeps)
@click.option("--all", "takes_all", is_flag=True, help="All sweeps of the tree, and runs that belong to none.")
@cluster_filter_option
@click.option(
    "--older-than", metavar="TIME", default="30 days", show_default=True,
    help="Only files unchanged for this long, for example '2 h'.",
)  # fmt: skip
@click.option("--yes", "removes", is_flag=True, help="Remove it. Without this option nothing is changed.")
@output_options
def clean(
    *, sweep: str | None, takes_all: bool, cluster_name: str | None, older_than: str, removes: bool,
    results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Show old files of SWEEP, or of all sweeps, that no record names, with their size; --yes removes them.

    \b
    unfinished submission   of a submit that was killed before it sent anything
    old submission          none of its runs is in a sweep or measured anything
    orphan                  a run that belongs to no sweep and has neither an ok nor an oom result
    temporary file          of a process that died while it wrote

    Measurements are kept. The scheduler is not asked: TIME must be longer than a job waits and runs.
    """
    if (sweep is None) != takes_all:
        raise ConfigError("clean takes one of SWEEP and --all", hint="hpcbench clean --all shows, --yes removes")
    try:
        min_age_s = parse_quantity(older_than, "time")
    except ValueError as error:
        raise ConfigError(str(error), where="--older-than") from None
    searches = []
    for tree, name in _selected_trees(results, sweep, cluster_name):
        with announce_silence(print_message):
            search = (remove_leftovers if removes else find_leftovers)(
                tree, sweep=name, min_age_s=min_age_s, now_unix_s=time.time()
            )
        searches.append((tree.root.name, search))
    if as_json:
        print_json(
            {
                "removed": removes,
                "size_bytes": sum(leftover.size_bytes for _, search in searches for leftover in search.items),
                "clusters": [
                    {
                        "cluster": cluster,
                        "leftovers": [asdict(leftover) | {"path": str(leftover.path)} for leftover in search.items],
                        "kept": search.kept,
                        "failed": [str(failure) for failure in search.failed],
                    }
                    for cluster, search in searches
                ],
            }
        )
    else:
        for cluster, search in searches:
            _print_search(cluster, search)
        print_message(_summary(searches, removes=removes))
    for failure in (failure for _, search in searches for failure in search.failed):
        print_message(f"error: {failure}")
    sys.exit(EXIT_SYSTEM_REFUSED if any(search.failed for _, search in searches) else 0)


def _selected_trees(tree: ResultsTree, sweep: str | None, cluster: str | None) -> list[tuple[ClusterTree, str | None]]:
    if sweep is not None:
        return [(tree.cluster(name), record.sweep) for name, record in select_sweeps(tree, (sweep,), cluster)]
    clusters = tree.clusters()
    if cluster is not None and cluster not in clusters:
        raise ConfigError(f"no results of cluster {cluster!r} in {tree.root}", hint=did_you_mean(cluster, clusters))
    return [(tree.cluster(name), None) for name in ([cluster] if cluster else clusters)]


def _print_search(cluster: str, search: LeftoverSearch) -> None:
    counts = Counter(leftover.kind for leftover in search.items)
    shown: Counter[str] = Counter()
    for leftover in search.items:
        shown[leftover.kind] += 1
        if shown[leftover.kind] <= _MAX_ROWS_OF_KIND:
            size, path = format_bytes(leftover.size_bytes), printable_text(project_relative(leftover.path))
            click.echo(f"{leftover.kind:22} {size:>9}  {path}: {leftover.reason}")
    for kind, count in counts.items():
        if count > _MAX_ROWS_OF_KIND:
            click.echo(f"and {count - _MAX_ROWS_OF_KIND} more of kind {kind}: --json lists all")
    for reason in search.kept:
        print_message(f"{cluster}: kept {reason}")


def _summary(searches: list[tuple[str, LeftoverSearch]], *, removes: bool) -> str:
    items = [leftover for _, search in searches for leftover in search.items]
    if not items:
        return "nothing to remove"
    size = format_bytes(sum(leftover.size_bytes for leftover in items))
    text = f"{pluralize(len(items), 'leftover')}, {size}"
    return f"{text} removed" if removes else f"{text}: nothing was changed, --yes removes them"
