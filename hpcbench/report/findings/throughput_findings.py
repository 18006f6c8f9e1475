"""Findings about throughput: the fastest strategy per scale, crossovers between scales, and loss of efficiency."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from hpcbench.fileio import printable_excerpt
from hpcbench.report.findings.finding import (
    OBSERVED,
    ConfigurationLaunches,
    Configurations,
    Finding,
    RunScale,
    SubjectNames,
    WorkloadTable,
    best_per_strategy,
    evidence_of,
    format_ratio_percent,
)
from hpcbench.report.hypothesis_tests import (
    EQUIVALENT,
    INCONCLUSIVE,
    SIGNIFICANT,
    WinnerTest,
    WinnerVerdict,
    judge_winners,
)
from hpcbench.report.table_model import group_warnings
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import format_percent, format_rate, join_words, pluralize

MIN_DIFFERENCE = 0.02
"""The smallest difference that counts, as in ``compare``."""


def fastest_findings(table: WorkloadTable, subjects: SubjectNames) -> list[Finding]:
    """The strategy with the most samples/s for each workload and scale, against the best of every other strategy.

    On one device there is no parallelism to choose: it is left out if there are larger scales.
    """
    contests = [
        (subjects.name(workload, scale), rows, _rivals_in_same_environment(ranking, rows))
        for workload, by_scale in table.items()
        for scale, rows in by_scale.items()
        if (scale.devices > 1 or max(by_scale).devices == 1) and (ranking := best_per_strategy(rows))
    ]
    tests = [_winner_test(ranking[0], ranking[1:], rows) for _, rows, ranking in contests]
    verdicts = judge_winners(tests, MIN_DIFFERENCE)
    return [
        _fastest_finding(subject, ranking, rows, _demote_across_environments(ranking, verdict))
        if len(ranking) > 1
        else _only_strategy_finding(subject, ranking[0], rows)
        for (subject, rows, ranking), verdict in zip(contests, verdicts, strict=True)
    ]


def _rivals_in_same_environment(ranking: Configurations, rows: Configurations) -> Configurations:
    """``ranking`` with its rivals in the winner's environment if they were measured there too."""
    winner = ranking[0]
    same = [row for row in rows if row.environment_digest == winner.environment_digest]
    by_label = {row.label: row for row in best_per_strategy(same)}
    rivals = [by_label.get(row.label, row) for row in ranking[1:]]
    return [winner, *sorted(rivals, key=lambda row: row.rate or 0, reverse=True)]


def _winner_test(winner: ConfigurationLaunches, rivals: Configurations, rows: Configurations) -> WinnerTest:
    return WinnerTest(winner.rates, [rival.rates for rival in rivals], count_configurations(winner, rows))


def count_configurations(best: ConfigurationLaunches, rows: Configurations) -> int:
    """Return the number of configurations of its strategy among which ``best`` has the highest throughput."""
    return sum(row.is_ok and row.label == best.label for row in rows)


def _demote_across_environments(ranking: Configurations, verdict: WinnerVerdict) -> WinnerVerdict:
    """Inconclusive if the difference may be due to the environment."""
    digest = ranking[0].environment_digest
    others = [row.label for row in ranking[1:] if row.environment_digest != digest]
    if not others or verdict.sure == INCONCLUSIVE:
        return verdict
    why = f"{join_words(others)}: measured in another environment than {ranking[0].label}"
    return replace(verdict, sure=INCONCLUSIVE, why=why, settle="measure all strategies in one environment")


def _only_strategy_finding(subject: str, only: ConfigurationLaunches, rows: Configurations) -> Finding:
    """A single strategy has a throughput: no other was measured, or the others did not end well."""
    failed = [row for row in rows if not row.is_ok and row.label != only.label]
    others = list(dict.fromkeys(f"{row.label} ({_end_text(row)})" for row in failed))
    text = f"only {only.label} {'ended well' if others else 'was measured'}: {format_rate(only.rate or 0)} samples/s"
    text += only.batch_note
    why = f"{join_words(others)} did not" if others else pluralize(len(only.rates), "launch", "launches")
    other = "other parameters" if only.spec.parameters else "another strategy"
    settle = "" if only.scale.devices == 1 or failed else f"measure {other} at this scale"
    if any(row.status in _STOPPED_STATUSES for row in failed):
        settle = "submit the sweep again: it runs stopped runs"
    return Finding(
        "fastest", subject, text, INCONCLUSIVE if settle else OBSERVED, why, settle, _caveats([only], rows),
        only.cluster, only.scale.nodes, only.scale.devices, only.label, evidence=evidence_of([only]),
    )  # fmt: skip


def _end_text(row: ConfigurationLaunches) -> str:
    return "without a throughput" if row.status == STATUS_OK else printable_excerpt(row.status)


_STOPPED_STATUSES = frozenset({"cancelled", "preempted"})
"""Ends for reasons outside of the strategy."""


