"""The commands ``collect``, ``table`` and ``compare``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import polars

from hpcbench.cli.common import (
    cluster_filter_option,
    json_option,
    make_console,
    out_option,
    print_json,
    print_message,
    results_option,
    results_tree,
    sources_argument,
    where_option,
    why_nothing,
)
from hpcbench.cli.completion import complete_columns, complete_sweeps
from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError
from hpcbench.fileio import write_atomic
from hpcbench.report.column_names import Condition
from hpcbench.report.comparison import (
    comparison_metric,
    judge_pairs,
    load_reference_bands,
    pair_configurations,
    separating_parameters,
)
from hpcbench.report.comparison_view import (
    ComparisonRow,
    comparison_data_view,
    comparison_text_view,
    junit_xml,
    rows_from_pairs,
    rows_from_references,
    verdict_summary,
)
from hpcbench.report.configurations import ROW_ORDER, filter_launches, rows_from_frame, sort_rows
from hpcbench.report.load_results import iter_collected, load_frame
from hpcbench.report.pivot_table import TableRequest, parse_table_request
from hpcbench.report.results_table import results_data_view, results_text_view, table_json
from hpcbench.report.table_model import View
from hpcbench.report.table_output import (
    export_json,
    export_table,
    grouped_view,
    render_view,
    view_encoder,
    view_json,
    write_view,
)
from hpcbench.results.results_tree import CollectedResult, ResultsTree
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


@click.command()
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
    help="Metrics to show (comma-separated): samples_per_s, speedup, ...",
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
@out_option(".csv .json .md .tex .xlsx or .parquet")
@results_option
@json_option
def table(
    sources: tuple[str, ...],
    cluster_name: str | None,
    out: Path | None,
    results: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Print the results of sweeps, trees or bundles, or of the whole tree, as a table.

    Without --by, --pivot, --metric, --best, --scaling or --layout every configuration is a row.
    """
    request = parse_table_request(**options)
    tree, clusters = results_tree(results), [cluster_name] if cluster_name else None
    if not request.is_grouped:
        show_table(tree, sources, clusters, as_json=as_json, request=request, out=out)
        return
    view, runs = grouped_view(tree, sources, clusters, request, _table_title(tree, sources))
    if as_json:
        print_json(view_json(view))
    if out is not None:
        write_view(view, out)
        print_message(f"{len(view.raw)} rows written to {out}")
    if as_json or out is not None:
        return
    if view.raw:
        _print_view(view)
    else:
        reason = why_nothing(tree, sources, runs, _where_text(request)) if request.where else "there is nothing to show"
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
    if not sources:
        # Runs of a sweep are in its order; the names of folders have none.
        frame = frame.sort(["cluster", *ROW_ORDER], nulls_last=True)
    kept = filter_launches(frame, request.where if request else None)
    rows = rows_from_frame(kept, request.baseline if request else None)
    if request and request.sort:
        rows = sort_rows(rows, request.sort)
    title = _table_title(results, sources)
    if as_json:
        print_json(table_json(rows))
    if out is not None:
        make_view = results_text_view if out.suffix in (".md", ".tex") else results_data_view
        write_view(make_view(rows, title), out)
        print_message(f"{len(rows)} rows written to {out}")
    if as_json or out is not None:
        return
    if not rows:
        print_message(why_nothing(results, sources, len(frame), _where_text(request)))
        return
    names = ", ".join(sorted({row.cluster for row in rows}))
    _print_view(results_text_view(rows, f"{title} on {names}"))


def _table_title(results: ResultsTree, sources: Sequence[str]) -> str:
    return ", ".join(Path(source).name for source in sources) if sources else str(results.root)


def _print_view(view: View) -> None:
    """Print a view at the width of the terminal; through the user's pager if a terminal is too low for the rows."""
    console = make_console()
    renderable = render_view(view, console.width)
    if sys.stdout.isatty() and sys.stdin.isatty() and len(view.raw) > console.height:
        os.environ.setdefault("LESS", "-R")
        with console.pager(styles="R" in os.environ["LESS"]):
            console.print(renderable)
    else:
        console.print(renderable)


