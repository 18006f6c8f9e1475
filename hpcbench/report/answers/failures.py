"""What did not end well: who fits into memory where others do not, and failures by their cause."""

from __future__ import annotations

from hpcbench.fileio import brief
from hpcbench.report.answers.answer import COUNTED, Answer, Evidence, counted, listed
from hpcbench.report.answers.fastest import Table
from hpcbench.report.answers.measured import Measured, Subjects
from hpcbench.report.marks import kind_of
from hpcbench.results.schema import BROKEN, OK
from hpcbench.units import format_bytes

_MOST_EVIDENCE = 50
_QUIET = frozenset({OK, "oom", "skipped"})
"""What is no failure of its own: ``oom`` is an answer about memory, ``skipped`` follows from another run's end."""
_FIRST_LINE = 300


def memory(table: Table, subjects: Subjects) -> list[Answer]:
    """Where a strategy ran out of memory: which others fit with the same batch per replica."""
    found = []
    for place, by_scale in table.items():
        for scale, rows in by_scale.items():
            for batch_size in sorted({row.spec.batch_size for row in rows if row.status == "oom"}):
                alike = [row for row in rows if row.spec.batch_size == batch_size]
                gone = list(dict.fromkeys(row.label for row in alike if row.status == "oom"))
                found.append(Answer(
                    "memory", subjects.of(place, scale), _who_fits(rows, alike, gone, batch_size), COUNTED,
                    cluster=place[0], nodes=scale.nodes, devices=scale.devices, strategy=gone[0],
                    evidence=_evidence(alike),
                ))  # fmt: skip
    return found


def _who_fits(rows: list[Measured], alike: list[Measured], gone: list[str], batch_size: int) -> str:
    fits: dict[str, Measured] = {}
    for row in alike:
        best = fits.get(row.label)
        if row.is_ok and (best is None or (row.peak_memory_bytes or 0) < (best.peak_memory_bytes or 0)):
            fits[row.label] = row
    both = [name for name in gone if name in fits]
    never = [name for name in gone if name not in fits]
    others = [_need(name, row) for name, row in fits.items() if name not in gone]
    said = [f"{listed(never)} ran out of memory"] if never else []
    if both:
        said.append(f"{listed(both)} ran out of memory with some settings or in some launches")
    text = f"with batch {batch_size} {'; '.join(said)}"
    if others:
        return f"{text}; {listed(others)} fit{'s' * (len(others) == 1)}"
    smaller = [row for row in rows if row.is_ok and row.spec.batch_size < batch_size]
    if both or not smaller:
        return text if both else f"{text}; nothing that was measured fits"
    largest = max(smaller, key=lambda row: row.spec.batch_size)
    return f"{text}; the largest batch that fits is {largest.spec.batch_size}, with {largest.label}"


def _need(name: str, row: Measured) -> str:
    return f"{name} ({format_bytes(row.peak_memory_bytes)})" if row.peak_memory_bytes else name


def failures(rows: list[Measured], broken: list[Measured]) -> list[Answer]:
    """Runs that failed, timed out, were stopped or cannot be read, by what they said; the most frequent first."""
    causes: dict[tuple[str, str, str], list[Measured]] = {}
    for row in [*(row for row in rows if row.status not in _QUIET), *broken]:
        kind, message, _ = row.failure
        causes.setdefault((row.status, kind, kind_of(_first_line(message))), []).append(row)
    ordered = sorted(causes.items(), key=lambda item: (-len(item[1]), item[0]))
    return [_cause(status, kind, alike) for (status, kind, _), alike in ordered]


def _cause(status: str, kind: str, alike: list[Measured]) -> Answer:
    _, message, hint = alike[0].failure
    # A status in a file may be any text.
    status, kind = brief(status), brief(kind)
    subject = f"{status}: {counted(len(alike), 'run')}"
    if status != BROKEN:
        named = list(dict.fromkeys(f"{row.label} on {row.scale}" for row in alike))
        subject += f": {listed(named, 4)}"
    said = _first_line(message) or "no reason was left"
    return Answer(
        "failure", subject, f"{kind}: {said}" if kind and status != BROKEN else said, COUNTED,
        f"`hpcbench logs {brief(alike[0].run_ids[0])}` shows what it said", brief(hint),
        cluster=alike[0].cluster, strategy=alike[0].label, evidence=_evidence(alike) if status != BROKEN else (),
    )  # fmt: skip


def _first_line(message: str) -> str:
    lines = brief(message).strip().splitlines()
    return lines[0][:_FIRST_LINE] if lines else ""


def _evidence(rows: list[Measured]) -> tuple[Evidence, ...]:
    return tuple(row.evidence() for row in rows[:_MOST_EVIDENCE])
