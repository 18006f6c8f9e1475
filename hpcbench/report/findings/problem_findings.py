"""Findings about problems: data quality (warnings, spread, changed environments), memory limits, failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcbench.fileio import printable_excerpt
from hpcbench.report.findings.finding import (
    OBSERVED,
    ConfigurationLaunches,
    Configurations,
    Finding,
    SubjectNames,
    WorkloadTable,
    evidence_of,
)
from hpcbench.report.table_model import group_warnings, message_pattern
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK
from hpcbench.units import format_bytes, format_percent, join_words, pluralize

SPREAD_THRESHOLD = 1.1
"""A finding reports launches of one configuration whose throughputs differ by more than this factor."""


def data_quality_findings(rows: Configurations) -> list[Finding]:
    """Warnings by kind, configurations whose launches differ widely, clusters with several environments."""
    return [*_warning_findings(rows), *_spread_findings(rows), *_environment_findings(rows)]


class UnfinishedSweep(NamedTuple):
    """A sweep with ``runs`` points, of which ``missing`` have no result."""

    sweep: str
    cluster: str
    missing: int
    runs: int


def unfinished_findings(sweeps: Sequence[UnfinishedSweep]) -> list[Finding]:
    """Sweeps with runs that have no result yet: these may change the findings."""
    return [
        Finding(
            "doubt", f"sweep {printable_excerpt(entry.sweep)} on {printable_excerpt(entry.cluster)}",
            f"{entry.missing} of {pluralize(entry.runs, 'run')} {'has' if entry.missing == 1 else 'have'} "
            "no result yet",
            OBSERVED, settle=f"`hpcbench status {printable_excerpt(entry.sweep)}`", cluster=entry.cluster,
        )
        for entry in sweeps if entry.missing
    ]  # fmt: skip


def _warning_findings(rows: Configurations) -> list[Finding]:
    kinds = sorted(group_warnings(rows).items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        Finding(
            "doubt", f"warning, {pluralize(len(having), 'configuration')} of {len(rows)}",
            printable_excerpt(having[0][1]), OBSERVED,
            "" if len({text for _, text in having}) == 1 else f"first of {len(having)} similar warnings",
            evidence=evidence_of(row for row, _ in having),
        )
        for _, having in kinds
    ]  # fmt: skip


def _spread_findings(rows: Configurations) -> list[Finding]:
    spreads = [(max(row.rates) / min(row.rates), row) for row in rows if len(row.rates) > 1]
    wide = sorted((entry for entry in spreads if entry[0] > SPREAD_THRESHOLD), key=lambda entry: -entry[0])
    if not wide:
        return []
    worst = [f"{row.label} on {row.scale} by {format_percent(spread - 1)}" for spread, row in wide]
    bound = format_percent(SPREAD_THRESHOLD - 1)
    return [Finding(
        "doubt", f"spread, {pluralize(len(wide), 'configuration')} of {len(rows)}",
        f"launches of one configuration differ by more than {bound}: {join_words(worst, 3)}",
        OBSERVED, settle="more repeats, whole nodes, a quieter time", evidence=evidence_of(row for _, row in wide),
    )]  # fmt: skip


def _environment_findings(rows: Configurations) -> list[Finding]:
    by_cluster: dict[str, dict[str, Configurations]] = {}
    digests: dict[str, set[str | None]] = {}
    for row in rows:
        digests.setdefault(row.config_id, set()).add(row.environment_digest)
        if row.environment_digest is not None:
            by_cluster.setdefault(row.cluster, {}).setdefault(row.environment_digest, []).append(row)
    several = sum(len(environments) > 1 for environments in digests.values())
    return [
        Finding(
            "doubt", f"environments of {printable_excerpt(cluster)}",
            "software or hardware changed between runs; configurations by environment: "
            + join_words([f"{printable_excerpt(digest)} ({len(same)})" for digest, same in environments.items()]),
            OBSERVED, f"{pluralize(several, 'configuration')} in more than one: their differences are not chance alone",
            "`hpcbench compare` tests the differences", cluster=cluster,
        )
        for cluster, environments in sorted(by_cluster.items()) if len(environments) > 1
    ]  # fmt: skip


_NO_FAILURE = frozenset({STATUS_OK, "oom", "skipped"})
"""Statuses that are no failures: ``oom`` is a finding about memory, ``skipped`` follows from another run's end."""
_MAX_MESSAGE = 300


