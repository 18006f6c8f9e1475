"""The actions of the commands ``report``, ``plot`` and ``bundle``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpcbench.cli.common import (
    cluster_filter_option,
    complete_choices,
    complete_columns,
    filter_options,
    make_console,
    out_option,
    print_json,
    print_message,
    read_options,
    sources_argument,
    sweep_argument,
    why_nothing,
)
from hpcbench.cli.results_commands import unfinished_sweeps
from hpcbench.errors import INSTALL_REPORT, ConfigError
from hpcbench.fileio import write_atomic
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.report.column_names import Condition
from hpcbench.report.configurations import filter_launches
from hpcbench.report.findings.findings_report import derive_findings, findings_json, findings_renderable
from hpcbench.report.findings.node_exclusions import write_exclusions
from hpcbench.report.html.report_page import ReportRequest, report_html
from hpcbench.report.load_results import full_results, load_frame
from hpcbench.report.plots.plot_model import Plot
from hpcbench.report.plots.plotting import (
    PLOTS,
    PlotOptions,
    can_draw_files,
    check_plot_suffix,
    plot_kind,
    plot_results,
    plot_specification,
    save_plot,
)
from hpcbench.report.plots.terminal_plots import print_plot
from hpcbench.report.prediction_frames import frames_of_page
from hpcbench.report.sweep_bundle import write_bundle
from hpcbench.results.bundle_archive import BUNDLE_SUFFIXES, is_bundle_path
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import RunResult
from hpcbench.submit.submission_record import select_sweeps, sweep_name
from hpcbench.units import format_bytes, pluralize

_PAGE_SUFFIXES = (".html", ".htm")
_PLOTS_WITH_PREDICTIONS = ("scaling", "predicted")


@click.command("report")
@sources_argument
@filter_options
@click.option(
    "--bound", metavar="SHARE", type=click.FloatRange(0, 1, min_open=True), default=0.8, show_default=True,
    help="Efficiency threshold.",
)  # fmt: skip
@click.option("--predict", is_flag=True, help="Show predictions beside measurements on the page.")
@out_option("One HTML page that needs no network.", metavar="FILE.html")
@click.option(
    "--exclude-slow", metavar="CLUSTER.toml", type=click.Path(dir_okay=False, path_type=Path),
    help="Write a profile of the cluster that excludes the nodes that are named as slow.",
)  # fmt: skip
@read_options
def report_findings(
    *,
    sources: tuple[str, ...],
    cluster_name: str | None,
    where: str | None,
    bound: float,
    predict: bool,
    out: Path | None,
    exclude_slow: Path | None,
    results: ResultsTree,
    as_json: bool,
) -> None:
    """Report the findings of sweeps, trees or bundles: the fastest strategy at each scale, and its significance.

    Further findings: crossovers between strategies, loss of efficiency, strategies that do not fit into memory, slow
    nodes and links, failures and their reasons, and inconclusive comparisons.
    """
    if out is not None and out.suffix not in _PAGE_SUFFIXES:
        raise ConfigError(f"cannot write {out}: a report is a page", hint=f"endings: {', '.join(_PAGE_SUFFIXES)}")
    clusters = [cluster_name] if cluster_name else None
    condition = Condition(where, "--where") if where is not None else None
    frame = load_frame(results, sources, clusters)
    title = ", ".join(Path(source).name for source in sources) if sources else str(results.root)
    sweeps, forecasts = unfinished_sweeps(results, sources, clusters, frame), ClusterForecasts(results)

    def load_full(wanted: Sequence[tuple[str, str]]) -> list[RunResult]:
        return full_results(results, sources, clusters, wanted)

    if out is not None:
        predictions = {}
        if predict:
            predictions = frames_of_page(filter_launches(frame, condition), results)
        request = ReportRequest(title, sources, condition, bound, sweeps, load_full, forecasts=forecasts, **predictions)
        write_atomic(out, report_html(frame, request).encode())
        print_message(f"report on {pluralize(len(frame), 'run')} written to {out}")
        if not can_draw_files():
            print_message(f"the page has no plots: {INSTALL_REPORT} makes them")
        if not as_json and exclude_slow is None:
            return
    findings = derive_findings(frame, condition, bound, sweeps, forecasts, load_full)
    if exclude_slow is not None:
        print_message(write_exclusions(findings, exclude_slow, title))
        if not as_json:
            return
    if as_json:
        print_json(findings_json(findings, [*sources]))
    elif not findings.answers:
        print_message(why_nothing(results, sources, len(frame), where))
    else:
        make_console().print(findings_renderable(findings, f"{title}{f', {where}' if where else ''}"))


@click.command("plot")
@click.argument("kind", required=False, shell_complete=complete_choices)
@sources_argument
@filter_options
@click.option(
    "--by",
    metavar="KEYS",
    shell_complete=complete_columns,
    help="Parameters that get their own line, comma-separated (default: strategy).",
)
@click.option(
    "--x",
    metavar="PARAMETER",
    shell_complete=complete_columns,
    help="Parameter on the x axis of plots over devices, such as batch_size; words become bars. (default: devices)",
)
@click.option("--predict", is_flag=True, help="Add predictions: lines in scaling, points in predicted.")
@click.option(
    "--metric", metavar="M", shell_complete=complete_columns, help="Metric of history. (default: step_time_s)"
)
@out_option(".png .svg .pdf .html or .json")
@read_options
def draw_plot(
    *,
    kind: str | None,
    sources: tuple[str, ...],
    cluster_name: str | None,
    where: str | None,
    by: str | None,
    x: str | None,
    predict: bool,
    metric: str | None,
    out: Path | None,
    results: ResultsTree,
    as_json: bool,
) -> None:
    """Draw the results of sweeps, trees or bundles, or of the whole tree.

    Without KIND all kinds are listed with what each shows.

    \b
    hpcbench plot throughput quickstart
    hpcbench plot scaling quickstart --by strategy --where 'batch_size == 32' --out scaling.svg
    hpcbench plot history quickstart --metric peak_memory_bytes
    """
    if kind is None:
        if as_json:
            print_json({"kinds": [{"name": name, "summary": entry.summary} for name, entry in PLOTS.items()]})
            return
        for name, entry in PLOTS.items():
            make_console().print(f"{name:14}{entry.summary}")
        return
    plot_kind(kind)
    if out is not None:
        check_plot_suffix(out)
    if predict and kind not in _PLOTS_WITH_PREDICTIONS:
        hint = f"choices: {', '.join(_PLOTS_WITH_PREDICTIONS)}"
        raise ConfigError(f"--predict: the plot {kind} shows no predictions", hint=hint)
    clusters = [cluster_name] if cluster_name else None
    drawn = plot_results(kind, results, sources, clusters, PlotOptions(where, by, x, predict, metric))
    if as_json:
        print_json({"plots": [_plot_json(drawn)]})
    if out is not None:
        save_plot(drawn, out)
        print_message(f"{drawn.title} written to {out}")
        for note in drawn.notes:
            print_message(note)
    if not as_json and out is None:
        print_plot(drawn, make_console())


def _plot_json(drawn: Plot) -> dict[str, Any]:
    return {
        "name": drawn.name, "title": drawn.title, "alt": drawn.alt, "notes": drawn.notes,
        "nothing": drawn.nothing or None, "specification": plot_specification(drawn), "rows": drawn.rows,
    }  # fmt: skip


@click.command("bundle")
@sweep_argument
@cluster_filter_option
@out_option("A .tar.gz (default: SWEEP.hpcbench.tar.gz).")
@click.option("--logs", is_flag=True, help="Include the logs of ranks and jobs: the last 16 MiB of each.")
@read_options
def pack_sweep(
    *, sweep: str, cluster_name: str | None, out: Path | None, logs: bool, results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Pack SWEEP into one file for others: its record, results, scripts and task files, the start markers and
    rank files of the attempts that count, and a list with the SHA-256 of each.

    `hpcbench table FILE` and `hpcbench collect FILE` read it without unpacking it.

    Names of people, machines, accounts and folders stay in it: read it before you publish it.
    """
    out = out or Path(f"{sweep_name(sweep)}.hpcbench.tar.gz")
    if not is_bundle_path(out.name):
        raise ConfigError(f"cannot write {out}: unknown ending", hint=f"choices: {', '.join(BUNDLE_SUFFIXES)}")
    chosen = select_sweeps(results, (sweep,), cluster_name)
    written = write_bundle(results, chosen, out, logs=logs)
    for name, reason in written.left_out.items():
        print_message(f"left out: {name}: {reason}")
    counted = f"{pluralize(written.runs, 'run')}, {pluralize(written.files, 'file')}"
    print_message(f"{counted}, {format_bytes(out.stat().st_size)} written to {out}")
    if as_json:
        document = {"path": str(out), "runs": written.runs, "files": written.files, "bytes": out.stat().st_size}
        print_json({**document, "left_out": [{"file": name, "reason": why} for name, why in written.left_out.items()]})
