"""The commands ``collect``, ``table`` and ``compare``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import json_option, make_console, print_json, print_message, results_option, results_tree
from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError

if TYPE_CHECKING:
    import polars
    from rich.console import RenderableType

    from hpcbench.report.comparison_view import ComparisonRow
    from hpcbench.report.pivot_table import AddPredictions, TableRequest
    from hpcbench.report.table_model import View
    from hpcbench.results.results_tree import CollectedResult, ResultsTree
    from hpcbench.results.schema import RunResult


@click.command()
@click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help=".json .csv .parquet .xlsx .md or .tex")
@results_option
@json_option
def collect(
    sources: tuple[str, ...], cluster_name: str | None, out: Path | None, results: str | None, as_json: bool
) -> None:
    """Gather whole results, or those of the tree where none is named, into one file or onto standard output.

    A run that several of them hold is taken from the first.
    """
    from hpcbench.report.load_results import iter_collected
    from hpcbench.results.schema import result_document

    clusters = [cluster_name] if cluster_name else None
    if out is not None:
        count = _write_collected(results_tree(results), sources, clusters, out)
        print_message(f"{count} results written to {out}")
    if as_json or out is None:
        whole = _readable_results(iter_collected(results_tree(results), sources, clusters), quiet=out is not None)
        print_json({"results": [result_document(result) for result in whole]})


def _write_collected(results: ResultsTree, sources: Sequence[str], clusters: list[str] | None, out: Path) -> int:
    """Results as a file: whole ones as JSON, their parameters and metrics as any other; how many there are."""
    from hpcbench.report.load_results import iter_collected, load_frame
    from hpcbench.report.table_output import export_json, export_table, view_encoder
    from hpcbench.results.schema import STATUS_BROKEN

    view_encoder(out)
    if out.suffix == ".json":
        return export_json(_readable_results(iter_collected(results, sources, clusters)), out)
    import polars

    frame = load_frame(results, sources, clusters)
    for cluster, run_id, problem in frame.filter(status=STATUS_BROKEN)[
        "cluster", "run_id", "error.message"
    ].iter_rows():
        print_message(f"{cluster}/{run_id}: {problem}")
    whole = frame.filter(polars.col("status") != STATUS_BROKEN)
    export_table(whole, out)
    return len(whole)


def _readable_results(entries: Iterable[CollectedResult], *, quiet: bool = False) -> Iterator[RunResult]:
    """Those that can be read; of the others is said why not."""
    for entry in entries:
        if entry.result is not None:
            yield entry.result
        elif not quiet:
            print_message(f"{entry.cluster}/{entry.run_id}: {entry.problem}")


@click.command()
@click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--by", metavar="KEYS", help="One row for each value of these, comma between.")
@click.option("--pivot", metavar="KEY", help="One column for each value of this.")
@click.option(
    "--metric", "metrics", metavar="M", help="What the cells hold, comma between: samples_per_s, speedup, ..."
)
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'nodes == 4 and strategy != \"single\"'.")
@click.option("--baseline", metavar="EXPR", help="What speed-ups are against (default: one device).")
@click.option(
    "--scaling", type=click.Choice(["weak", "strong"]), help="Over devices, with the batch per replica or in all."
)
@click.option("--best", is_flag=True, help="Of a cell's configurations the fastest, not the median of all.")
@click.option("--sort", metavar="COLUMN", help="Order of the rows; -COLUMN has the largest first.")
@click.option("--layout", metavar="NAME", help="A paper's own table: ddlbench, paradl.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help=".csv .json .md .tex .xlsx or .parquet")
@results_option
@json_option
def table(
    sources: tuple[str, ...],
    cluster_name: str | None,
    out: Path | None,
    results: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Print the results of sweeps, trees or bundles, or of the whole tree, as a table.

    Without --by, --pivot, --metric, --best, --scaling or --layout every configuration is a row.
    """
    from hpcbench.report.pivot_table import parse_table_request

    wanted = parse_table_request(**asked)
    clusters = [cluster_name] if cluster_name else None
    if not wanted.is_grouped:
        show_table(results_tree(results), sources, clusters, as_json=as_json, wanted=wanted, out=out)
        return
    from hpcbench.report.load_results import load_frame
    from hpcbench.report.pivot_table import pivot_view

    frame = load_frame(results_tree(results), sources, clusters, wanted.columns())
    foretold = _prediction_columns(results_tree(results)) if wanted.predictions else None
    _output_view(
        pivot_view(frame, wanted, _table_title(results_tree(results), sources), foretold), as_json=as_json, out=out
    )


