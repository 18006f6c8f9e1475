"""A page from results: which sections it has, and what stands in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcbench.fileio import brief
from hpcbench.report.answers.answer import CANNOT_TELL, KINDS, Answer, counted
from hpcbench.report.answers.doubts import Unfinished
from hpcbench.report.answers.find import Findings, find
from hpcbench.report.answers.show import grounds, overview, settlements
from hpcbench.report.groups import chosen
from hpcbench.report.marks import Marks
from hpcbench.report.page.figures import Figures, figures
from hpcbench.report.page.grid import grid
from hpcbench.report.page.provenance import environments_grid, runs_grid, sampled
from hpcbench.report.page.render import Block, Group, Item, Section, render
from hpcbench.report.page.reproduce import MOST_POINTS, commands, sweep_text
from hpcbench.report.page.results import evidence_grid, failures_grid, results_grid, warnings_grid
from hpcbench.report.plots.picture import Asked, Whole
from hpcbench.report.rows import Row, order, rows_of

if TYPE_CHECKING:
    import polars

    from hpcbench.report.names import Condition

_MOST_OF_A_KIND = 60
_CERTAINTY = [
    "told: more than chance; all findings of one kind together are wrong in at most 5 % of reports. "
    "alike: the whole 95 % interval of the ratio lies within 2 %. "
    "cannot tell: neither. counted: nothing was inferred.",
    "The unit is the launch: steps of one launch share its nodes, placement and clocks.",
]


@dataclass(frozen=True)
class Subject:
    """What a page is about."""

    title: str
    sources: Sequence[str]
    where: Condition | None = None
    bound: float = 0.8
    unfinished: Sequence[Unfinished] = ()
    whole: Whole | None = None
    """Reads whole results, for provenance and for plots of what is in files alone."""
    predicted: polars.DataFrame | None = None
    """What was both predicted and measured: ``strategy, predicted, measured`` (s), as the plot ``predicted`` reads it,
    and any other columns that tell the rows from each other."""
    lines: polars.DataFrame | None = None
    """Predicted step times over devices, as the plot ``scaling`` reads them."""


def page(frame: polars.DataFrame, subject: Subject) -> str:
    """The HTML of a report on a results frame with all columns (``load.gather``)."""
    findings = find(frame, subject.where, subject.bound, subject.unfinished)
    asked = {run_id for row in findings.rows for run_id in row.run_ids}
    rows = sorted((row for row in rows_of(frame) if subject.where is None or row.run_ids[0] in asked), key=order)
    narrowed = chosen(frame, subject.where)
    marks = Marks(rows)
    plots = figures(narrowed, Asked(whole=subject.whole), subject.predicted, subject.lines)
    sections = [
        _findings(findings), _glance(findings), _predicted(subject.predicted), _plots(plots),
        _results(narrowed, rows, marks), _warnings(rows, marks), _provenance(narrowed, subject.whole),
        _reproduce(findings, subject),
    ]  # fmt: skip
    where = subject.where.expression.text if subject.where else None
    return render(subject.title, overview(findings), where, [one for one in sections if one is not None], plots.scripts)


def _findings(findings: Findings) -> Section:
    groups = []
    for kind, heading in KINDS.items():
        answers = findings.of(kind)
        if answers:
            shown = [_item(f"{kind}-{number}", one) for number, one in enumerate(answers[:_MOST_OF_A_KIND], 1)]
            more = f"{len(answers) - len(shown)} more are not shown; --where narrows the question"
            groups.append(Group(heading, shown, more if len(answers) > len(shown) else ""))
    texts = ["There are no results."] if not groups else []
    return Section("findings", "Findings", texts, groups, notes=[*_unsettled(findings), *_CERTAINTY])


def _item(ident: str, answer: Answer) -> Item:
    evidence = evidence_grid(f"rows-{ident}", answer.evidence) if answer.evidence else None
    # The certainty stands before it.
    text = answer.text.removeprefix(f"{CANNOT_TELL}; ").removeprefix(f"{CANNOT_TELL}: ")
    return Item(answer.subject, text, answer.sure, grounds(answer), evidence)


def _unsettled(findings: Findings) -> list[str]:
    if not findings.unsettled:
        return []
    settled = "; ".join(f"{text} ({count})" for text, count in settlements(findings))
    return [f"What cannot be told: {counted(len(findings.unsettled), 'finding')}. What would settle them: {settled}."]


def _glance(findings: Findings) -> Section | None:
    """The fastest strategies as a table: scales, workloads and clusters side by side."""
    names = ["workload", "nodes", "devices", "cluster", "spec.strategy", "metrics.samples_per_s", "rival", "ratio",
             "low", "high", "sure"]  # fmt: skip
    table = [
        [_workload(one), one.nodes, one.devices, one.cluster, one.strategy, one.evidence[0].samples_per_s, one.rival,
         *map(_change, (one.ratio, one.ratio_low, one.ratio_high)), one.sure]
        for one in findings.of("fastest")
    ]  # fmt: skip
    if not table:
        return None
    headings = {
        "spec.strategy": "most samples/s", "rival": "next", "ratio": "ahead %", "low": "from %", "high": "to %",
    }  # fmt: skip
    caption = "The fastest strategy per workload, scale and cluster"
    keys = ("workload", "nodes", "devices", "cluster", "spec.strategy", "sure")
    return Section(
        "scales", "Scales and clusters", grids=[grid("glance", caption, names, table, keys=keys, headings=headings)]
    )


def _workload(answer: Answer) -> str:
    return answer.subject.partition(f", {counted(answer.nodes or 0, 'node')}")[0]


def _change(ratio: float | None) -> float | None:
    return None if ratio is None else round((ratio - 1) * 100, 1)


def _predicted(frame: polars.DataFrame | None) -> Section | None:
    if frame is None or frame.is_empty():
        return None
    names = [_PREDICTED.get(name, name) for name in frame.columns]
    headings = {column: name for name, column in _PREDICTED.items()}
    rows = [[*row] for row in frame.iter_rows()]
    caption = "Step times as predicted and as measured"
    table = grid("predicted-rows", caption, names, rows, keys=("spec.strategy",), headings=headings)
    return Section("predicted", "Predicted and measured", grids=[table])


_PREDICTED = {"strategy": "spec.strategy", "predicted": "predicted_step_time_s", "measured": "measured_step_time_s"}


def _plots(plots: Figures) -> Section:
    notes = ["Not drawn: " + "; ".join(plots.left_out)] if plots.left_out else []
    return Section("plots", "Plots", figures=plots.drawn, notes=notes)


def _results(frame: polars.DataFrame, rows: Sequence[Row], marks: Marks) -> Section:
    sweeps = dict(frame.select("run_id", "sweep").drop_nulls().iter_rows())
    grids = [results_grid(rows, sweeps, marks), failures_grid(rows)]
    return Section("configurations", "All results", grids=[one for one in grids if one is not None])


def _warnings(rows: Sequence[Row], marks: Marks) -> Section | None:
    found = warnings_grid(rows, marks)
    return None if found is None else Section("warnings", "Warnings", grids=[found])


def _provenance(frame: polars.DataFrame, whole: Whole | None) -> Section:
    grids = [runs_grid(frame)]
    if whole is not None:
        found = environments_grid(whole(sampled(frame)), len(frame))
        grids += [found] if found else []
    return Section("provenance", "What was run where and when", grids=grids)


def _reproduce(findings: Findings, subject: Subject) -> Section:
    specs = [row.spec for row in findings.rows]
    points = sweep_text(specs, repeats=max((len(row.run_ids) for row in findings.rows), default=1))
    clusters = list(dict.fromkeys(brief(row.cluster) for row in findings.rows))
    where = subject.where.expression.text if subject.where else None
    shown = commands(subject.sources, clusters, where, has_sweep=points is not None)
    blocks = [Block("Commands", "\n".join(shown))]
    blocks += [Block("again.toml, the points of this page as a sweep", points)] if points else []
    notes = [] if points or not specs else [f"more than {MOST_POINTS} points: use the sweeps that made them"]
    notes.append("a run that has a result is not run again: another results tree (--results) measures all anew")
    return Section("reproduce", "How to reproduce it", blocks=blocks, notes=notes)
