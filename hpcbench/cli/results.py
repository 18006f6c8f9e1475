"""``collect`` and ``table``: what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcbench.cli.common import console, json_option, print_json, results_option, say, tree

if TYPE_CHECKING:
    from hpcbench.results.collect import Collected
    from hpcbench.results.store import ResultsTree


@click.command()
@click.argument("sweeps", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="A .json, .csv or .parquet file.")
@results_option
@json_option
def collect(
    sweeps: tuple[str, ...], cluster_name: str | None, out: Path | None, results: str | None, as_json: bool
) -> None:
    """Gather the results of SWEEPS, or of the whole tree, into one file or onto standard output.

    SWEEPS are names, sweep files, or bundles (.tar.gz).
    """
    from hpcbench.report.export import export
    from hpcbench.results.schema import result_json

    found = list(_collected(tree(results), sweeps, [cluster_name] if cluster_name else None))
    for entry in found:
        if entry.result is None:
            say(f"{entry.cluster}/{entry.run_id}: {entry.problem}")
    whole = [entry.result for entry in found if entry.result is not None]
    if out is not None:
        export(whole, out)
        say(f"{len(whole)} results written to {out}")
    if as_json or out is None:
        print_json({"results": [result_json(result) for result in whole]})


@click.command()
@click.argument("sweeps", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@results_option
@json_option
def table(sweeps: tuple[str, ...], cluster_name: str | None, results: str | None, as_json: bool) -> None:
    """Print the results of SWEEPS, or of the whole tree, as a table.

    SWEEPS are names, sweep files, or bundles (.tar.gz).
    """
    show_table(tree(results), sweeps, [cluster_name] if cluster_name else None, as_json=as_json)


def show_table(results: ResultsTree, sweeps: Sequence[str], clusters: list[str] | None, *, as_json: bool) -> None:
    """Print the table of some sweeps; of everything in the tree where none is named."""
    from hpcbench.report.rows import make_rows

    rows = make_rows(_collected(results, sweeps, clusters))
    if as_json:
        from hpcbench.report.export import table_json

        print_json(table_json(rows))
        return
    if not rows:
        say(f"no results yet in {', '.join(sweeps) or results.root}")
        return
    from hpcbench.report.tables import results_table

    title = ", ".join(Path(one).name for one in sweeps) if sweeps else str(results.root)
    where = sorted({row.cluster for row in rows})
    console().print(results_table(rows, f"{title} on {', '.join(where)}"))


def _collected(results: ResultsTree, sweeps: Sequence[str], clusters: list[str] | None) -> list[Collected]:
    from hpcbench.report.select import select_sweeps
    from hpcbench.results.bundle import is_bundle
    from hpcbench.results.collect import collect as read
    from hpcbench.results.unbundle import collect_bundle

    found: list[Collected] = []
    if not sweeps:
        for name in clusters or results.clusters():
            found += read(results.cluster(name))
        return found
    seen: set[tuple[str, str]] = set()
    chosen: list[str | None] = [*clusters] if clusters else [None]
    named = [one for one in sweeps if not is_bundle(one)]
    for cluster in chosen if named else []:
        for name, record in select_sweeps(results, named, cluster):
            fresh = [run_id for run_id in record.run_ids if (name, run_id) not in seen]
            seen.update((name, run_id) for run_id in fresh)
            found += read(results.cluster(name), fresh)
    for one in sweeps:
        if is_bundle(one):
            entries = collect_bundle(Path(one), clusters)
            found += [entry for entry in entries if (entry.cluster, entry.run_id) not in seen]
            seen.update((entry.cluster, entry.run_id) for entry in entries)
    return found