def _prediction_columns(results: ResultsTree) -> AddPredictions:
    from hpcbench.report.oracle_validation import ClusterForecasts
    from hpcbench.report.prediction_frames import with_predictions

    forecasts = ClusterForecasts(results)
    return lambda rows: with_predictions(rows, forecasts)


def show_table(
    results: ResultsTree, sources: Sequence[str], clusters: list[str] | None, *, as_json: bool,
    wanted: TableRequest | None = None, out: Path | None = None,
) -> None:  # fmt: skip
    """Print the table of some sweeps, trees or bundles; of everything in the tree where none is named."""
    from hpcbench.report.configurations import ROW_ORDER, filter_launches, rows_from_frame
    from hpcbench.report.load_results import load_frame

    frame = load_frame(results, sources, clusters)
    if not sources:
        # Runs of a sweep are in its order; the names of folders have none.
        frame = frame.sort(["cluster", *ROW_ORDER], nulls_last=True)
    frame = filter_launches(frame, wanted.where if wanted else None)
    rows = rows_from_frame(frame, wanted.baseline if wanted else None)
    if wanted and wanted.sort:
        from hpcbench.report.configurations import sort_rows

        rows = sort_rows(rows, wanted.sort)
    if as_json:
        from hpcbench.report.table_output import table_json

        print_json(table_json(rows))
    if out is not None:
        from hpcbench.report.results_table import results_data_view, results_text_view
        from hpcbench.report.table_output import write_view

        made = results_text_view if out.suffix in (".md", ".tex") else results_data_view
        write_view(made(rows, _table_title(results, sources)), out)
        print_message(f"{len(rows)} rows written to {out}")
    if as_json or out is not None:
        return
    if not rows:
        print_message(f"no results yet in {', '.join(sources) or results.root}")
        return
    from hpcbench.report.results_table import results_text_view

    where = sorted({row.cluster for row in rows})
    print_view(results_text_view(rows, f"{_table_title(results, sources)} on {', '.join(where)}"))


def _table_title(results: ResultsTree, sources: Sequence[str]) -> str:
    return ", ".join(Path(one).name for one in sources) if sources else str(results.root)


def _output_view(view: View, *, as_json: bool, out: Path | None) -> None:
    from hpcbench.report.table_output import view_json, write_view

    if as_json:
        print_json(view_json(view))
    if out is not None:
        write_view(view, out)
        print_message(f"{len(view.raw)} rows written to {out}")
    if as_json or out is not None:
        return
    if not view.raw:
        print_message("\n".join(["there is nothing to show", *view.notes]))
        return
    print_view(view)


def print_view(view: View) -> None:
    """Print a view, folded at the width of the terminal."""
    from hpcbench.report.table_output import render_view

    _print_paged(render_view(view, make_console().width), len(view.raw))


def _print_paged(shown: RenderableType, rows: int) -> None:
    """Print, through the user's pager where a terminal is too low for the rows."""
    out = make_console()
    if sys.stdout.isatty() and sys.stdin.isatty() and rows > out.height:
        os.environ.setdefault("LESS", "-R")
        with out.pager(styles="R" in os.environ["LESS"]):
            out.print(shown)
    else:
        out.print(shown)


