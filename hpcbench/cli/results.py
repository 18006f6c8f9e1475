"""``collect`` and ``table``: what was measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import console, json_option, print_json, results_option, say, tree

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hpcbench.report.ask import Question
    from hpcbench.report.grouped import Foretold
    from hpcbench.report.view import View
    from hpcbench.results.collect import Collected
    from hpcbench.results.schema import RunResult
    from hpcbench.results.store import ResultsTree


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
    from hpcbench.report.whole import collected
    from hpcbench.results.schema import result_json

    clusters = [cluster_name] if cluster_name else None
    if out is not None:
        count = _write(tree(results), sources, clusters, out)
        say(f"{count} results written to {out}")
    if as_json or out is None:
        whole = _whole(collected(tree(results), sources, clusters), quiet=out is not None)
        print_json({"results": [result_json(result) for result in whole]})


def _write(results: ResultsTree, sources: Sequence[str], clusters: list[str] | None, out: Path) -> int:
    """Results as a file: whole ones as JSON, their parameters and metrics as any other; how many there are."""
    from hpcbench.report.export import export_json, export_table
    from hpcbench.report.files import encoder
    from hpcbench.report.load import gather
    from hpcbench.report.whole import collected
    from hpcbench.results.schema import BROKEN

    encoder(out)
    if out.suffix == ".json":
        return export_json(_whole(collected(results, sources, clusters)), out)
    import polars

    frame = gather(results, sources, clusters)
    for cluster, run_id, problem in frame.filter(status=BROKEN)["cluster", "run_id", "error.message"].iter_rows():
        say(f"{cluster}/{run_id}: {problem}")
    whole = frame.filter(polars.col("status") != BROKEN)
    export_table(whole, out)
    return len(whole)


def _whole(entries: Iterable[Collected], *, quiet: bool = False) -> Iterator[RunResult]:
    """Those that can be read; of the others is said why not."""
    for entry in entries:
        if entry.result is not None:
            yield entry.result
        elif not quiet:
            say(f"{entry.cluster}/{entry.run_id}: {entry.problem}")


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
    from hpcbench.report.ask import question

    wanted = question(**asked)
    clusters = [cluster_name] if cluster_name else None
    if not wanted.is_grouped:
        show_table(tree(results), sources, clusters, as_json=as_json, wanted=wanted, out=out)
        return
    from hpcbench.report.grouped import grouped_view
    from hpcbench.report.load import gather

    frame = gather(tree(results), sources, clusters, wanted.columns())
    foretold = _foretold(tree(results)) if wanted.predictions else None
    _show(grouped_view(frame, wanted, _title(tree(results), sources), foretold), as_json=as_json, out=out)


def _foretold(results: ResultsTree) -> Foretold:
    from hpcbench.report.predicted import with_predictions
    from hpcbench.report.validation import Forecasts

    forecasts = Forecasts(results)
    return lambda rows: with_predictions(rows, forecasts)


def show_table(
    results: ResultsTree, sources: Sequence[str], clusters: list[str] | None, *, as_json: bool,
    wanted: Question | None = None, out: Path | None = None,
) -> None:  # fmt: skip
    """Print the table of some sweeps, trees or bundles; of everything in the tree where none is named."""
    from hpcbench.report.groups import chosen
    from hpcbench.report.load import gather
    from hpcbench.report.rows import ORDER, rows_of

    frame = gather(results, sources, clusters)
    if not sources:
        # Runs of a sweep are in its order; the names of folders have none.
        frame = frame.sort(["cluster", *ORDER], nulls_last=True)
    frame = chosen(frame, wanted.where if wanted else None)
    rows = rows_of(frame, wanted.baseline if wanted else None)
    if wanted and wanted.sort:
        from hpcbench.report.rows import sort_rows

        rows = sort_rows(rows, wanted.sort)
    if as_json:
        from hpcbench.report.export import table_json

        print_json(table_json(rows))
    if out is not None:
        from hpcbench.report.files import write_view
        from hpcbench.report.tables import data_view, text_view

        made = text_view if out.suffix in (".md", ".tex") else data_view
        write_view(made(rows, _title(results, sources)), out)
        say(f"{len(rows)} rows written to {out}")
    if as_json or out is not None:
        return
    if not rows:
        say(f"no results yet in {', '.join(sources) or results.root}")
        return
    from hpcbench.report.tables import ResultsTable

    where = sorted({row.cluster for row in rows})
    _page(ResultsTable(rows, f"{_title(results, sources)} on {', '.join(where)}"), len(rows))


def _title(results: ResultsTree, sources: Sequence[str]) -> str:
    return ", ".join(Path(one).name for one in sources) if sources else str(results.root)


def _show(view: View, *, as_json: bool, out: Path | None) -> None:
    from hpcbench.report.files import view_json, write_view

    if as_json:
        print_json(view_json(view))
    if out is not None:
        write_view(view, out)
        say(f"{len(view.raw)} rows written to {out}")
    if as_json or out is not None:
        return
    if not view.raw:
        say("\n".join(["there is nothing to show", *view.notes]))
        return
    show_view(view)


def show_view(view: View) -> None:
    """Print a view, folded at the width of the terminal."""
    from hpcbench.report.show import view_renderable

    _page(view_renderable(view, console().width), len(view.raw))


def _page(shown: RenderableType, rows: int) -> None:
    """Print, through the user's pager where a terminal is too low for the rows."""
    out = console()
    if sys.stdout.isatty() and sys.stdin.isatty() and rows > out.height:
        os.environ.setdefault("LESS", "-R")
        with out.pager(styles="R" in os.environ["LESS"]):
            out.print(shown)
    else:
        out.print(shown)
