"""All findings of a results frame, and their terminal and JSON output."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hpcbench.fileio import printable_excerpt, printable_text
from hpcbench.report.findings.finding import (
    EQUIVALENT,
    FINDING_KINDS,
    INCONCLUSIVE,
    SIGNIFICANT,
    ConfigurationLaunches,
    Finding,
    SubjectNames,
    configurations_of,
    finding_json,
    group_by_workload,
    pluralize,
)
from hpcbench.report.findings.problem_findings import (
    UnfinishedSweep,
    data_quality_findings,
    failure_findings,
    memory_findings,
    unfinished_findings,
)
from hpcbench.report.findings.throughput_findings import (
    EFFICIENCY_BOUND,
    crossover_findings,
    efficiency_findings,
    fastest_findings,
)

if TYPE_CHECKING:
    import polars

    from hpcbench.report.column_names import Condition


@dataclass(frozen=True)
class Findings:
    """The answers of a frame, in the order of ``KINDS``, and what they are drawn from."""

    answers: list[Finding]
    rows: list[ConfigurationLaunches]
    statuses: dict[str, int]
    """Runs by how they ended; a launch is a run."""
    begin: datetime | None
    """When the first and the last result was put in place; ``None`` for those of bundles."""
    end: datetime | None

    def of(self, kind: str) -> list[Finding]:
        """The answers of one kind."""
        return [one for one in self.answers if one.kind == kind]

    @property
    def unsettled(self) -> list[Finding]:
        """What cannot be told."""
        return [one for one in self.answers if one.sure == INCONCLUSIVE]


def derive_findings(
    frame: polars.DataFrame,
    where: Condition | None = None,
    bound: float = EFFICIENCY_BOUND,
    sweeps: Sequence[UnfinishedSweep] = (),
) -> Findings:
    """The answers that the results in ``frame`` give about configurations for which ``where`` holds.

    ``sweeps`` are those whose runs they are, as far as not all have ended.
    """
    rows, broken = configurations_of(frame, where)
    table = group_by_workload(rows)
    subjects = SubjectNames(table)
    answers = [
        *fastest_findings(table, subjects), *crossover_findings(table, subjects),
        *efficiency_findings(table, subjects, bound),
        *memory_findings(table, subjects), *failure_findings(rows, broken), *unfinished_findings(sweeps),
        *data_quality_findings(rows),
    ]  # fmt: skip
    order = list(FINDING_KINDS)
    answers.sort(key=lambda one: order.index(one.kind))
    statuses = Counter(status for row in [*rows, *broken] for status in [row.status] * len(row.run_ids))
    return Findings(answers, rows, dict(sorted(statuses.items())), *_result_times(frame))


def _result_times(frame: polars.DataFrame) -> tuple[datetime | None, datetime | None]:
    times: list[int] = sorted(frame["file.mtime_ns"].drop_nulls().to_list())
    if not times:
        return None, None
    first, last = (datetime.fromtimestamp(one // 10**9, timezone.utc) for one in (times[0], times[-1]))
    return first, last


_MAX_OF_A_KIND = 12
_CERTAINTY_STYLES = {SIGNIFICANT: "green", EQUIVALENT: "cyan", INCONCLUSIVE: "yellow"}


def findings_json(findings: Findings, sources: list[str]) -> dict[str, Any]:
    """``{"sources", "runs", "begin", "end", "findings"}``: figures in SI units, times as ISO 8601."""
    return {
        "sources": sources,
        "runs": findings.statuses,
        "begin": findings.begin.isoformat() if findings.begin else None,
        "end": findings.end.isoformat() if findings.end else None,
        "findings": [finding_json(one) for one in findings.answers],
    }


def findings_renderable(findings: Findings, title: str) -> RenderableType:
    """The findings kind by kind, each with how sure it is and why."""
    parts: list[RenderableType] = [Text(f"{printable_text(title)}: {runs_overview(findings)}", style="bold")]
    for kind, heading in FINDING_KINDS.items():
        answers = findings.of(kind)
        if not answers:
            continue
        parts += [Text(""), Text(heading, style="bold")]
        subject = ""
        for answer in answers[:_MAX_OF_A_KIND]:
            parts += _finding_lines(answer, with_subject=answer.subject != subject)
            subject = answer.subject
        if len(answers) > _MAX_OF_A_KIND:
            more = f"and {len(answers) - _MAX_OF_A_KIND} more: narrow with --where, or see all with --out or --json"
            parts.append(Padding.indent(Text(more, style="dim"), 2))
    return Group(*parts, *_inconclusive_lines(findings))


def runs_overview(findings: Findings) -> str:
    """``30 runs, 28 ok, 2 oom; 2026-11-20 18:00 to 19:30 UTC``."""
    runs = sum(findings.statuses.values())
    words = [
        pluralize(runs, "run"),
        *(f"{count} {printable_excerpt(status)}" for status, count in findings.statuses.items()),
    ]
    return "; ".join([", ".join(words), *([time_span(findings)] if findings.begin else [])])


def time_span(findings: Findings) -> str:
    """From the first result to the last, in UTC; nothing where files bear no date."""
    if findings.begin is None or findings.end is None:
        return ""
    first, last = _format_minute(findings.begin), _format_minute(findings.end)
    if first == last:
        return f"{first} UTC"
    return f"{first} to {last[11:] if first[:10] == last[:10] else last} UTC"


def _format_minute(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")


def _finding_lines(answer: Finding, *, with_subject: bool) -> list[RenderableType]:
    lines: list[RenderableType] = [Padding.indent(Text(answer.subject), 2)] if with_subject else []
    lines.append(Padding.indent(Text(answer.text, style=_CERTAINTY_STYLES.get(answer.sure, "")), 4))
    lines += [Padding.indent(Text(text, style="dim"), 6) for text in finding_details(answer)]
    return lines


def finding_details(answer: Finding) -> list[str]:
    """Why it is so or cannot be told, what would settle it, and what speaks against it; a text each."""
    texts = []
    if answer.why:
        texts.append(f"{'why: ' if answer.sure == INCONCLUSIVE else ''}{answer.why}")
    if answer.settle:
        texts.append(f"{'to settle it' if answer.sure == INCONCLUSIVE else 'hint'}: {answer.settle}")
    return [*texts, *(f"but {text}" for text in answer.doubts)]


def _inconclusive_lines(findings: Findings) -> list[RenderableType]:
    """What would settle what cannot be told, the most helpful first."""
    if not findings.unsettled:
        return []
    judged = sum(one.sure in _CERTAINTY_STYLES for one in findings.answers)
    parts: list[RenderableType] = [Text(""), Text("What cannot be told", style="bold")]
    heading = f"{len(findings.unsettled)} of {pluralize(judged, 'finding')}; what would settle"
    parts.append(Padding.indent(Text(heading), 2))
    return [*parts, *(Padding.indent(Text(f"{count}: {text}"), 4) for text, count in suggested_measurements(findings))]


def suggested_measurements(findings: Findings) -> list[tuple[str, int]]:
    """What would settle what cannot be told, and of how many findings, the most helpful first.

    Texts that differ in a number alone are one: ``some 14 to 56 launches each``.
    """
    wanted = Counter(part for one in findings.unsettled for part in dict.fromkeys(one.settle.split("; ")) if part)
    alike: dict[str, list[str]] = {}
    for text in wanted:
        alike.setdefault(re.sub(r"\d+", "#", text, count=1), []).append(text)
    found = []
    for pattern, texts in alike.items():
        numbers = sorted({int(match[0]) for text in texts if (match := re.search(r"\d+", text))})
        shown = pattern.replace("#", " to ".join(map(str, dict.fromkeys(numbers[:1] + numbers[-1:]))), 1)
        found.append((shown, sum(wanted[text] for text in texts)))
    return sorted(found, key=lambda one: -one[1])
