"""Findings about problems: data quality (warnings, spread, changed environments), memory limits and failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcbench.fileio import printable_excerpt
from hpcbench.report.findings.finding import (
    OBSERVED,
    ConfigurationLaunches,
    EvidenceRow,
    Finding,
    SubjectNames,
    join_words,
    pluralize,
)
from hpcbench.report.findings.throughput_findings import WorkloadTable
from hpcbench.report.table_model import message_pattern
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK
from hpcbench.units import format_bytes

SPREAD_THRESHOLD = 1.1
"""Launches of one configuration whose throughputs differ by more than this factor are told."""
_MAX_QUALITY_EVIDENCE = 50


def data_quality_findings(rows: list[ConfigurationLaunches]) -> list[Finding]:
    """Warnings by kind, configurations whose launches differ widely, clusters with several environments."""
    return [
        *_warning_findings(rows),
        *_spread_findings(rows),
        *_environment_findings(rows),
        *_single_launch_findings(rows),
    ]


class UnfinishedSweep(NamedTuple):
    """A sweep that means more runs than there are results."""

    sweep: str
    cluster: str
    missing: int
    runs: int


def unfinished_findings(sweeps: Sequence[UnfinishedSweep]) -> list[Finding]:
    """What is not known yet: findings may change once these runs have ended."""
    found = []
    for one in sweeps:
        if one.missing:
            have = "has" if one.missing == 1 else "have"
            found.append(Finding(
                "doubt", f"sweep {printable_excerpt(one.sweep)} on {printable_excerpt(one.cluster)}",
                f"{one.missing} of {pluralize(one.runs, 'run')} {have} no result yet", OBSERVED,
                settle=f"`hpcbench status {printable_excerpt(one.sweep)}`", cluster=one.cluster,
            ))  # fmt: skip
    return found


def _warning_findings(rows: list[ConfigurationLaunches]) -> list[Finding]:
    kinds: dict[str, list[tuple[ConfigurationLaunches, str]]] = {}
    for row in rows:
        first: dict[str, str] = {}
        for text in row.warnings:
            first.setdefault(message_pattern(text), text)
        for kind, text in first.items():
            kinds.setdefault(kind, []).append((row, text))
    ordered = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        Finding(
            "doubt", f"warning, {pluralize(len(having), 'configuration')} of {len(rows)}",
            printable_excerpt(having[0][1]), OBSERVED,
            "" if len({text for _, text in having}) == 1 else "the first of those that differ in figures alone",
            evidence=tuple(row.evidence() for row, _ in having[:_MAX_QUALITY_EVIDENCE]),
        )
        for _, having in ordered
    ]  # fmt: skip


def _spread_findings(rows: list[ConfigurationLaunches]) -> list[Finding]:
    wide = [(max(row.rates) / min(row.rates), row) for row in rows if len(row.rates) > 1]
    wide = sorted(((spread, row) for spread, row in wide if spread > SPREAD_THRESHOLD), key=lambda pair: -pair[0])
    if not wide:
        return []
    worst = [f"{row.label} on {row.scale} by {spread - 1:.0%}" for spread, row in wide]
    return [Finding(
        "doubt", f"spread, {pluralize(len(wide), 'configuration')} of {len(rows)}",
        f"launches that should be alike differ by more than {SPREAD_THRESHOLD - 1:.0%}: {join_words(worst, 3)}",
        OBSERVED,
        settle="more repeats, whole nodes, a quieter time",
        evidence=tuple(row.evidence() for _, row in wide[:_MAX_QUALITY_EVIDENCE]),
    )]  # fmt: skip


def _environment_findings(rows: list[ConfigurationLaunches]) -> list[Finding]:
    by_cluster: dict[str, dict[str, list[ConfigurationLaunches]]] = {}
    for row in rows:
        if row.environment_digest is not None:
            by_cluster.setdefault(row.cluster, {}).setdefault(row.environment_digest, []).append(row)
    found = []
    for cluster, environments in sorted(by_cluster.items()):
        if len(environments) > 1:
            named = [f"{printable_excerpt(digest)} ({len(alike)})" for digest, alike in environments.items()]
            configs: dict[str, set[str | None]] = {}
            for row in rows:
                configs.setdefault(row.config_id, set()).add(row.environment_digest)
            both = sum(len(digests) > 1 for digests in configs.values())
            found.append(Finding(
                "doubt", f"environments of {printable_excerpt(cluster)}",
                f"software or hardware changed between runs; configurations by environment: {join_words(named)}",
                OBSERVED,
                f"{pluralize(both, 'configuration')} in more than one: what differs between them is not chance alone",
                "`hpcbench compare` tells whether they differ", cluster=cluster,
            ))  # fmt: skip
    return found


def _single_launch_findings(rows: list[ConfigurationLaunches]) -> list[Finding]:
    alone = [row for row in rows if len(row.rates) == 1]
    if not alone:
        return []
    return [Finding(
        "doubt", f"launches, {pluralize(len(alone), 'configuration')} of {len(rows)}",
        "launched once: what another launch would measure is not known", OBSERVED, settle="repeats = 5 in the sweep",
    )]  # fmt: skip


_MAX_FAILURE_EVIDENCE = 50
_NO_FAILURE = frozenset({STATUS_OK, "oom", "skipped"})
"""What is no failure of its own: ``oom`` is an answer about memory, ``skipped`` follows from another run's end."""
_MAX_MESSAGE = 300