def _fastest_finding(subject: str, ranking: Configurations, rows: Configurations, verdict: WinnerVerdict) -> Finding:
    first, second, *_ = ranking
    lead = format_ratio_percent(verdict.ratio or 1)
    if verdict.ratio_low is not None and verdict.ratio_high is not None:
        lead += f" [{format_ratio_percent(verdict.ratio_low)}, {format_ratio_percent(verdict.ratio_high)}]"
    figures = f"{format_rate(first.rate or 0)} samples/s, {lead}"
    winner, rival = (f"{row.label}{row.batch_note}" for row in (first, second))
    texts = {
        SIGNIFICANT: f"{winner} is the fastest: {figures} over {rival}",
        EQUIVALENT: f"{winner} and {rival} are equivalent: {figures}",
        INCONCLUSIVE: f"inconclusive; {winner} was measured the fastest: {figures} over {rival}",
    }
    return Finding(
        "fastest", subject, texts[verdict.sure], verdict.sure, verdict.why, verdict.settle,
        _caveats([first, second], rows), first.cluster, first.scale.nodes, first.scale.devices, first.label,
        second.label, verdict.ratio, verdict.ratio_low, verdict.ratio_high, evidence_of(ranking, len(ranking)),
    )  # fmt: skip


def _caveats(compared: Configurations, rows: Configurations) -> tuple[str, ...]:
    """Unequal batches, launches that did not end well, and warnings of the compared configurations."""
    first, *rest = compared
    caveats = [
        f"a step takes {first.spec.global_batch_size} samples with {first.label}, "
        f"{row.spec.global_batch_size} with {row.label}"
        for row in rest if row.spec.global_batch_size != first.spec.global_batch_size
    ]  # fmt: skip
    for row in compared:
        launches = [other for other in rows if other.config_id == row.config_id]
        ends = Counter(launch.status for launch in launches if launch.status != STATUS_OK)
        if ends:
            counts = join_words([f"{count} {printable_excerpt(status)}" for status, count in sorted(ends.items())])
            caveats.append(f"other launches of {row.label} did not end well: {counts}")
    for having in group_warnings(compared).values():
        labels = list(dict.fromkeys(row.label for row, _ in having))
        caveats.append(f"warning of {join_words(labels)}: {printable_excerpt(having[0][1].partition(': ')[0])}")
    return tuple(caveats)


class _CrossoverSide(NamedTuple):
    """The winner at one scale, and the winner of the other scale if it was measured here too."""

    scale: RunScale
    winner: ConfigurationLaunches
    rival: ConfigurationLaunches | None
    rows: Configurations


def crossover_findings(table: WorkloadTable, subjects: SubjectNames) -> list[Finding]:
    """Neighbouring scales between which the fastest strategy changes: significant if both winners are."""
    changes: list[tuple[str, list[_CrossoverSide]]] = []
    for workload, by_scale in table.items():
        # On one device there is no parallelism to choose.
        ranked = [(scale, best_per_strategy(rows), rows) for scale, rows in by_scale.items() if scale.devices > 1]
        for pair in itertools.pairwise(entry for entry in ranked if entry[1]):
            winners = [ranking[0] for _, ranking, _ in pair]
            if winners[0].line != winners[1].line:
                sides = [
                    _CrossoverSide(scale, ranking[0], _find_strategy(ranking, other), rows)
                    for (scale, ranking, rows), other in zip(pair, reversed(winners), strict=True)
                ]
                changes.append((subjects.name(workload), sides))
    tests = [
        _winner_test(side.winner, [side.rival], side.rows)
        for _, sides in changes for side in sides if side.rival is not None
    ]  # fmt: skip
    verdicts = iter(judge_winners(tests, MIN_DIFFERENCE))
    return [
        _crossover_finding(subject, sides, [
            None if side.rival is None else _demote_across_environments([side.winner, side.rival], next(verdicts))
            for side in sides
        ])
        for subject, sides in changes
    ]  # fmt: skip


def _find_strategy(ranking: Configurations, other: ConfigurationLaunches) -> ConfigurationLaunches | None:
    """Return the configuration in ``ranking`` with the strategy of ``other``; a hybrid may have other degrees.

    ``None`` if the ranking has no configuration of that strategy.
    """
    exact = [row for row in ranking if row.label == other.label]
    return next(iter(exact or [row for row in ranking if row.line == other.line]), None)