@click.command()
@click.argument("sources", metavar="[BASE] NEW", nargs=-1, shell_complete=complete_sweeps, required=True)
@cluster_filter_option
@click.option(
    "--metric",
    metavar="M",
    shell_complete=complete_columns,
    default="step_time_s",
    show_default=True,
    help="Metric to compare.",
)
@where_option
@click.option(
    "--since", metavar="DATE", help="Compare results of one source before a date with later ones: 2026-11-20[T18:00]."
)
@click.option(
    "--threshold", metavar="PERCENT", type=click.FloatRange(0, 100), default=2.0, show_default=True,
    help="Minimum relative change to report.",
)  # fmt: skip
@click.option(
    "--reference", metavar="FILE", type=click.Path(path_type=Path), help="TOML file with bands that NEW must lie in."
)
@out_option(".md .csv .json .tex .xlsx or .parquet")
@click.option("--junit", metavar="FILE", type=click.Path(path_type=Path), help="JUnit XML for a CI server.")
@click.option("--allow-empty", is_flag=True, help="Exit code 0 if no configuration is on both sides.")
@results_option
@json_option
def compare(
    *,
    sources: tuple[str, ...],
    cluster_name: str | None,
    metric: str,
    where: str | None,
    since: str | None,
    threshold: float,
    reference: Path | None,
    out: Path | None,
    junit: Path | None,
    allow_empty: bool,
    results: str | None,
    as_json: bool,
) -> None:
    """Compare the launches of BASE and NEW, configuration by configuration.

    BASE and NEW are sweeps, trees or bundles. Exit code 1 if NEW is slower, fails, or lies outside a band; 2 if
    nothing can be compared.
    """
    column = comparison_metric(metric)
    base, new = _load_sides(sources, cluster_name, where, since, results, bands_alone=reference is not None)
    rows: list[ComparisonRow] = []
    notes: list[str] = []
    if base is not None:
        pairs, notes = pair_configurations(base, new, column)
        judge_pairs(pairs, column, threshold / 100)
        if not pairs:
            notes += separating_parameters(base, new)
        rows += rows_from_pairs(pairs, column)
    if reference is not None:
        rows += rows_from_references(new, *load_reference_bands(reference))
    title = " -> ".join([*sources, f"since {since}"] if since else sources)
    text_view = comparison_text_view(rows, title, notes, threshold / 100)
    data_view = comparison_data_view(rows, title, notes)
    if junit is not None:
        write_atomic(junit, junit_xml(rows, title))
        print_message(f"{len(rows)} tests written to {junit}")
    if out is not None:
        write_view(text_view if out.suffix in (".md", ".tex") else data_view, out)
        print_message(f"{len(rows)} rows written to {out}")
    if as_json:
        print_json(view_json(data_view))
    elif rows:
        _print_view(text_view)
    else:
        print_message("\n".join([verdict_summary(rows), *notes]))
    if not rows and not allow_empty:
        raise ConfigError("no configuration of base and new can be compared", hint="--allow-empty accepts that")
    if any(row.is_regression for row in rows):
        raise click.exceptions.Exit(EXIT_RUNS_FAILED)


def _load_sides(
    sources: tuple[str, ...], cluster: str | None, where: str | None, since: str | None, results: str | None, *,
    bands_alone: bool,
) -> tuple[polars.DataFrame | None, polars.DataFrame]:  # fmt: skip
    """The results of BASE, if there is one, and NEW."""
    needed = 1 if since else 2
    if len(sources) != needed and not (bands_alone and len(sources) == 1):
        raise ConfigError(
            f"{len(sources)} sources are given, and {needed} needed",
            hint="compare BASE NEW, compare SOURCE --since DATE, or compare NEW --reference FILE",
        )
    condition = Condition(where, "--where") if where else None
    clusters = [cluster] if cluster else None
    frames = []
    for source in sources:
        frame = load_frame(results_tree(results), [source], clusters)
        frames.append(filter_launches(frame, condition))
        if frame.height and not frames[-1].height:
            print_message(why_nothing(results_tree(results), [source], frame.height, where))
    if since:
        return _split_by_date(frames[0], since)
    return (frames[0], frames[1]) if len(frames) == 2 else (None, frames[0])


def _split_by_date(frame: polars.DataFrame, since: str) -> tuple[polars.DataFrame, polars.DataFrame]:
    """Results that were written before, and since, a date in this machine's time zone."""
    try:
        edge_ns = int(datetime.fromisoformat(since).timestamp() * 1e9)
    except ValueError:
        raise ConfigError(f"--since {since}: no date", hint="for instance 2026-11-20 or 2026-11-20T18:00") from None
    if frame["file.mtime_ns"].null_count():
        raise ConfigError("--since needs results in a tree: those in a bundle bear no date")
    is_new = polars.col("file.mtime_ns") >= edge_ns
    return frame.filter(~is_new), frame.filter(is_new)
