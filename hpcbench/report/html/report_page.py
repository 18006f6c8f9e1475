"""Assembly and rendering of the HTML page: sections, template and content security policy.

Every value is escaped, only scripts of the package run, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

import hpcbench
from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.report.configurations import ResultRow, filter_launches, row_sort_key, rows_from_frame
from hpcbench.report.findings.finding import FINDING_KINDS, INCONCLUSIVE, Finding, pluralize
from hpcbench.report.findings.findings_report import (
    Findings,
    derive_findings,
    finding_details,
    runs_overview,
    suggested_measurements,
)
from hpcbench.report.findings.problem_findings import UnfinishedSweep
from hpcbench.report.html.page_elements import (
    HtmlTable,
    PageFigure,
    PageFigures,
    draw_page_figures,
    evidence_html_table,
    failures_html_table,
    make_html_table,
    results_html_table,
    script_json,
    warnings_html_table,
)
from hpcbench.report.html.page_provenance import (
    MAX_SWEEP_POINTS,
    environments_html_table,
    reproducing_commands,
    reproducing_sweep_toml,
    runs_html_table,
    sample_runs,
)
from hpcbench.report.plots.plot_model import PlotRequest, ReadFullResults
from hpcbench.report.table_model import WarningFootnotes

if TYPE_CHECKING:
    import polars

    from hpcbench.report.column_names import Condition

TEMPLATE_FOLDER = Path(__file__).resolve().parent / "template"


@dataclass(frozen=True)
class PageFinding:
    """A finding."""

    subject: str
    text: str
    sure: str
    grounds: list[str] = field(default_factory=list)
    evidence: HtmlTable | None = None


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one kind; ``more`` says what is left out."""

    heading: str
    items: list[PageFinding]
    more: str = ""


@dataclass(frozen=True)
class TextBlock:
    """Text that keeps its lines."""

    heading: str
    text: str


@dataclass(frozen=True)
class PageSection:
    """A part of the page with an address of its own."""

    ident: str
    heading: str
    texts: list[str] = field(default_factory=list)
    groups: list[FindingGroup] = field(default_factory=list)
    figures: list[PageFigure] = field(default_factory=list)
    grids: list[HtmlTable] = field(default_factory=list)
    blocks: list[TextBlock] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def render_page(
    title: str, overview: str, where: str | None, sections: Sequence[PageSection], library: str = ""
) -> str:
    """The page; ``library`` is what makes plots explorable."""
    style = _read_template("style.css")
    scripts = [*([library] if library else []), _read_template("page.js")]
    return _jinja_environment().get_template("page.html.j2").render(
        title=title, overview=overview, where=where or "", sections=sections, version=hpcbench.__version__,
        style=_trusted_markup(style), scripts=[_trusted_markup(one) for one in scripts],
        policy=content_security_policy(style, scripts),
    )  # fmt: skip


