"""What makes numbers doubtful: warnings, launches that differ, environments that changed in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcbench.fileio import brief
from hpcbench.report.answers.answer import COUNTED, Answer, counted, listed
from hpcbench.report.answers.measured import Measured
from hpcbench.report.marks import kind_of

NOISY = 1.1
"""Launches of one configuration whose throughputs differ by more than this factor are told."""
_MOST_EVIDENCE = 50


def doubts(rows: list[Measured]) -> list[Answer]:
    """Warnings by kind, configurations whose launches differ widely, clusters with several environments."""
    return [*_warnings(rows), *_spreads(rows), *_environments(rows), *_single_launches(rows)]


class Unfinished(NamedTuple):
    """A sweep that means more runs than there are results."""

    sweep: str
    cluster: str
    missing: int
    runs: int


def unfinished(sweeps: Sequence[Unfinished]) -> list[Answer]:
    """What is not known yet: findings may change once these runs have ended."""
    found = []
    for one in sweeps:
        if one.missing:
            have = "has" if one.missing == 1 else "have"
            found.append(Answer(
                "doubt", f"sweep {brief(one.sweep)} on {brief(one.cluster)}",
                f"{one.missing} of {counted(one.runs, 'run')} {have} no result yet", COUNTED,
                settle=f"`hpcbench status {brief(one.sweep)}`", cluster=one.cluster,
            ))  # fmt: skip
    return found


def _warnings(rows: list[Measured]) -> list[Answer]:
    kinds: dict[str, list[tuple[Measured, str]]] = {}
    for row in rows:
        first: dict[str, str] = {}
        for text in row.warnings:
            first.setdefault(kind_of(text), text)
        for kind, text in first.items():
            kinds.setdefault(kind, []).append((row, text))
    ordered = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        Answer(
            "doubt", f"warning, {counted(len(having), 'configuration')} of {len(rows)}", brief(having[0][1]), COUNTED,
            "" if len({text for _, text in having}) == 1 else "the first of those that differ in figures alone",
            evidence=tuple(row.evidence() for row, _ in having[:_MOST_EVIDENCE]),
        )
        for _, having in ordered
    ]  # fmt: skip


def _spreads(rows: list[Measured]) -> list[Answer]:
    wide = [(max(row.rates) / min(row.rates), row) for row in rows if len(row.rates) > 1]
    wide = sorted(((spread, row) for spread, row in wide if spread > NOISY), key=lambda pair: -pair[0])
    if not wide:
        return []
    worst = [f"{row.label} on {row.scale} by {spread - 1:.0%}" for spread, row in wide]
    return [Answer(
        "doubt", f"spread, {counted(len(wide), 'configuration')} of {len(rows)}",
        f"launches that should be alike differ by more than {NOISY - 1:.0%}: {listed(worst, 3)}", COUNTED,
        settle="more repeats, whole nodes, a quieter time",
        evidence=tuple(row.evidence() for _, row in wide[:_MOST_EVIDENCE]),
    )]  # fmt: skip


def _environments(rows: list[Measured]) -> list[Answer]:
    by_cluster: dict[str, dict[str, list[Measured]]] = {}
    for row in rows:
        if row.environment_digest is not None:
            by_cluster.setdefault(row.cluster, {}).setdefault(row.environment_digest, []).append(row)
    found = []
    for cluster, environments in sorted(by_cluster.items()):
        if len(environments) > 1:
            named = [f"{brief(digest)} ({len(alike)})" for digest, alike in environments.items()]
            configs: dict[str, set[str | None]] = {}
            for row in rows:
                configs.setdefault(row.config_id, set()).add(row.environment_digest)
            both = sum(len(digests) > 1 for digests in configs.values())
            found.append(Answer(
                "doubt", f"environments of {brief(cluster)}",
                f"software or hardware changed between runs; configurations by environment: {listed(named)}", COUNTED,
                f"{counted(both, 'configuration')} in more than one: what differs between them is not chance alone",
                "`hpcbench compare` tells whether they differ", cluster=cluster,
            ))  # fmt: skip
    return found


def _single_launches(rows: list[Measured]) -> list[Answer]:
    alone = [row for row in rows if len(row.rates) == 1]
    if not alone:
        return []
    return [Answer(
        "doubt", f"launches, {counted(len(alone), 'configuration')} of {len(rows)}",
        "launched once: what another launch would measure is not known", COUNTED, settle="repeats = 5 in the sweep",
    )]  # fmt: skip