def memory_findings(table: WorkloadTable, subjects: SubjectNames) -> list[Finding]:
    """Where a strategy ran out of memory: which others fit with the same batch per replica."""
    found = []
    for place, by_scale in table.items():
        for scale, rows in by_scale.items():
            for batch_size in sorted({row.spec.batch_size for row in rows if row.status == "oom"}):
                alike = [row for row in rows if row.spec.batch_size == batch_size]
                gone = list(dict.fromkeys(row.label for row in alike if row.status == "oom"))
                found.append(Finding(
                    "memory", subjects.of(place, scale), _memory_text(rows, alike, gone, batch_size), OBSERVED,
                    cluster=place[0], nodes=scale.nodes, devices=scale.devices, strategy=gone[0],
                    evidence=_failure_evidence(alike),
                ))  # fmt: skip
    return found


def _memory_text(
    rows: list[ConfigurationLaunches], alike: list[ConfigurationLaunches], gone: list[str], batch_size: int
) -> str:
    fits: dict[str, ConfigurationLaunches] = {}
    for row in alike:
        best = fits.get(row.label)
        if row.is_ok and (best is None or (row.peak_memory_bytes or 0) < (best.peak_memory_bytes or 0)):
            fits[row.label] = row
    both = [name for name in gone if name in fits]
    never = [name for name in gone if name not in fits]
    others = [_memory_need(name, row) for name, row in fits.items() if name not in gone]
    said = [f"{join_words(never)} ran out of memory"] if never else []
    if both:
        said.append(f"{join_words(both)} ran out of memory with some settings or in some launches")
    text = f"with batch {batch_size} {'; '.join(said)}"
    if others:
        return f"{text}; {join_words(others)} fit{'s' * (len(others) == 1)}"
    smaller = [row for row in rows if row.is_ok and row.spec.batch_size < batch_size]
    if both or not smaller:
        return text if both else f"{text}; nothing that was measured fits"
    largest = max(smaller, key=lambda row: row.spec.batch_size)
    return f"{text}; the largest batch that fits is {largest.spec.batch_size}, with {largest.label}"


def _memory_need(name: str, row: ConfigurationLaunches) -> str:
    return f"{name} ({format_bytes(row.peak_memory_bytes)})" if row.peak_memory_bytes else name


def failure_findings(rows: list[ConfigurationLaunches], broken: list[ConfigurationLaunches]) -> list[Finding]:
    """Runs that failed, timed out, were stopped or cannot be read, by what they said; the most frequent first."""
    causes: dict[tuple[str, str, str], list[ConfigurationLaunches]] = {}
    for row in [*(row for row in rows if row.status not in _NO_FAILURE), *broken]:
        kind, message, _ = row.failure
        causes.setdefault((row.status, kind, message_pattern(_first_line(message))), []).append(row)
    ordered = sorted(causes.items(), key=lambda item: (-len(item[1]), item[0]))
    return [_cause_finding(status, kind, alike) for (status, kind, _), alike in ordered]


def _cause_finding(status: str, kind: str, alike: list[ConfigurationLaunches]) -> Finding:
    _, message, hint = alike[0].failure
    # A status in a file may be any text.
    status, kind = printable_excerpt(status), printable_excerpt(kind)
    subject = f"{status}: {pluralize(len(alike), 'run')}"
    if status != STATUS_BROKEN:
        named = list(dict.fromkeys(f"{row.label} on {row.scale}" for row in alike))
        subject += f": {join_words(named, 4)}"
    said = _first_line(message) or "no reason was left"
    return Finding(
        "failure", subject, f"{kind}: {said}" if kind and status != STATUS_BROKEN else said, OBSERVED,
        f"`hpcbench logs {printable_excerpt(alike[0].run_ids[0])}` shows what it said", printable_excerpt(hint),
        cluster=alike[0].cluster, strategy=alike[0].label,
        evidence=_failure_evidence(alike) if status != STATUS_BROKEN else (),
    )  # fmt: skip


def _first_line(message: str) -> str:
    lines = printable_excerpt(message).strip().splitlines()
    return lines[0][:_MAX_MESSAGE] if lines else ""


def _failure_evidence(rows: list[ConfigurationLaunches]) -> tuple[EvidenceRow, ...]:
    return tuple(row.evidence() for row in rows[:_MAX_FAILURE_EVIDENCE])
