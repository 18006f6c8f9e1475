"""The command ``table``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

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
from hpcbench.cli.completion import complete_columns
from hpcbench.report.configurations import ROW_ORDER, filter_launches, rows_from_frame, sort_rows
from hpcbench.report.load_results import load_frame
from hpcbench.report.pivot_table import TableRequest, grouped_view, parse_table_request
from hpcbench.report.reference_drift import drift_notes, reference_drifts, remove_drift
from hpcbench.report.results_table import results_data_view, results_text_view, table_json
from hpcbench.report.table_model import View
from hpcbench.report.table_output import render_view, view_json, write_view
from hpcbench.results.results_tree import ResultsTree


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
@click.option(
    "--remove-drift", is_flag=True,
    help="Remove the drift of the machine that the launches of the sweep's reference show.",
)  # fmt: skip
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
        print_view(view)
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
    drifts, removed = list(reference_drifts(frame)), bool(request and request.remove_drift)
    if removed:
        frame = remove_drift(frame)
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
    print_view(results_text_view(rows, f"{title} on {names}"))
    for note in drift_notes(drifts, removed=removed):
        print_message(note)


def _table_title(results: ResultsTree, sources: Sequence[str]) -> str:
    return ", ".join(Path(source).name for source in sources) if sources else str(results.root)


def print_view(view: View) -> None:
    """Print a view at the width of the terminal; through the user's pager if a terminal is too low for the rows."""
    console = make_console()
    renderable = render_view(view, console.width)
    if sys.stdout.isatty() and sys.stdin.isatty() and len(view.raw) > console.height:
        os.environ.setdefault("LESS", "-R")
        with console.pager(styles="R" in os.environ["LESS"]):
            console.print(renderable)
    else:
        console.print(renderable)
