"""The commands ``report``, ``plot`` and ``bundle``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcbench.cli.common import json_option, make_console, print_json, print_message, results_option, results_tree
from hpcbench.errors import ConfigError

if TYPE_CHECKING:
    import polars

    from hpcbench.report.column_names import Condition
    from hpcbench.report.findings.problem_findings import UnfinishedSweep
    from hpcbench.report.html.report_page import ReportRequest
    from hpcbench.report.plots.plot_model import Plot
    from hpcbench.results.results_tree import ResultsTree
    from hpcbench.results.schema import RunResult


@click.command()
@click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'nodes == 4 and strategy != \"single\"'.")
@click.option(
    "--bound", metavar="SHARE", type=click.FloatRange(0, 1, min_open=True), default=0.8, show_default=True,
    help="The least efficiency that is good enough.",
)  # fmt: skip
@click.option("--predict", is_flag=True, help="On the page, what the oracle says beside what was measured.")
@click.option("--out", metavar="FILE.html", type=click.Path(path_type=Path), help="One page that needs no network.")
@results_option
@json_option
def report(
    *,
    sources: tuple[str, ...],
    cluster_name: str | None,
    where: str | None,
    bound: float,
    predict: bool,
    out: Path | None,
    results: str | None,
    as_json: bool,
) -> None:
    """Say what the results of sweeps, trees or bundles show: the fastest strategy per scale, and how sure that is.

    Also where the fastest changes, where efficiency falls, what does not fit into memory, what failed and why, and
    what cannot be told.
    """
    from hpcbench.report.column_names import Condition
    from hpcbench.report.findings.findings_report import derive_findings, findings_json, findings_renderable
    from hpcbench.report.load_results import load_frame

    if out is not None and out.suffix not in _PAGE_ENDINGS:
        raise ConfigError(f"cannot write {out}: a report is a page", hint=f"endings: {', '.join(_PAGE_ENDINGS)}")
    condition = Condition(where, "--where") if where else None
    clusters = [cluster_name] if cluster_name else None
    frame = load_frame(results_tree(results), sources, clusters)
    title = ", ".join(Path(one).name for one in sources) if sources else str(results_tree(results).root)
    sweeps = _unfinished_sweeps(results_tree(results), sources, clusters, frame)
    if out is not None:
        from hpcbench.report.html.report_page import ReportRequest

        whole = partial(_full_results, results_tree(results), sources, clusters)
        foretold = _predicted_frames(frame, condition, results_tree(results)) if predict else {}
        _write_page(out, frame, ReportRequest(title, sources, condition, bound, sweeps, whole, **foretold))
        print_message(f"report on {len(frame)} runs written to {out}")
    if out is not None and not as_json:
        return
    findings = derive_findings(frame, condition, bound, sweeps)
    if as_json:
        print_json(findings_json(findings, [*sources]))
    elif not findings.answers:
        print_message(f"no results {f'for which {where}' if where else 'yet'} in {title}")
    else:
        make_console().print(findings_renderable(findings, f"{title}{f', {where}' if where else ''}"))


_PAGE_ENDINGS = (".html", ".htm")


def _predicted_frames(
    frame: polars.DataFrame, where: Condition | None, results: ResultsTree
) -> dict[str, polars.DataFrame]:
    from hpcbench.report.configurations import filter_launches
    from hpcbench.report.oracle_validation import ClusterForecasts
    from hpcbench.report.prediction_frames import measured_vs_predicted_frame, predicted_scaling_frame

    forecasts, narrowed = ClusterForecasts(results), filter_launches(frame, where)
    return {
        "predicted": measured_vs_predicted_frame(narrowed, forecasts),
        "lines": predicted_scaling_frame(narrowed, forecasts),
    }


def _write_page(out: Path, frame: polars.DataFrame, subject: ReportRequest) -> None:
    from hpcbench.fileio import write_atomic
    from hpcbench.report.html.report_page import report_html

    write_atomic(out, report_html(frame, subject).encode())


def _unfinished_sweeps(
    results: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, frame: polars.DataFrame
) -> list[UnfinishedSweep]:
    """How many runs of the sweeps that are named have no result."""
    from hpcbench.report.findings.problem_findings import UnfinishedSweep
    from hpcbench.report.load_results import is_results_path
    from hpcbench.report.sweep_selection import select_sweeps

    named = [one for one in sources if not is_results_path(one)]
    chosen: list[str | None] = [*clusters] if clusters else [None]
    there = set(frame.select("cluster", "run_id").iter_rows())
    return [
        UnfinishedSweep(
            record.sweep, name, sum((name, one) not in there for one in record.run_ids), len(record.run_ids)
        )
        for cluster in (chosen if named else [])
        for name, record in select_sweeps(results, named, cluster)
    ]


def _full_results(
    results: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, wanted: Sequence[tuple[str, str]]
) -> list[RunResult]:
    from hpcbench.report.load_results import full_results

    return full_results(results, sources, clusters, wanted)


@click.command()
@click.argument("kind", required=False)
@click.argument("sources", metavar="[SWEEP|TREE|BUNDLE]...", nargs=-1)
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only this cluster.")
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'nodes == 4 and strategy != \"single\"'.")
@click.option("--by", metavar="KEYS", help="What tells lines apart, comma between (default: the strategy).")
@click.option("--predict", is_flag=True, help="With what the oracle says: lines for scaling, points for predicted.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help=".png .svg .pdf .html or .json")
@results_option
@json_option
def plot(
    *,
    kind: str | None,
    sources: tuple[str, ...],
    cluster_name: str | None,
    where: str | None,
    by: str | None,
    predict: bool,
    out: Path | None,
    results: str | None,
    as_json: bool,
) -> None:
    """Draw the results of sweeps, trees or bundles, or of the whole tree; without KIND the kinds are listed."""
    from hpcbench.report.plots.plotting import PLOTS
    from hpcbench.report.plots.plotting import plot_kind as kind_of

    if kind is None:
        if as_json:
            print_json({"kinds": [{"name": name, "summary": one.summary} for name, one in PLOTS.items()]})
            return
        for name, one in PLOTS.items():
            make_console().print(f"{name:14}{one.summary}")
        return
    kind_of(kind)
    if out is not None:
        from hpcbench.report.plots.plotting import check_plot_suffix

        check_plot_suffix(out)
    picture = _draw_picture(kind, sources, cluster_name, where, by, results, predict=predict)
    if as_json:
        print_json({"plots": [_picture_json(picture)]})
    if out is not None:
        from hpcbench.report.plots.plotting import save_plot

        save_plot(picture, out)
        print_message(f"{picture.title} written to {out}")
        for note in picture.notes:
            print_message(note)
    if as_json or out is not None:
        return
    from hpcbench.report.plots.plotting import TerminalPlot

    make_console().print(TerminalPlot(picture))


def _draw_picture(
    kind: str, sources: Sequence[str], cluster: str | None, where: str | None, by: str | None, results: str | None,
    *, predict: bool,
) -> Plot:  # fmt: skip
    from hpcbench.report.column_names import Condition, resolve_column, source_columns
    from hpcbench.report.configurations import filter_launches
    from hpcbench.report.load_results import full_results, load_frame
    from hpcbench.report.oracle_validation import ClusterForecasts
    from hpcbench.report.plots.plot_model import PlotRequest
    from hpcbench.report.plots.plotting import draw_plot, plot_columns
    from hpcbench.report.prediction_frames import SPEC_COLUMNS

    clusters = [cluster] if cluster else None
    keys = tuple(resolve_column(name.strip()) for name in by.split(",")) if by else ()
    condition = Condition(where, "--where") if where else None
    foretold = _prediction_frame_function(kind) if predict else None
    columns = [*plot_columns(kind), *source_columns(keys), *(condition.columns if condition else [])]
    columns += SPEC_COLUMNS if foretold else ()
    tree_ = results_tree(results)
    frame = filter_launches(load_frame(tree_, sources, clusters, columns), condition)

    def whole(wanted: Sequence[tuple[str, str]]) -> Iterable[RunResult]:
        return full_results(tree_, sources, clusters, wanted)

    predicted = foretold(frame, ClusterForecasts(tree_), keys) if foretold else None
    return draw_plot(kind, frame, PlotRequest(keys, whole, predicted))


def _prediction_frame_function(kind: str) -> Callable[..., polars.DataFrame]:
    """What makes the oracle's rows for a kind of plot."""
    from hpcbench.errors import ConfigError
    from hpcbench.report.prediction_frames import measured_vs_predicted_frame, predicted_scaling_frame

    made: dict[str, Callable[..., polars.DataFrame]] = {
        "scaling": predicted_scaling_frame,
        "predicted": measured_vs_predicted_frame,
    }
    if kind not in made:
        raise ConfigError(f"--predict: the plot {kind} shows no predictions", hint=f"choices: {', '.join(made)}")
    return made[kind]


