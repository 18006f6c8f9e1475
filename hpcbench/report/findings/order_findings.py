"""Findings about the order of the runs: drift of the machine while they ran, and answers that depend on it."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from hpcbench.fileio import printable_excerpt
from hpcbench.report.column_names import Condition
from hpcbench.report.findings.finding import (
    OBSERVED,
    Finding,
    SubjectNames,
    configurations_of,
    group_by_workload,
)
from hpcbench.report.findings.throughput_findings import fastest_findings
from hpcbench.report.phrases import pluralize
from hpcbench.report.reference_drift import reference_drifts, remove_drift

DRIFT_THRESHOLD = 0.05
"""A finding reports a reference whose step time changed by more than this share."""
_SETTLE = "`hpcbench table --remove-drift`"


def order_findings(frame: pl.DataFrame, where: Condition | None, fastest: Sequence[Finding]) -> list[Finding]:
    """Drift that the references of sweeps show, and answers that are different with it removed.

    Args:
        frame: results with all columns.
        where: restricts the configurations.
        fastest: the findings about the fastest strategy in ``frame``.
    """
    drifts = list(reference_drifts(frame))
    if not drifts:
        return []
    findings = [
        Finding(
            "doubt", f"sweep {printable_excerpt(drift.sweep)} on {printable_excerpt(drift.cluster)}",
            f"step times of the reference changed by {drift.change:+.0%} while the sweep ran "
            f"({pluralize(len(drift.slowness), 'launch', 'launches')})",
            OBSERVED, settle=_SETTLE, cluster=drift.cluster,
        )
        for drift in drifts
        if abs(drift.change) > DRIFT_THRESHOLD
    ]  # fmt: skip
    rows, _ = configurations_of(remove_drift(frame), where)
    table = group_by_workload(rows)
    without_drift = {finding.subject: finding for finding in fastest_findings(table, SubjectNames(table))}
    for finding in fastest:
        other = without_drift.get(finding.subject, finding)
        if (other.strategy, other.sure) != (finding.strategy, finding.sure):
            text = f"the answer depends on the order of the runs; with the drift of the reference removed: {other.text}"
            findings.append(Finding("doubt", finding.subject, text, OBSERVED, settle=_SETTLE, cluster=finding.cluster))
    return findings
