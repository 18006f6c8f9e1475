"""The commands ``collect`` and ``results``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click
import polars

from hpcbench.cli.common import (
    cluster_filter_option,
    json_option,
    out_option,
    print_json,
    print_message,
    results_option,
    results_tree,
    sources_argument,
)
from hpcbench.report.load_results import export_json, export_table, iter_collected, load_frame
from hpcbench.report.table_output import view_encoder
from hpcbench.results.attempts import Attempt
from hpcbench.results.decode import has_old_rate, upgrade_rates
from hpcbench.results.results_tree import CollectedResult, ResultsTree, collect_results
from hpcbench.results.schema import STATUS_BROKEN, RunResult, result_document


@click.command()
@sources_argument
@cluster_filter_option
@out_option(".json .csv .parquet .xlsx .md or .tex")
@results_option
@json_option
def collect(
    sources: tuple[str, ...], cluster_name: str | None, out: Path | None, results: str | None, as_json: bool
) -> None:
    """Gather the results of sweeps, trees or bundles, or of the whole tree, into one file or onto standard output.

    A run that is in several of them is taken from the first.
    """
    clusters = [cluster_name] if cluster_name else None
    if out is not None:
        count = _write_collected(results_tree(results), sources, clusters, out)
        print_message(f"{count} results written to {out}")
    if as_json or out is None:
        entries = iter_collected(results_tree(results), sources, clusters)
        readable = _readable_results(entries, quiet=out is not None)
        print_json({"results": [result_document(result) for result in readable]})


def _write_collected(results: ResultsTree, sources: Sequence[str], clusters: list[str] | None, out: Path) -> int:
    """Write whole results as JSON, or their parameters and metrics in any other format; return their number."""
    view_encoder(out)
    if out.suffix == ".json":
        return export_json(_readable_results(iter_collected(results, sources, clusters)), out)
    frame = load_frame(results, sources, clusters)
    broken = frame.filter(status=STATUS_BROKEN)["cluster", "run_id", "error.message"]
    for cluster, run_id, problem in broken.iter_rows():
        print_message(f"{cluster}/{run_id}: {problem}")
    readable = frame.filter(polars.col("status") != STATUS_BROKEN)
    export_table(readable, out)
    return len(readable)


def _readable_results(entries: Iterable[CollectedResult], *, quiet: bool = False) -> Iterator[RunResult]:
    """The results that can be read; for the others the reason is printed."""
    for entry in entries:
        if entry.result is not None:
            yield entry.result
        elif not quiet:
            print_message(f"{entry.cluster}/{entry.run_id}: {entry.problem}")


@click.group("results")
def results_group() -> None:
    """Maintain the results tree."""


@results_group.command("upgrade")
@cluster_filter_option
@results_option
@json_option
def upgrade_results(cluster_name: str | None, results: str | None, as_json: bool) -> None:
    """Recompute figures of an earlier definition from the files of the ranks.

    Rates of runs with several ranks become samples over the longest rank's timed interval. A result whose ranks' files
    are gone stays as it is, and tables mark it.
    """
    tree = results_tree(results)
    counts = {"upgraded": 0, "current": 0, "left": 0}
    for name in [cluster_name] if cluster_name else tree.clusters():
        cluster = tree.cluster(name)
        for entry in collect_results(cluster):
            if entry.result is None or not has_old_rate(entry.result):
                counts["current"] += entry.result is not None
                continue
            ranks = Attempt(cluster.run_folder(entry.run_id), entry.result.attempt).read_ranks()
            is_done = cluster.update_result(entry.run_id, partial(upgrade_rates, ranks=ranks))
            counts["upgraded" if is_done else "left"] += 1
            if not is_done:
                print_message(f"{name}/{entry.run_id}: the files of its ranks are not all there: left as it is")
    if as_json:
        print_json(counts)
    else:
        click.echo(f"{counts['upgraded']} results recomputed, {counts['current']} current, {counts['left']} left")