def _picture_json(picture: Plot) -> dict[str, Any]:
    from hpcbench.report.plots.plotting import plot_specification

    return {
        "name": picture.name, "title": picture.title, "alt": picture.alt, "notes": picture.notes,
        "nothing": picture.nothing or None, "specification": plot_specification(picture), "rows": picture.rows,
    }  # fmt: skip


@click.command()
@click.argument("sweep")
@click.option("--cluster", "cluster_name", metavar="NAME", help="Only from this cluster (default: all that have it).")
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path), help="A .tar.gz (default: SWEEP.hpcbench.tar.gz)."
)
@click.option("--logs", is_flag=True, help="With what the ranks and the jobs said: of each log the last 16 MiB.")
@click.option("--anonymous", is_flag=True, help="With stand-ins for people and machines; see above.")
@results_option
def bundle(
    sweep: str, cluster_name: str | None, out: Path | None, logs: bool, anonymous: bool, results: str | None
) -> None:
    """Pack SWEEP into one file for handing over: its record, results, scripts and task files, the start markers and
    rank files of the attempts that count, and a list with the SHA-256 of each.

    `hpcbench table FILE` and `hpcbench collect FILE` read it without unpacking it.

    --anonymous puts stand-ins (user-1, node-1, ...) in the place of accounts and real names of the files' owners, other
    people whose home folder is named, host names with and without domain, IP, MAC and e-mail addresses, SLURM accounts,
    numbers of users and groups, serial numbers of GPUs, home folders, and the paths of the results tree and the
    project: in values, keys, scripts, logs, errors and file names, and the same one everywhere. It leaves job ids,
    process ids, times, versions, hardware, the names of sweep, cluster, partitions and modules, descriptions, git
    commits, other paths, and variables, except where one of those names stands in them. A name that nothing but a log
    holds is not known as one: look through it before you publish it.
    """
    from hpcbench.errors import ConfigError
    from hpcbench.report.sweep_bundle import write_bundle
    from hpcbench.report.sweep_selection import select_sweeps, sweep_name
    from hpcbench.results.bundle_archive import BUNDLE_SUFFIXES, is_bundle_path
    from hpcbench.units import format_bytes

    out = out or Path(f"{sweep_name(sweep)}.hpcbench.tar.gz")
    if not is_bundle_path(out.name):
        raise ConfigError(f"cannot write {out}: unknown ending", hint=f"choices: {', '.join(BUNDLE_SUFFIXES)}")
    chosen = select_sweeps(results_tree(results), (sweep,), cluster_name)
    written = write_bundle(results_tree(results), chosen, out, logs=logs, anonymous=anonymous)
    for name, reason in written.left_out.items():
        print_message(f"left out: {name}: {reason}")
    print_message(f"{written.runs} runs, {written.files} files, {format_bytes(out.stat().st_size)} written to {out}")