@click.command()
@click.argument("sources", metavar="[BASE] NEW", nargs=-1, required=True)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--metric", metavar="M", default="step_time_s", show_default=True, help="What is compared.")
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'nodes == 4 and strategy != \"single\"'.")
@click.option("--since", metavar="DATE", help="Of one source: results before against those since, 2026-11-20[T18:00].")
@click.option(
    "--threshold", metavar="PERCENT", type=click.FloatRange(0, 100), default=2.0, show_default=True,
    help="The least change that counts.",
)  # fmt: skip
@click.option("--reference", metavar="FILE", type=click.Path(path_type=Path), help="Bands that NEW is held to, TOML.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help=".md .csv .json .tex .xlsx or .parquet")
@click.option("--junit", metavar="FILE", type=click.Path(path_type=Path), help="JUnit XML for a CI server.")
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
    results: str | None,
    as_json: bool,
) -> None:
    """Compare the launches of BASE and NEW, configuration by configuration.

    BASE and NEW are sweeps, trees or bundles. Exit code 1 where NEW is slower, fails, or lies outside a band.
    """
    from hpcbench.report.comparison import comparison_metric, judge_pairs, pair_configurations
    from hpcbench.report.comparison_view import rows_from_pairs, rows_from_references

    column = comparison_metric(metric)
    base, new = _load_sides(sources, cluster_name, where, since, results, bands_alone=reference is not None)
    findings: list[ComparisonRow] = []
    notes: list[str] = []
    if base is not None:
        pairs, notes = pair_configurations(base, new, column)
        judge_pairs(pairs, column, threshold / 100)
        findings += rows_from_pairs(pairs, column)
    if reference is not None:
        from hpcbench.config.reference_bands import load_reference_bands

        findings += rows_from_references(new, *load_reference_bands(reference))
    title = " -> ".join([*sources, f"since {since}"] if since else sources)
    _show_findings(findings, title, notes, threshold / 100, out=out, junit=junit, as_json=as_json)
    if any(one.is_regression for one in findings):
        raise click.exceptions.Exit(EXIT_RUNS_FAILED)


def _load_sides(
    sources: tuple[str, ...], cluster: str | None, where: str | None, since: str | None, results: str | None, *,
    bands_alone: bool,
) -> tuple[polars.DataFrame | None, polars.DataFrame]:  # fmt: skip
    """The results of base, if there is one, and new."""
    from hpcbench.report.column_names import Condition
    from hpcbench.report.configurations import filter_launches
    from hpcbench.report.load_results import load_frame

    wanted = 1 if since else 2
    if len(sources) != wanted and not (bands_alone and len(sources) == 1):
        raise ConfigError(
            f"{len(sources)} sources are given, and {wanted} needed",
            hint="compare BASE NEW, compare SOURCE --since DATE, or compare NEW --reference FILE",
        )
    condition = Condition(where, "--where") if where else None
    clusters = [cluster] if cluster else None
    frames = [filter_launches(load_frame(results_tree(results), [source], clusters), condition) for source in sources]
    if since:
        return _split_by_date(frames[0], since)
    return (frames[0], frames[1]) if len(frames) == 2 else (None, frames[0])


def _split_by_date(frame: polars.DataFrame, since: str) -> tuple[polars.DataFrame, polars.DataFrame]:
    """Results that were put in place before, and since, a date in this machine's time zone."""
    import polars

    try:
        edge_ns = int(datetime.fromisoformat(since).timestamp() * 1e9)
    except ValueError:
        raise ConfigError(f"--since {since}: no date", hint="for instance 2026-11-20 or 2026-11-20T18:00") from None
    if frame["file.mtime_ns"].null_count():
        raise ConfigError("--since needs results in a tree: those in a bundle bear no date")
    young = polars.col("file.mtime_ns") >= edge_ns
    return frame.filter(~young), frame.filter(young)


def _show_findings(
    findings: list[ComparisonRow], title: str, notes: list[str], threshold: float, *,
    out: Path | None, junit: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from hpcbench.fileio import write_atomic
    from hpcbench.report.comparison_view import comparison_data_view, comparison_text_view, junit_xml, verdict_summary
    from hpcbench.report.table_output import view_json, write_view

    people = comparison_text_view(findings, title, notes, threshold)
    programs = comparison_data_view(findings, title, notes)
    if junit is not None:
        write_atomic(junit, junit_xml(findings, title))
        print_message(f"{len(findings)} tests written to {junit}")
    if out is not None:
        write_view(people if out.suffix in (".md", ".tex") else programs, out)
        print_message(f"{len(findings)} rows written to {out}")
    if as_json:
        print_json(view_json(programs))
    elif not findings:
        print_message("\n".join([verdict_summary(findings), *notes]))
    else:
        print_view(people)
