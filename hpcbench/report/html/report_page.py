"""Assembly and rendering of the HTML page: sections, template and content security policy.

Every value is escaped, only scripts of the package run, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import jinja2
import polars as pl
from markupsafe import Markup

import hpcbench
from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.report.column_names import Condition
from hpcbench.report.configurations import filter_launches, row_sort_key, rows_from_frame
from hpcbench.report.findings import findings_report
from hpcbench.report.findings.finding import FINDING_KINDS, Finding
from hpcbench.report.findings.findings_report import Findings
from hpcbench.report.findings.problem_findings import UnfinishedSweep
from hpcbench.report.findings.throughput_findings import EFFICIENCY_BOUND
from hpcbench.report.html import page_elements
from hpcbench.report.html.page_elements import PageFigure, page_view
from hpcbench.report.plots.plot_model import PlotRequest, ReadFullResults
from hpcbench.report.table_model import Column, View, WarningFootnotes
from hpcbench.units import pluralize

TEMPLATE_FOLDER = Path(__file__).resolve().parent / "template"


@dataclass(frozen=True)
class PageSection:
    """A part of the page with its own address. ``groups`` of findings and ``blocks`` of text have headings."""

    ident: str
    heading: str
    texts: list[str] = field(default_factory=list)
    groups: list[tuple[str, list[Finding], str]] = field(default_factory=list)
    """Heading, findings, and a note about findings that are not shown."""
    figures: list[PageFigure] = field(default_factory=list)
    grids: list[View] = field(default_factory=list)
    blocks: list[tuple[str, str]] = field(default_factory=list)
    """Heading and text that keeps its lines."""
    notes: list[str] = field(default_factory=list)


def render_page(
    title: str, overview: str, where: str | None, sections: Sequence[PageSection], library: str = ""
) -> str:
    """Return the HTML; ``library`` is the script that makes plots interactive."""
    style = _read_template("style.css")
    scripts = [*([library] if library else []), _read_template("page.js")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(TEMPLATE_FOLDER)), undefined=jinja2.StrictUndefined, autoescape=True,
        finalize=_printable_value, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(script_json=page_elements.script_json, script_text=_script_text, excerpt=_excerpt)
    environment.globals.update(details=findings_report.finding_details, evidence=page_elements.evidence_view)
    return environment.get_template("page.html.j2").render(
        title=title, overview=overview, where=where or "", sections=sections, version=hpcbench.__version__,
        style=_trusted_markup(style), scripts=[_trusted_markup(script) for script in scripts],
        policy=content_security_policy(style, scripts),
    )  # fmt: skip


def content_security_policy(style: str, scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that allows exactly these texts, and pictures within the page."""
    # A browser hashes the text between the tags with its line ends.
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, *scripts)]
    style_hash, *script_hashes = [f"'sha256-{digest}'" for digest in digests]
    return (
        f"default-src 'none'; script-src {' '.join(script_hashes)}; style-src {style_hash}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _read_template(name: str) -> str:
    return (TEMPLATE_FOLDER / name).read_text(encoding="utf-8")


def _trusted_markup(text: str) -> Markup:
    assert "</script" not in text.lower(), "the element would end within"
    assert "</style" not in text.lower(), "the element would end within"
    return Markup(text)  # noqa: S704 - a file of this package, or the library that was made for it


def _printable_value(value: Any) -> Any:
    """Text without characters that hide or reorder others."""
    return printable_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _excerpt(text: str) -> str:
    """A cell as printable text of a readable length."""
    text = printable_excerpt(text)
    return text if len(text) <= _MAX_CELL_CHARS else f"{text[:_MAX_CELL_CHARS]} ..."


def _script_text(text: str) -> Markup:
    assert "<" not in text, "only JSON of script_json can stand in a script element"
    return Markup(text)  # noqa: S704


_MAX_CELL_CHARS = 400
_MAX_FINDINGS_OF_A_KIND = 60
_MAX_SUMMARY_WARNINGS = 3
_CERTAINTY_NOTES = [
    "significant: unlikely to be chance (family-wise error rate 5 % per kind of finding). "
    "equivalent: the whole 95 % interval of the ratio lies within 2 %. "
    "inconclusive: neither. observed: nothing was inferred.",
    "The unit is the launch: steps of one launch share its nodes, placement and clocks.",
]


@dataclass(frozen=True)
class ReportRequest:
    """The subject of a page.

    Args:
        title: heading of the page.
        sources: sweeps, trees and bundles as given on the command line.
        where: restricts the configurations.
        bound: efficiency below which scaling is reported to fall.
        unfinished: sweeps of the results that have unfinished runs.
        whole: reads full results, for provenance and for plots of their details.
        predicted: configurations that were both predicted and measured, for the plot ``predicted``: columns
            ``strategy``, ``predicted``, ``measured`` (seconds), and others that distinguish the rows.
        lines: predicted step times over devices, for the plot ``scaling``.
        forecasts: of the tree that holds the results.
    """

    title: str
    sources: Sequence[str]
    where: Condition | None = None
    bound: float = EFFICIENCY_BOUND
    unfinished: Sequence[UnfinishedSweep] = ()
    whole: ReadFullResults | None = None
    predicted: pl.DataFrame | None = None
    lines: pl.DataFrame | None = None
    forecasts: ClusterForecasts | None = None

    @property
    def condition(self) -> str | None:
        """The text of ``where``; ``None`` if no condition is set."""
        return self.where.expression.text if self.where else None


def report_html(frame: pl.DataFrame, request: ReportRequest) -> str:
    """Return the HTML of a report on a results frame with all columns (``load_results.load_frame``)."""
    findings = findings_report.derive_findings(
        frame, request.where, request.bound, request.unfinished, request.forecasts, request.whole
    )
    wanted = {run_id for row in findings.rows for run_id in row.run_ids}
    rows = [row for row in rows_from_frame(frame) if request.where is None or row.run_ids[0] in wanted]
    rows.sort(key=row_sort_key)
    narrowed = filter_launches(frame, request.where)
    marks = WarningFootnotes(rows)
    figures, left_out, library = page_elements.draw_page_figures(
        narrowed, PlotRequest(whole=request.whole), request.predicted, request.lines
    )
    sweeps = dict(narrowed.select("run_id", "sweep").drop_nulls().iter_rows())
    results = [page_elements.results_view(rows, sweeps, marks), page_elements.failures_view(rows)]
    provenance: list[View | None] = [page_elements.runs_view(narrowed)]
    if request.whole is not None:
        sample = request.whole(page_elements.sample_runs(narrowed))
        provenance.append(page_elements.environments_view(sample, len(narrowed)))
    not_drawn = ["Not drawn: " + "; ".join(left_out)] if left_out else []
    sections = [
        _findings_section(findings),
        *_summary_section(findings, marks),
        *_tables_section("configurations", "All results", results),
        PageSection("plots", "Plots", figures=figures, notes=not_drawn),
        *_tables_section("predicted", "Predicted and measured", [_predicted_table(request.predicted)]),
        *_tables_section("warnings", "Warnings", [page_elements.warnings_view(rows, marks)]),
        *_tables_section("provenance", "Runs, hardware and software", provenance),
        _reproduce_section(findings, request),
    ]
    return render_page(request.title, findings_report.runs_overview(findings), request.condition, sections, library)


def _summary_section(findings: Findings, marks: WarningFootnotes) -> list[PageSection]:
    """The fastest strategy at each scale, and the warnings that most rows have; nothing without either."""
    table = _scales_table(findings)
    kinds = sorted((texts for _, texts in marks.kinds()), key=len, reverse=True)
    warnings = [f"Warning: {texts[0]} ({pluralize(len(texts), 'row')})" for texts in kinds[:_MAX_SUMMARY_WARNINGS]]
    if len(kinds) > len(warnings):
        warnings.append(f"{pluralize(len(kinds) - len(warnings), 'further kind')} of warnings: see Warnings")
    if table is None and not warnings:
        return []
    return [PageSection("summary", "Summary", grids=[table] if table else [], notes=warnings)]


def _tables_section(ident: str, heading: str, tables: Sequence[View | None]) -> list[PageSection]:
    """A section of those tables that exist; nothing without any."""
    grids = [table for table in tables if table is not None]
    return [PageSection(ident, heading, grids=grids)] if grids else []


def _findings_section(findings: Findings) -> PageSection:
    groups = []
    for kind, heading in FINDING_KINDS.items():
        of_kind = findings.of_kind(kind)
        shown = of_kind[:_MAX_FINDINGS_OF_A_KIND]
        hidden = len(of_kind) - len(shown)
        more = f"{hidden} more are not shown; --where narrows the question" if hidden else ""
        if shown:
            groups.append((heading, shown, more))
    heading, suggestions = findings_report.inconclusive_summary(findings)
    texts = "; ".join(f"{text} ({count})" for text, count in suggestions)
    notes = [f"{heading}. To resolve them: {texts}."] if suggestions else []
    empty = [] if groups else ["There are no results."]
    return PageSection("findings", "Findings", empty, groups, notes=[*notes, *_CERTAINTY_NOTES])


def _scales_table(findings: Findings) -> View | None:
    """The fastest strategies: scales, workloads and clusters side by side; what all rows share is in a note."""

    def lead(finding: Finding) -> str:
        ratio, *ends = (
            "" if value is None else f"{(value - 1) * 100:+.1f}"
            for value in (finding.ratio, finding.ratio_low, finding.ratio_high)
        )
        return f"{ratio} % [{ends[0]} {ends[1]}]" if all(ends) else ratio and f"{ratio} %"

    def workload(finding: Finding) -> str:
        return finding.subject.partition(f", {pluralize(finding.nodes or 0, 'node')}")[0]

    fastest = findings.of_kind("fastest")
    scales = ("nodes", "devices", "cluster")
    varying = [name for name in scales if len({getattr(finding, name) for finding in fastest}) > 1]
    scale_columns = [Column(name, name, attrgetter(name), choices=True) for name in varying]
    # The columns that a narrow screen shows without scrolling come first.
    columns = [
        Column("workload", "workload", workload, choices=True),
        *scale_columns[:1],
        Column("spec.strategy", "fastest strategy", attrgetter("strategy"), choices=True),
        Column("ratio", "lead [95 %]", attrgetter("ratio"), lead),
        *scale_columns[1:],
        Column("sure", "certainty", attrgetter("sure"), choices=True),
        Column("rival", "next", attrgetter("rival")),
        Column("metrics.samples_per_s", "samples/s", lambda finding: finding.evidence[0].samples_per_s),
    ]
    if not fastest:
        return None
    shared = ", ".join(f"{name} {getattr(fastest[0], name)}" for name in scales if name not in varying)
    caption = "The fastest strategy per workload, scale and cluster"
    notes = [f"all rows: {shared}"] if shared else []
    if any(map(lead, fastest)):
        notes.append("lead: samples/s over those of the next strategy, with the 95 % interval")
    return page_view("glance", caption, columns, fastest, notes)


def _predicted_table(frame: pl.DataFrame | None) -> View | None:
    if frame is None or frame.is_empty():
        return None
    names = [_PREDICTED_COLUMN_NAMES.get(name, name) for name in frame.columns]
    headings = {column: name for name, column in _PREDICTED_COLUMN_NAMES.items()}
    columns = page_elements.plain_columns(names, headings, keys=("spec.strategy",))
    return page_view("predicted-rows", "Step times as predicted and as measured", columns, list(frame.iter_rows()))


_PREDICTED_COLUMN_NAMES = {
    "strategy": "spec.strategy", "predicted": "predicted_step_time_s", "measured": "measured_step_time_s",
    "low": "step_time_s.low", "high": "step_time_s.high",
}  # fmt: skip
"""Names that tell ``format_value`` the unit."""


def _reproduce_section(findings: Findings, request: ReportRequest) -> PageSection:
    specs = [row.spec for row in findings.rows]
    repeats = max((len(row.run_ids) for row in findings.rows), default=1)
    sweep = page_elements.reproducing_sweep_toml(specs, repeats)
    clusters = list(dict.fromkeys(printable_excerpt(row.cluster) for row in findings.rows))
    commands = page_elements.reproducing_commands(
        request.sources, clusters, request.condition, has_sweep=sweep is not None
    )
    blocks = [("Commands", "\n".join(commands))]
    blocks += [("again.toml, the points of this page as a sweep", sweep)] if sweep else []
    notes = (
        [] if sweep or not specs else [f"more than {page_elements.MAX_SWEEP_POINTS} points: use the original sweeps"]
    )
    notes.append("a run that has a result is not run again: use another results tree (--results) to measure all anew")
    return PageSection("reproduce", "How to reproduce it", blocks=blocks, notes=notes)
