"""All findings of a results frame, and their terminal and JSON output."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import msgspec
import polars as pl
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.predict.cluster_forecasts import ClusterForecasts
from hpcbench.report.column_names import Condition
from hpcbench.report.configurations import filter_launches
from hpcbench.report.findings import problem_findings, throughput_findings
from hpcbench.report.findings.finding import (
    FINDING_KINDS,
    OBSERVED,
    ConfigurationLaunches,
    Finding,
    SubjectNames,
    configurations_of,
    group_by_workload,
)
from hpcbench.report.findings.model_findings import unexplained_findings
from hpcbench.report.findings.node_findings import node_findings
from hpcbench.report.hypothesis_tests import EQUIVALENT, INCONCLUSIVE, SIGNIFICANT
from hpcbench.report.plots.plot_model import ReadFullResults
from hpcbench.report.table_output import Stripped
from hpcbench.units import pluralize


@dataclass(frozen=True)
class Findings:
    """The findings of a frame in the order of ``FINDING_KINDS``, and the configurations behind them."""

    answers: list[Finding]
    rows: list[ConfigurationLaunches]
    statuses: dict[str, int]
    """Number of runs by status; a launch is a run."""
    begin: datetime | None
    """Times of the first and the last result file; ``None`` for results of bundles."""
    end: datetime | None

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.answers if finding.kind == kind]


def derive_findings(
    frame: pl.DataFrame,
    where: Condition | None = None,
    bound: float = throughput_findings.EFFICIENCY_BOUND,
    sweeps: Sequence[problem_findings.UnfinishedSweep] = (),
    forecasts: ClusterForecasts | None = None,
    whole: ReadFullResults | None = None,
) -> Findings:
    """Return the findings of a results frame.

    Args:
        frame: results with all columns (``load_results.load_frame``).
        where: restricts the configurations; baselines may lie outside.
        bound: efficiency below which scaling is reported to fall.
        sweeps: the sweeps of the results that have unfinished runs.
        forecasts: of the tree that holds the results; without it no step of a command is explained.
        whole: reads full results, for messages between pairs of nodes.
    """
    rows, broken = configurations_of(frame, where)
    table = group_by_workload(rows)
    subjects = SubjectNames(table)
    findings = [
        *throughput_findings.fastest_findings(table, subjects),
        *throughput_findings.crossover_findings(table, subjects),
        *throughput_findings.efficiency_findings(table, subjects, bound),
        *unexplained_findings(table, subjects, forecasts),
        *problem_findings.memory_findings(table, subjects),
        *node_findings(filter_launches(frame, where), whole),
        *problem_findings.failure_findings(rows, broken),
        *problem_findings.unfinished_findings(sweeps), *problem_findings.data_quality_findings(rows),
    ]  # fmt: skip
    statuses = Counter(status for row in [*rows, *broken] for status in [row.status] * len(row.run_ids))
    times = sorted(frame["ended_at_s"].drop_nulls().to_list())
    begin, end = (datetime.fromtimestamp(int(times[i]), timezone.utc) if times else None for i in (0, -1))
    return Findings(findings, rows, dict(sorted(statuses.items())), begin, end)


_MAX_OF_A_KIND = 12
_CERTAINTY_STYLES: dict[str, str] = {SIGNIFICANT: "green", EQUIVALENT: "cyan", INCONCLUSIVE: "magenta"}


def findings_json(findings: Findings, sources: list[str]) -> dict[str, Any]:
    """Return ``{"sources", "runs", "begin", "end", "findings"}``: figures in SI units, times as ISO 8601."""
    return {
        "sources": sources,
        "runs": findings.statuses,
        "begin": findings.begin.isoformat() if findings.begin else None,
        "end": findings.end.isoformat() if findings.end else None,
        "findings": [msgspec.to_builtins(finding) for finding in findings.answers],
    }


def findings_renderable(findings: Findings, title: str) -> RenderableType:
    """The findings for a terminal: by kind, each with its certainty and the reason for it."""
    parts: list[RenderableType] = [Text(f"{printable_text(title)}: {runs_overview(findings)}", style="bold")]
    for kind, heading in FINDING_KINDS.items():
        of_kind = findings.of_kind(kind)
        parts += [Text(""), Text(heading, style="bold")] if of_kind else []
        subject = ""
        for finding in of_kind[:_MAX_OF_A_KIND]:
            parts += [_indented(finding.subject, 2)] if finding.subject != subject else []
            parts.append(_indented(finding.text, 4, _CERTAINTY_STYLES.get(finding.sure, "")))
            parts += [_indented(text, 6) for text in finding_details(finding)]
            subject = finding.subject
        if len(of_kind) > _MAX_OF_A_KIND:
            more = f"and {len(of_kind) - _MAX_OF_A_KIND} more: narrow with --where, or see all with --out or --json"
            parts.append(_indented(more, 2))
    heading, suggestions = inconclusive_summary(findings)
    if suggestions:
        parts += [Text(""), Text(heading, style="bold"), _indented("To resolve them:", 2)]
        parts += [_indented(f"{count}: {text}", 4) for text, count in suggestions]
    return Stripped(Group(*parts))


def _indented(text: str, columns: int, style: str = "") -> Padding:
    return Padding.indent(Text(text, style=style), columns)


def runs_overview(findings: Findings) -> str:
    """``30 runs, 28 ok, 2 oom; 2026-11-20 18:00 to 19:30 UTC``."""
    words = [pluralize(sum(findings.statuses.values()), "run")]
    words += [f"{count} {printable_excerpt(status)}" for status, count in findings.statuses.items()]
    overview = ", ".join(words)
    if findings.begin is None or findings.end is None:
        return overview
    first, last = (time.strftime("%Y-%m-%d %H:%M") for time in (findings.begin, findings.end))
    end = "" if first == last else f" to {last[11:] if first[:10] == last[:10] else last}"
    return f"{overview}; {first}{end} UTC"


def finding_details(finding: Finding) -> list[str]:
    """The reason, the measurements that would resolve an inconclusive finding, and caveats; one text each."""
    is_inconclusive = finding.sure == INCONCLUSIVE
    texts = []
    if finding.why:
        texts.append(f"reason: {finding.why}" if is_inconclusive else finding.why)
    if finding.settle:
        texts.append(f"{'to resolve it' if is_inconclusive else 'hint'}: {finding.settle}")
    return [*texts, *(f"caveat: {text}" for text in finding.doubts)]


def inconclusive_summary(findings: Findings) -> tuple[str, list[tuple[str, int]]]:
    """The heading about inconclusive findings and the measurements that would resolve them, with their counts."""
    judged = [finding for finding in findings.answers if finding.sure != OBSERVED]
    inconclusive = sum(finding.sure == INCONCLUSIVE for finding in judged)
    heading = f"Inconclusive: {inconclusive} of {pluralize(len(judged), 'finding')}"
    return heading, suggested_measurements(findings)


def suggested_measurements(findings: Findings) -> list[tuple[str, int]]:
    """Measurements that would resolve inconclusive findings, and of how many, the most helpful first.

    Texts that differ only in a number are one: ``about 14 to 56 launches each``.
    """
    settles = [finding.settle for finding in findings.answers if finding.sure == INCONCLUSIVE]
    counts = Counter(part for settle in settles for part in dict.fromkeys(settle.split("; ")) if part)
    patterns: dict[str, list[str]] = {}
    for text in counts:
        patterns.setdefault(re.sub(r"\d+", "#", text, count=1), []).append(text)
    suggestions = []
    for pattern, texts in patterns.items():
        numbers = sorted({int(match[0]) for text in texts if (match := re.search(r"\d+", text))})
        extremes = " to ".join(map(str, dict.fromkeys(numbers[:1] + numbers[-1:])))
        suggestions.append((pattern.replace("#", extremes, 1), sum(counts[text] for text in texts)))
    return sorted(suggestions, key=lambda entry: -entry[1])
