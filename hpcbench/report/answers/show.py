"""Answers in a terminal, and as data."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hpcbench.fileio import brief, printable
from hpcbench.report.answers.answer import ALIKE, CANNOT_TELL, KINDS, TOLD, Answer, as_json, counted
from hpcbench.report.answers.find import Findings

_MOST_OF_A_KIND = 12
_STYLES = {TOLD: "green", ALIKE: "cyan", CANNOT_TELL: "yellow"}


def findings_json(findings: Findings, sources: list[str]) -> dict[str, Any]:
    """``{"sources", "runs", "begin", "end", "findings"}``: figures in SI units, times as ISO 8601."""
    return {
        "sources": sources,
        "runs": findings.statuses,
        "begin": findings.begin.isoformat() if findings.begin else None,
        "end": findings.end.isoformat() if findings.end else None,
        "findings": [as_json(one) for one in findings.answers],
    }


def renderable(findings: Findings, title: str) -> RenderableType:
    """The findings kind by kind, each with how sure it is and why."""
    parts: list[RenderableType] = [Text(f"{printable(title)}: {overview(findings)}", style="bold")]
    for kind, heading in KINDS.items():
        answers = findings.of(kind)
        if not answers:
            continue
        parts += [Text(""), Text(heading, style="bold")]
        subject = ""
        for answer in answers[:_MOST_OF_A_KIND]:
            parts += _shown(answer, with_subject=answer.subject != subject)
            subject = answer.subject
        if len(answers) > _MOST_OF_A_KIND:
            more = f"and {len(answers) - _MOST_OF_A_KIND} more: narrow with --where, or see all with --out or --json"
            parts.append(Padding.indent(Text(more, style="dim"), 2))
    return Group(*parts, *_unsettled(findings))


def overview(findings: Findings) -> str:
    """``30 runs, 28 ok, 2 oom; 2026-11-20 18:00 to 19:30 UTC``."""
    runs = sum(findings.statuses.values())
    words = [counted(runs, "run"), *(f"{count} {brief(status)}" for status, count in findings.statuses.items())]
    return "; ".join([", ".join(words), *([when(findings)] if findings.begin else [])])


def when(findings: Findings) -> str:
    """From the first result to the last, in UTC; nothing where files bear no date."""
    if findings.begin is None or findings.end is None:
        return ""
    first, last = _minute(findings.begin), _minute(findings.end)
    if first == last:
        return f"{first} UTC"
    return f"{first} to {last[11:] if first[:10] == last[:10] else last} UTC"


def _minute(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")


def _shown(answer: Answer, *, with_subject: bool) -> list[RenderableType]:
    lines: list[RenderableType] = [Padding.indent(Text(answer.subject), 2)] if with_subject else []
    lines.append(Padding.indent(Text(answer.text, style=_STYLES.get(answer.sure, "")), 4))
    lines += [Padding.indent(Text(text, style="dim"), 6) for text in grounds(answer)]
    return lines


def grounds(answer: Answer) -> list[str]:
    """Why it is so or cannot be told, what would settle it, and what speaks against it; a text each."""
    texts = []
    if answer.why:
        texts.append(f"{'why: ' if answer.sure == CANNOT_TELL else ''}{answer.why}")
    if answer.settle:
        texts.append(f"{'to settle it' if answer.sure == CANNOT_TELL else 'hint'}: {answer.settle}")
    return [*texts, *(f"but {text}" for text in answer.doubts)]


def _unsettled(findings: Findings) -> list[RenderableType]:
    """What would settle what cannot be told, the most helpful first."""
    if not findings.unsettled:
        return []
    judged = sum(one.sure in _STYLES for one in findings.answers)
    parts: list[RenderableType] = [Text(""), Text("What cannot be told", style="bold")]
    heading = f"{len(findings.unsettled)} of {counted(judged, 'finding')}; what would settle"
    parts.append(Padding.indent(Text(heading), 2))
    return [*parts, *(Padding.indent(Text(f"{count}: {text}"), 4) for text, count in settlements(findings))]


def settlements(findings: Findings) -> list[tuple[str, int]]:
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