def _crossover_finding(subject: str, sides: list[_CrossoverSide], verdicts: list[WinnerVerdict | None]) -> Finding:
    small, large = sides
    text = f"from {small.scale} to {large.scale} the fastest changes from {small.winner.label} to {large.winner.label}"
    why = [f"{side.winner.label}'s rival was not measured at {side.scale}" for side in sides if side.rival is None]
    judged = [(side.scale, verdict) for side, verdict in zip(sides, verdicts, strict=True) if verdict is not None]
    is_significant = not why and all(verdict.sure == SIGNIFICANT for _, verdict in judged)
    why += [f"at {scale}: {verdict.why}" for scale, verdict in judged]
    settle = "; ".join(dict.fromkeys(verdict.settle for _, verdict in judged if verdict.settle))
    compared = [row for side in sides for row in (side.winner, side.rival) if row is not None]
    return Finding(
        "crossover", subject, text if is_significant else f"inconclusive; as measured, {text}",
        SIGNIFICANT if is_significant else INCONCLUSIVE, "; ".join(why),
        settle or ("" if is_significant else "measure both strategies at both scales"),
        cluster=small.winner.cluster, nodes=large.scale.nodes, devices=large.scale.devices,
        strategy=large.winner.label, rival=small.winner.label, evidence=evidence_of(compared),
    )  # fmt: skip


EFFICIENCY_BOUND = 0.8


def efficiency_findings(table: WorkloadTable, subjects: SubjectNames, bound: float = EFFICIENCY_BOUND) -> list[Finding]:
    """The smallest scale of each strategy with less efficiency than ``bound``, or the largest that still has it.

    Efficiency is that of ``configurations.with_speedups``: the throughput per device over that of one device with the
    same batch per replica. It is significant if launches differ significantly from ``bound`` times the ideal
    throughput.
    """
    lines = [(workload, line) for workload, by_scale in table.items() for line in _lines_over_scales(by_scale.values())]
    decisive = [next((row for row in line if (row.efficiency or 0) < bound), line[-1]) for _, line in lines]
    tests = [
        _bound_test(row, bound, table[workload][row.scale]) for (workload, _), row in zip(lines, decisive, strict=True)
    ]
    findings = [
        _efficiency_finding(subjects.name(workload), row, line, verdict, bound)
        for (workload, line), row, verdict in zip(lines, decisive, judge_winners(tests, threshold=0), strict=True)
    ]
    return findings + _missing_baseline_findings(table, subjects)


def _lines_over_scales(scales: Iterable[Configurations]) -> list[Configurations]:
    """The best configuration per scale of each strategy that has a baseline, by name of the strategy."""
    lines: dict[str, Configurations] = {}
    for rows in scales:
        # Hybrids of one strategy with other degrees are one line over scales.
        for row in best_per_strategy(rows):
            line = lines.setdefault(row.line, [])
            has_baseline = row.efficiency is not None and row.baseline_rates
            is_larger = row.scale.devices > (row.baseline_devices or 1)
            if has_baseline and is_larger and not (line and line[-1].scale == row.scale):
                line.append(row)
    return [line for _, line in sorted(lines.items()) if line]


def _bound_test(row: ConfigurationLaunches, bound: float, rows: Configurations) -> WinnerTest:
    """The measured throughput against the one at ``bound``; the larger one first."""
    factor = bound * row.scale.devices / (row.baseline_devices or 1)
    required = [rate * factor for rate in row.baseline_rates]
    # If the best configuration of a strategy is below the bound, all are: choosing it gained nothing.
    if (row.efficiency or 0) < bound:
        return WinnerTest(required, [row.rates])
    return WinnerTest(row.rates, [required], count_configurations(row, rows))


def _efficiency_finding(
    subject: str, row: ConfigurationLaunches, line: Configurations, verdict: WinnerVerdict, bound: float
) -> Finding:
    if row.baseline_environment != row.environment_digest:
        why = "the run on one device was measured in another environment"
        verdict = replace(verdict, sure=INCONCLUSIVE, why=why, settle="measure both in one environment")
    strategy = row.line
    if (row.efficiency or 0) < bound:
        end = f"falls below {format_percent(bound)} at"
    else:
        end = f"stays at {format_percent(bound)} or more up to"
    text = f"{strategy} {end} {row.scale}: {format_percent(row.efficiency)}{row.batch_note}"
    is_significant = verdict.sure == SIGNIFICANT
    return Finding(
        "efficiency", subject, text if is_significant else f"inconclusive; as measured, {text}",
        SIGNIFICANT if is_significant else INCONCLUSIVE, verdict.why, verdict.settle, cluster=row.cluster,
        nodes=row.scale.nodes, devices=row.scale.devices, strategy=strategy, evidence=evidence_of(line),
    )  # fmt: skip


def _missing_baseline_findings(table: WorkloadTable, subjects: SubjectNames) -> list[Finding]:
    """Workloads on several devices without any run on one."""
    findings = []
    for workload, by_scale in table.items():
        scaled = [row for scale, rows in by_scale.items() for row in rows if scale.devices > 1 and row.is_ok]
        if scaled and all(row.efficiency is None for row in scaled):
            equal, what = ("batch", "single (or any strategy)") if scaled[0].spec.model else ("parameters", "it")
            findings.append(Finding(
                "efficiency", subjects.name(workload),
                f"inconclusive: there is no run on one device with the same {equal}", INCONCLUSIVE,
                "efficiency is relative to one device", f"measure {what} on one device",
                cluster=workload[0],
            ))  # fmt: skip
    return findings