def content_security_policy(style: str, scripts: Sequence[str]) -> str:
    """A Content-Security-Policy under which these very texts run and style, pictures are in the page, and no more."""
    hashes = " ".join(_csp_hash(one) for one in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src {_csp_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _csp_hash(text: str) -> str:
    # A browser hashes what stands between the tags, with its line ends as they are.
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read_template(name: str) -> str:
    return (TEMPLATE_FOLDER / name).read_text(encoding="utf-8")


def _trusted_markup(text: str) -> Markup:
    assert "</script" not in text.lower(), "the element would end within"
    assert "</style" not in text.lower(), "the element would end within"
    return Markup(text)  # noqa: S704 - a file of this package, or the library that was made for it


def _jinja_environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(TEMPLATE_FOLDER)), undefined=jinja2.StrictUndefined, autoescape=True,
        finalize=_printable_value, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters["script_json"] = script_json
    made.filters["script_text"] = _script_text
    return made


def _printable_value(value: Any) -> Any:
    """Text without characters that hide or reorder what stands there."""
    return printable_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _script_text(text: str) -> Markup:
    assert "<" not in text, "only JSON of script_json can stand in a script element"
    return Markup(text)  # noqa: S704


_MAX_FINDINGS_OF_A_KIND = 60
_CERTAINTY_NOTES = [
    "told: more than chance; all findings of one kind together are wrong in at most 5 % of reports. "
    "alike: the whole 95 % interval of the ratio lies within 2 %. "
    "cannot tell: neither. counted: nothing was inferred.",
    "The unit is the launch: steps of one launch share its nodes, placement and clocks.",
]


@dataclass(frozen=True)
class ReportRequest:
    """What a page is about."""

    title: str
    sources: Sequence[str]
    where: Condition | None = None
    bound: float = 0.8
    unfinished: Sequence[UnfinishedSweep] = ()
    whole: ReadFullResults | None = None
    """Reads whole results, for provenance and for plots of what is in files alone."""
    predicted: polars.DataFrame | None = None
    """What was both predicted and measured: ``strategy, predicted, measured`` (s), as the plot ``predicted`` reads it,
    and any other columns that tell the rows from each other."""
    lines: polars.DataFrame | None = None
    """Predicted step times over devices, as the plot ``scaling`` reads them."""


def report_html(frame: polars.DataFrame, subject: ReportRequest) -> str:
    """The HTML of a report on a results frame with all columns (``load.gather``)."""
    findings = derive_findings(frame, subject.where, subject.bound, subject.unfinished)
    asked = {run_id for row in findings.rows for run_id in row.run_ids}
    rows = sorted(
        (row for row in rows_from_frame(frame) if subject.where is None or row.run_ids[0] in asked), key=row_sort_key
    )
    narrowed = filter_launches(frame, subject.where)
    marks = WarningFootnotes(rows)
    plots = draw_page_figures(narrowed, PlotRequest(whole=subject.whole), subject.predicted, subject.lines)
    sections = [
        _findings_section(findings), _scales_section(findings), _predicted_section(subject.predicted),
        _plots_section(plots),
        _results_section(narrowed, rows, marks), _warnings_section(rows, marks),
        _provenance_section(narrowed, subject.whole),
        _reproduce_section(findings, subject),
    ]  # fmt: skip
    where = subject.where.expression.text if subject.where else None
    return render_page(
        subject.title, runs_overview(findings), where, [one for one in sections if one is not None], plots.scripts
    )


def _findings_section(findings: Findings) -> PageSection:
    groups = []
    for kind, heading in FINDING_KINDS.items():
        answers = findings.of(kind)
        if answers:
            shown = [
                _page_finding(f"{kind}-{number}", one)
                for number, one in enumerate(answers[:_MAX_FINDINGS_OF_A_KIND], 1)
            ]
            more = f"{len(answers) - len(shown)} more are not shown; --where narrows the question"
            groups.append(FindingGroup(heading, shown, more if len(answers) > len(shown) else ""))
    texts = ["There are no results."] if not groups else []
    return PageSection("findings", "Findings", texts, groups, notes=[*_inconclusive_notes(findings), *_CERTAINTY_NOTES])


def _page_finding(ident: str, answer: Finding) -> PageFinding:
    evidence = evidence_html_table(f"rows-{ident}", answer.evidence) if answer.evidence else None
    # The certainty stands before it.
    text = answer.text.removeprefix(f"{INCONCLUSIVE}; ").removeprefix(f"{INCONCLUSIVE}: ")
    return PageFinding(answer.subject, text, answer.sure, finding_details(answer), evidence)


def _inconclusive_notes(findings: Findings) -> list[str]:
    if not findings.unsettled:
        return []
    settled = "; ".join(f"{text} ({count})" for text, count in suggested_measurements(findings))
    return [f"What cannot be told: {pluralize(len(findings.unsettled), 'finding')}. What would settle them: {settled}."]


def _scales_section(findings: Findings) -> PageSection | None:
    """The fastest strategies as a table: scales, workloads and clusters side by side."""
    names = ["workload", "nodes", "devices", "cluster", "spec.strategy", "metrics.samples_per_s", "rival", "ratio",
             "low", "high", "sure"]  # fmt: skip
    table = [
        [
            _workload_name(one),
            one.nodes,
            one.devices,
            one.cluster,
            one.strategy,
            one.evidence[0].samples_per_s,
            one.rival,
            *map(_percent_change, (one.ratio, one.ratio_low, one.ratio_high)),
            one.sure,
        ]
        for one in findings.of("fastest")
    ]
    if not table:
        return None
    headings = {
        "spec.strategy": "most samples/s", "rival": "next", "ratio": "ahead %", "low": "from %", "high": "to %",
    }  # fmt: skip
    caption = "The fastest strategy per workload, scale and cluster"
    keys = ("workload", "nodes", "devices", "cluster", "spec.strategy", "sure")
    return PageSection(
        "scales",
        "Scales and clusters",
        grids=[make_html_table("glance", caption, names, table, keys=keys, headings=headings)],
    )


def _workload_name(answer: Finding) -> str:
    return answer.subject.partition(f", {pluralize(answer.nodes or 0, 'node')}")[0]


def _percent_change(ratio: float | None) -> float | None:
    return None if ratio is None else round((ratio - 1) * 100, 1)


def _predicted_section(frame: polars.DataFrame | None) -> PageSection | None:
    if frame is None or frame.is_empty():
        return None
    names = [_PREDICTED_COLUMN_NAMES.get(name, name) for name in frame.columns]
    headings = {column: name for name, column in _PREDICTED_COLUMN_NAMES.items()}
    rows = [[*row] for row in frame.iter_rows()]
    caption = "Step times as predicted and as measured"
    table = make_html_table("predicted-rows", caption, names, rows, keys=("spec.strategy",), headings=headings)
    return PageSection("predicted", "Predicted and measured", grids=[table])


_PREDICTED_COLUMN_NAMES = {
    "strategy": "spec.strategy",
    "predicted": "predicted_step_time_s",
    "measured": "measured_step_time_s",
}


def _plots_section(plots: PageFigures) -> PageSection:
    notes = ["Not drawn: " + "; ".join(plots.left_out)] if plots.left_out else []
    return PageSection("plots", "Plots", figures=plots.drawn, notes=notes)


def _results_section(frame: polars.DataFrame, rows: Sequence[ResultRow], marks: WarningFootnotes) -> PageSection:
    sweeps = dict(frame.select("run_id", "sweep").drop_nulls().iter_rows())
    grids = [results_html_table(rows, sweeps, marks), failures_html_table(rows)]
    return PageSection("configurations", "All results", grids=[one for one in grids if one is not None])


def _warnings_section(rows: Sequence[ResultRow], marks: WarningFootnotes) -> PageSection | None:
    found = warnings_html_table(rows, marks)
    return None if found is None else PageSection("warnings", "Warnings", grids=[found])


def _provenance_section(frame: polars.DataFrame, whole: ReadFullResults | None) -> PageSection:
    grids = [runs_html_table(frame)]
    if whole is not None:
        found = environments_html_table(whole(sample_runs(frame)), len(frame))
        grids += [found] if found else []
    return PageSection("provenance", "What was run where and when", grids=grids)


def _reproduce_section(findings: Findings, subject: ReportRequest) -> PageSection:
    specs = [row.spec for row in findings.rows]
    points = reproducing_sweep_toml(specs, repeats=max((len(row.run_ids) for row in findings.rows), default=1))
    clusters = list(dict.fromkeys(printable_excerpt(row.cluster) for row in findings.rows))
    where = subject.where.expression.text if subject.where else None
    shown = reproducing_commands(subject.sources, clusters, where, has_sweep=points is not None)
    blocks = [TextBlock("Commands", "\n".join(shown))]
    blocks += [TextBlock("again.toml, the points of this page as a sweep", points)] if points else []
    notes = [] if points or not specs else [f"more than {MAX_SWEEP_POINTS} points: use the sweeps that made them"]
    notes.append("a run that has a result is not run again: another results tree (--results) measures all anew")
    return PageSection("reproduce", "How to reproduce it", blocks=blocks, notes=notes)
