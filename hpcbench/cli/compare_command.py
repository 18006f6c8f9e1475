"""The action of the command ``compare``."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click
import polars
import tomli

from hpcbench.cli.common import (
    cluster_filter_option,
    complete_columns,
    complete_sweeps,
    out_option,
    print_json,
    print_message,
    read_options,
    where_option,
    why_nothing,
)
from hpcbench.cli.results_commands import print_view
from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError
from hpcbench.fileio import write_atomic
from hpcbench.report.column_names import Condition, own_units, with_own_metrics
from hpcbench.report.comparison import (
    comparison_metric,
    is_larger_better,
    judge_pairs,
    load_bands,
    pair_configurations,
    separating_parameters,
)
from hpcbench.report.comparison_view import (
    ComparisonRow,
    comparison_data_view,
    comparison_text_view,
    junit_xml,
    rows_from_bands,
    rows_from_pairs,
    verdict_summary,
)
from hpcbench.report.configurations import filter_launches
from hpcbench.report.load_results import load_frame
from hpcbench.report.normal_bands import bands_toml
from hpcbench.report.table_files import view_json, write_view
from hpcbench.results.results_tree import ResultsTree
from hpcbench.units import pluralize


@click.command("compare")
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
    "--bands", metavar="FILE", type=click.Path(path_type=Path), help="TOML file with bands that NEW must lie in."
)
@click.option(
    "--make-bands", metavar="FILE", type=click.Path(path_type=Path),
    help="Write the normal range of the launches of one source, as a file for --bands.",
)  # fmt: skip
@out_option(".md .csv .json .tex .xlsx or .parquet")
@click.option("--junit", metavar="FILE", type=click.Path(path_type=Path), help="JUnit XML for a CI server.")
@click.option("--allow-empty", is_flag=True, help="Exit code 0 if no configuration is on both sides.")
@read_options
def compare_sources(
    *,
    sources: tuple[str, ...],
    cluster_name: str | None,
    metric: str,
    where: str | None,
    since: str | None,
    threshold: float,
    bands: Path | None,
    make_bands: Path | None,
    out: Path | None,
    junit: Path | None,
    allow_empty: bool,
    results: ResultsTree,
    as_json: bool,
) -> None:
    """Compare the launches of BASE and NEW, configuration by configuration.

    BASE and NEW are sweeps, trees or bundles. Exit code 1 if NEW is slower, fails, or lies outside a band; 2 if
    nothing can be compared.
    """
    column = comparison_metric(metric)
    if make_bands is not None and (len(sources) > 1 or since or bands or out or junit):
        raise ConfigError("--make-bands takes one source alone", hint="compare SOURCE --make-bands FILE [--json]")
    base, new = _load_sides(sources, cluster_name, where, since, results, one_side=bool(bands or make_bands))
    if make_bands is not None:
        _write_bands(new, column, make_bands, as_json=as_json)
        return
    rows: list[ComparisonRow] = []
    notes: list[str] = []
    if base is not None:
        base, new = (with_own_metrics(side, [column]) for side in (base, new))
        pairs, notes = pair_configurations(base, new, column)
        judge_pairs(pairs, is_larger_better(column, new), threshold / 100)
        if not pairs:
            notes += separating_parameters(base, new)
        rows += rows_from_pairs(pairs, column, own_units(new).get(column))
    if bands is not None:
        rows += rows_from_bands(new, *load_bands(bands))
    title = " -> ".join([*sources, f"since {since}"] if since else sources)
    text_view = comparison_text_view(rows, title, notes, threshold / 100)
    data_view = comparison_data_view(rows, title, notes)
    if junit is not None:
        write_atomic(junit, junit_xml(rows, title))
        print_message(f"{pluralize(len(rows), 'test')} written to {junit}")
    if out is not None:
        write_view(text_view if out.suffix in (".md", ".tex") else data_view, out)
        print_message(f"{pluralize(len(rows), 'row')} written to {out}")
    if as_json:
        print_json(view_json(data_view))
    elif rows:
        print_view(text_view)
    else:
        print_message("\n".join([verdict_summary(rows), *notes]))
    if not rows and not allow_empty:
        raise ConfigError("no configuration of base and new can be compared", hint="--allow-empty accepts that")
    if any(row.is_regression for row in rows):
        raise click.exceptions.Exit(EXIT_RUNS_FAILED)


def _write_bands(frame: polars.DataFrame, column: str, path: Path, *, as_json: bool) -> None:
    launches = with_own_metrics(frame, [column])
    text = bands_toml(launches, column, larger_is_better=is_larger_better(column, launches))
    write_atomic(path, text.encode())
    print_message(f"written: {path}; next: hpcbench compare SOURCE --bands {path}")
    if as_json:
        print_json({"file": str(path), **tomli.loads(text)})


def _load_sides(
    sources: tuple[str, ...], cluster: str | None, where: str | None, since: str | None, results: ResultsTree, *,
    one_side: bool,
) -> tuple[polars.DataFrame | None, polars.DataFrame]:  # fmt: skip
    """The results of BASE, if there is one, and NEW."""
    needed = 1 if since else 2
    if len(sources) != needed and not (one_side and len(sources) == 1):
        raise ConfigError(
            f"{pluralize(len(sources), 'source')} given, {needed} needed",
            hint="compare BASE NEW, compare SOURCE --since DATE, or compare NEW --bands FILE",
        )
    condition = Condition(where, "--where") if where is not None else None
    clusters = [cluster] if cluster else None
    frames = []
    for source in sources:
        frame = load_frame(results, [source], clusters)
        frames.append(filter_launches(frame, condition))
        if frame.height and not frames[-1].height:
            print_message(why_nothing(results, [source], frame.height, where))
    if since:
        return _split_by_date(frames[0], since)
    return (frames[0], frames[1]) if len(frames) == 2 else (None, frames[0])


def _split_by_date(frame: polars.DataFrame, since: str) -> tuple[polars.DataFrame, polars.DataFrame]:
    """Results of runs that ended before, and since, a date in this machine's time zone."""
    try:
        edge_s = datetime.fromisoformat(since).timestamp()
    except ValueError:
        raise ConfigError(f"--since {since}: no date", hint="for instance 2026-11-20 or 2026-11-20T18:00") from None
    if undated := frame["ended_at_s"].null_count():
        raise ConfigError(f"--since: {undated} of {len(frame)} results have no date")
    is_new = polars.col("ended_at_s") >= edge_s
    return frame.filter(~is_new), frame.filter(is_new)
