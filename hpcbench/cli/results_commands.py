"""The actions of the commands ``table`` and ``collect``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import polars

from hpcbench.cli.common import (
    cluster_filter_option,
    complete_columns,
    make_console,
    out_option,
    print_json,
    print_message,
    print_text,
    read_options,
    sources_argument,
    where_option,
    why_nothing,
)
from hpcbench.errors import ConfigError
from hpcbench.report.column_names import own_units
from hpcbench.report.configurations import ROW_ORDER, filter_launches, rows_from_frame, sort_rows
from hpcbench.report.findings.problem_findings import UnfinishedSweep
from hpcbench.report.load_results import export_json, export_table, is_results_path, iter_collected, load_frame
from hpcbench.report.pivot_table import TableRequest, grouped_view, metric_choices, parse_table_request
from hpcbench.report.results_table import results_data_view, results_text_view, table_json
from hpcbench.report.table_files import view_encoder, view_json, write_view
from hpcbench.report.table_model import View, short_name
from hpcbench.report.table_output import PrintedView
from hpcbench.results.results_tree import CollectedResult, ResultsTree
from hpcbench.results.schema import STATUS_BROKEN, RunResult, result_document
from hpcbench.submit.submission_record import select_sweeps
from hpcbench.units import pluralize


@click.command("table")
@sources_argument
@cluster_filter_option
@click.option(
    "--by",
    metavar="KEYS",
    shell_complete=complete_columns,
    help="Parameters that get one row for each value (comma-separated).",
)
@click.option(
    "--pivot", metavar="KEY", shell_complete=complete_columns, help="Parameter that gets one column for each value."
)
@click.option(
    "--metric",
    "metrics",
    metavar="M",
    shell_complete=complete_columns,
    help="Metrics to show (comma-separated): samples_per_s, step_time_s, speedup, efficiency, "
    "peak_memory_bytes, tokens_per_s, mfu, ...; --list-metrics lists all.",
)
@where_option
@click.option("--baseline", metavar="EXPR", help="Baseline of speed-ups (default: one device).")
@click.option(
    "--scaling", type=click.Choice(["weak", "strong"]),
    help="Scaling over devices: the batch is fixed per replica (weak) or in total (strong).",
)  # fmt: skip
@click.option("--best", is_flag=True, help="Show the fastest configuration in each cell instead of the median.")
@click.option(
    "--sort",
    metavar="COLUMN",
    shell_complete=complete_columns,
    help="Order of the rows; -COLUMN has the largest first.",
)
@click.option("--layout", metavar="NAME", help="Layout of a paper's table: ddlbench, paradl.")
@click.option("--list-metrics", "lists_metrics", is_flag=True, help="List the metrics that --metric takes.")
@out_option(".csv .json .md .tex .xlsx or .parquet")
@read_options
def show_results(
    sources: tuple[str, ...],
    cluster_name: str | None,
    out: Path | None,
    results: ResultsTree,
    as_json: bool,
    lists_metrics: bool,
    **options: Any,
) -> None:
    """Print the results of sweeps, trees or bundles, or of the whole tree, as a table.

    Without --by, --pivot, --metric, --best, --scaling or --layout every configuration is a row.

    \b
    hpcbench table quickstart --by strategy --metric samples_per_s,mfu
    hpcbench table quickstart --scaling weak
    hpcbench table quickstart --where 'nodes == 2' --out table.xlsx
    """
    if lists_metrics:
        frame = load_frame(results, sources, [cluster_name] if cluster_name else None, ["units"])
        names = [*metric_choices(), *(short_name(column) for column in own_units(frame))]
        if as_json:
            print_json({"metrics": names})
        else:
            print_text("\n".join(names))
        return
    request = parse_table_request(**options)
    clusters = [cluster_name] if cluster_name else None
    if not request.is_grouped:
        show_table(results, sources, clusters, as_json=as_json, request=request, out=out)
        return
    view, frame = grouped_view(results, sources, clusters, request, _table_title(results, sources))
    view.title += _count_runs(results, sources, clusters, frame)
    if as_json:
        print_json(view_json(view))
    if out is not None:
        write_view(view, out)
        print_message(f"{pluralize(len(view.raw), 'row')} written to {out}")
    if as_json or out is not None:
        return
    if view.raw:
        print_view(view)
    else:
        reason = "there is nothing to show"
        if request.where:
            reason = why_nothing(results, sources, len(frame), _where_text(request))
        print_message("\n".join([reason, *view.notes]))


def _where_text(request: TableRequest | None) -> str | None:
    return request.where.expression.text if request and request.where else None


def show_table(
    results: ResultsTree, sources: Sequence[str], clusters: list[str] | None, *, as_json: bool,
    request: TableRequest | None = None, out: Path | None = None,
) -> None:  # fmt: skip
    """Print a table with a row for each configuration, or write it to ``out``.

    Args:
        results: The tree with the sweeps that ``sources`` names.
        sources: Sweeps, trees or bundles; all of ``results`` if empty.
        clusters: Only these clusters; ``None``: all.
        as_json: Print one JSON document instead.
        request: Filter, baseline and order of the rows.
        out: Write the table there; its suffix is the format.
    """
    frame = load_frame(results, sources, clusters)
    if not sources or any(is_results_path(source) and Path(source).is_dir() for source in sources):
        # Runs of a sweep, and of its bundle, are in its order; the names of folders have none.
        frame = frame.sort(["cluster", *ROW_ORDER], nulls_last=True)
    kept = filter_launches(frame, request.where if request else None)
    rows = rows_from_frame(kept, request.baseline if request else None)
    if request and request.sort is not None:
        rows = sort_rows(rows, request.sort)
    title = _table_title(results, sources)
    if as_json:
        print_json(table_json(rows))
    if out is not None:
        make_view = results_text_view if out.suffix in (".md", ".tex") else results_data_view
        write_view(make_view(rows, title), out)
        print_message(f"{pluralize(len(rows), 'row')} written to {out}")
    if as_json or out is not None:
        return
    if not rows:
        print_message(why_nothing(results, sources, len(frame), _where_text(request)))
        return
    names = ", ".join(sorted({row.cluster for row in rows}))
    print_view(results_text_view(rows, f"{title} on {names}{_count_runs(results, sources, clusters, frame)}"))


def unfinished_sweeps(
    results: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, frame: polars.DataFrame
) -> list[UnfinishedSweep]:
    """Return the number of runs without a result in the sweeps among ``sources``."""
    names = [source for source in sources if not is_results_path(source)]
    if not names:
        return []
    chosen: list[str | None] = [*clusters] if clusters else [None]
    present = set(frame.select("cluster", "run_id").iter_rows())
    return [
        UnfinishedSweep(
            record.sweep, name, sum((name, run_id) not in present for run_id in record.run_ids), len(record.run_ids)
        )
        for cluster in chosen
        for name, record in select_sweeps(results, names, cluster)
    ]


def _count_runs(
    results: ResultsTree, sources: Sequence[str], clusters: list[str] | None, frame: polars.DataFrame
) -> str:
    """``: 18 of 24 runs``, for the title of a table with sweeps; empty for trees and bundles alone."""
    sweeps = unfinished_sweeps(results, sources, clusters, frame)
    missing = sum(sweep.missing for sweep in sweeps)
    return f": {f'{len(frame)} of ' * bool(missing)}{pluralize(len(frame) + missing, 'run')}" if sweeps else ""


def _table_title(results: ResultsTree, sources: Sequence[str]) -> str:
    return ", ".join(Path(source).name for source in sources) if sources else str(results.root)


def print_view(view: View) -> None:
    """Print a view at the width of the terminal; through the user's pager if a terminal is too low for the rows."""
    console = make_console()
    renderable = PrintedView(view)
    if sys.stdout.isatty() and sys.stdin.isatty() and len(view.raw) > console.height:
        os.environ.setdefault("LESS", "-R")
        with console.pager(styles="R" in os.environ["LESS"]):
            console.print(renderable)
    else:
        console.print(renderable)


@click.command("collect")
@sources_argument
@cluster_filter_option
@out_option(".json .csv .parquet .xlsx .md or .tex")
@read_options
def collect_sources(
    sources: tuple[str, ...], cluster_name: str | None, out: Path | None, results: ResultsTree, as_json: bool
) -> None:
    """Gather the results of sweeps, trees or bundles, or of the whole tree, into one file or onto standard output.

    A run that is in several of them is taken from the first.
    """
    if out is None and not as_json and sys.stdout.isatty():
        hint = "hpcbench collect --out results.csv, or --json; hpcbench table shows results on a terminal"
        raise ConfigError("whole results are too long for a terminal", hint=hint)
    clusters = [cluster_name] if cluster_name else None
    if out is not None:
        count = _write_collected(results, sources, clusters, out)
        print_message(f"{count} results written to {out}")
    if as_json or out is None:
        entries = iter_collected(results, sources, clusters)
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