def memory_findings(table: WorkloadTable, subjects: SubjectNames) -> list[Finding]:
    """Strategies that ran out of memory, and those that fit with the same batch per replica."""
    findings = []
    for workload, by_scale in table.items():
        for scale, rows in by_scale.items():
            for batch_size in sorted({row.spec.batch_size for row in rows if row.status == "oom"}):
                same_batch = [row for row in rows if row.spec.batch_size == batch_size]
                failed = list(dict.fromkeys(row.label for row in same_batch if row.status == "oom"))
                findings.append(Finding(
                    "memory", subjects.name(workload, scale), _memory_text(rows, same_batch, failed, batch_size),
                    OBSERVED, cluster=workload[0], nodes=scale.nodes, devices=scale.devices, strategy=failed[0],
                    evidence=evidence_of(same_batch),
                ))  # fmt: skip
    return findings


def _memory_text(rows: Configurations, same_batch: Configurations, failed: list[str], batch_size: int) -> str:
    fitting: dict[str, ConfigurationLaunches] = {}
    for row in sorted((row for row in same_batch if row.is_ok), key=lambda row: row.peak_memory_bytes or 0):
        fitting.setdefault(row.label, row)
    sometimes = [label for label in failed if label in fitting]
    always = [label for label in failed if label not in fitting]
    others = [
        f"{row.label} ({format_bytes(row.peak_memory_bytes)})" if row.peak_memory_bytes else row.label
        for row in same_batch if fitting.get(row.label) is row and row.label not in failed
    ]  # fmt: skip
    clauses = [f"{join_words(always)} ran out of memory"] if always else []
    if sometimes:
        clauses.append(f"{join_words(sometimes)} ran out of memory with some settings or in some launches")
    text = f"with batch {batch_size} {'; '.join(clauses)}"
    if others:
        return f"{text}; {join_words(others)} fit{'s' * (len(others) == 1)}"
    smaller = [row for row in rows if row.is_ok and row.spec.batch_size < batch_size]
    if sometimes or not smaller:
        return text if sometimes else f"{text}; nothing that was measured fits"
    largest = max(smaller, key=lambda row: row.spec.batch_size)
    return f"{text}; the largest batch that fits is {largest.spec.batch_size}, with {largest.label}"


def failure_findings(rows: Configurations, broken: Configurations) -> list[Finding]:
    """Runs that failed, timed out, were stopped or cannot be read, by their messages; the most frequent first."""
    causes: dict[tuple[str, str, str], Configurations] = {}
    for row in [*(row for row in rows if row.status not in _NO_FAILURE), *broken]:
        kind, message, _ = row.failure
        causes.setdefault((row.status, kind, message_pattern(_first_line(message))), []).append(row)
    ordered = sorted(causes.items(), key=lambda item: (-len(item[1]), item[0]))
    return [_cause_finding(status, kind, failed) for (status, kind, _), failed in ordered]


def _cause_finding(status: str, kind: str, failed: Configurations) -> Finding:
    _, message, hint = failed[0].failure
    is_broken = status == STATUS_BROKEN
    # A status in a file may be any text.
    subject = f"{printable_excerpt(status)}: {pluralize(len(failed), 'run')}"
    if not is_broken:
        subject += f": {join_words(list(dict.fromkeys(f'{row.label} on {row.scale}' for row in failed)), 4)}"
    text = _first_line(message) or "no reason was left"
    return Finding(
        "failure", subject, f"{printable_excerpt(kind)}: {text}" if kind and not is_broken else text, OBSERVED,
        f"`hpcbench logs {printable_excerpt(failed[0].run_ids[0])}` shows its output", printable_excerpt(hint),
        cluster=failed[0].cluster, strategy=failed[0].label, evidence=() if is_broken else evidence_of(failed),
    )  # fmt: skip


def _first_line(message: str) -> str:
    lines = printable_excerpt(message).strip().splitlines()
    return lines[0][:_MAX_MESSAGE] if lines else ""
