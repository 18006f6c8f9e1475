"""``compare``: what became slower between two sets of results; an exit code for CI."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcbench.cli.common import json_option, print_json, results_option, say, tree
from hpcbench.errors import EXIT_RUNS_FAILED, ConfigError

if TYPE_CHECKING:
    import polars

    from hpcbench.report.findings import Finding


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
    from hpcbench.report.compare import judge, metric_of, pairs_of
    from hpcbench.report.findings import of_pairs, of_references

    column = metric_of(metric)
    base, new = _sides(sources, cluster_name, where, since, results, bands_alone=reference is not None)
    findings: list[Finding] = []
    notes: list[str] = []
    if base is not None:
        pairs, notes = pairs_of(base, new, column)
        judge(pairs, column, threshold / 100)
        findings += of_pairs(pairs, column)
    if reference is not None:
        from hpcbench.config.references import load_references

        findings += of_references(new, *load_references(reference))
    title = " -> ".join([*sources, f"since {since}"] if since else sources)
    _tell(findings, title, notes, threshold / 100, out=out, junit=junit, as_json=as_json)
    if any(one.is_regression for one in findings):
        raise click.exceptions.Exit(EXIT_RUNS_FAILED)


def _sides(
    sources: tuple[str, ...], cluster: str | None, where: str | None, since: str | None, results: str | None, *,
    bands_alone: bool,
) -> tuple[polars.DataFrame | None, polars.DataFrame]:  # fmt: skip
    """The results of base, if there is one, and new."""
    from hpcbench.report.groups import chosen
    from hpcbench.report.load import gather
    from hpcbench.report.names import Condition

    wanted = 1 if since else 2
    if len(sources) != wanted and not (bands_alone and len(sources) == 1):
        raise ConfigError(
            f"{len(sources)} sources are given, and {wanted} needed",
            hint="compare BASE NEW, compare SOURCE --since DATE, or compare NEW --reference FILE",
        )
    condition = Condition(where, "--where") if where else None
    clusters = [cluster] if cluster else None
    frames = [chosen(gather(tree(results), [source], clusters), condition) for source in sources]
    if since:
        return _split(frames[0], since)
    return (frames[0], frames[1]) if len(frames) == 2 else (None, frames[0])


def _split(frame: polars.DataFrame, since: str) -> tuple[polars.DataFrame, polars.DataFrame]:
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


def _tell(
    findings: list[Finding], title: str, notes: list[str], threshold: float, *,
    out: Path | None, junit: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from hpcbench.cli.results import show_view
    from hpcbench.fileio import write_atomic
    from hpcbench.report.compare_view import data_view, text_view
    from hpcbench.report.compare_view import junit as junit_xml
    from hpcbench.report.files import view_json, write_view
    from hpcbench.report.findings import headline

    people = text_view(findings, title, notes, threshold)
    programs = data_view(findings, title, notes)
    if junit is not None:
        write_atomic(junit, junit_xml(findings, title))
        say(f"{len(findings)} tests written to {junit}")
    if out is not None:
        write_view(people if out.suffix in (".md", ".tex") else programs, out)
        say(f"{len(findings)} rows written to {out}")
    if as_json:
        print_json(view_json(programs))
    elif not findings:
        say("\n".join([headline(findings), *notes]))
    else:
        show_view(people)
