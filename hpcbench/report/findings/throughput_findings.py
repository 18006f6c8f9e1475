"""Findings about throughput: the fastest strategy per scale, crossovers between scales, and loss of efficiency."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from hpcbench.fileio import printable_excerpt
from hpcbench.report.findings.finding import (
    INCONCLUSIVE,
    OBSERVED,
    SIGNIFICANT,
    ClusterWorkload,
    ConfigurationLaunches,
    Finding,
    RunScale,
    SubjectNames,
    best_per_strategy,
    format_ratio_percent,
    join_words,
    pluralize,
)
from hpcbench.report.findings.significance import WinnerTest, WinnerVerdict, judge_winners
from hpcbench.report.table_model import message_pattern
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import format_rate

WorkloadTable = dict[ClusterWorkload, dict[RunScale, list[ConfigurationLaunches]]]
MIN_DIFFERENCE = 0.02
"""The least difference that counts, as in ``compare``."""


def fastest_findings(table: WorkloadTable, subjects: SubjectNames) -> list[Finding]:
    """The strategy with the most samples/s for each workload and scale, against the best of every other strategy.

    On one device there is no parallelism to choose: it is left out where there are larger scales.
    """
    contests = [
        (place, scale, ranking)
        for place, by_scale in table.items()
        for scale, rows in by_scale.items()
        if (scale.devices > 1 or max(by_scale).devices == 1) and (ranking := best_per_strategy(rows))
    ]
    rankings = [_rivals_in_same_environment(ranking, table[place][scale]) for place, scale, ranking in contests]
    verdicts = judge_winners(
        [
            WinnerTest(first.rates, [one.rates for one in rest], count_configurations(first, table[place][scale]))
            for (place, scale, _), (first, *rest) in zip(contests, rankings, strict=True)
        ],
        MIN_DIFFERENCE,
    )
    return [
        _fastest_finding(
            subjects.of(place, scale), ranking, table[place][scale], _demote_across_environments(ranking, verdict)
        )
        if len(ranking) > 1
        else _only_strategy_finding(subjects.of(place, scale), ranking[0], table[place][scale])
        for (place, scale, _), ranking, verdict in zip(contests, rankings, verdicts, strict=True)
    ]


def _rivals_in_same_environment(
    ranking: list[ConfigurationLaunches], rows: list[ConfigurationLaunches]
) -> list[ConfigurationLaunches]:
    """``ranking`` with its rivals in the winner's environment where they were measured there too."""
    first = ranking[0]
    alike = {row.label: row for row in best_per_strategy([row for row in rows if _same_environment(row, first)])}
    rest = [alike.get(row.label, row) for row in ranking[1:]]
    return [first, *sorted(rest, key=lambda row: row.rate or 0, reverse=True)]


def count_configurations(best: ConfigurationLaunches, rows: list[ConfigurationLaunches]) -> int:
    """Of how many configurations of its strategy ``best`` is the one with the highest throughput."""
    return sum(row.is_ok and row.label == best.label for row in rows)


def _same_environment(one: ConfigurationLaunches, other: ConfigurationLaunches) -> bool:
    return one.environment_digest == other.environment_digest


def _demote_across_environments(ranking: list[ConfigurationLaunches], verdict: WinnerVerdict) -> WinnerVerdict:
    """Nothing can be told of strategies where something else than chance may make the difference."""
    others = [row.label for row in ranking[1:] if not _same_environment(row, ranking[0])]
    if not others or verdict.sure == INCONCLUSIVE:
        return verdict
    why = f"{join_words(others)}: measured in another environment than {ranking[0].label}"
    return replace(verdict, sure=INCONCLUSIVE, why=why, settle="measure all strategies in one environment")


def _only_strategy_finding(subject: str, only: ConfigurationLaunches, rows: list[ConfigurationLaunches]) -> Finding:
    """Where one strategy has a throughput: there is no other on one device, or the others did not end well."""
    gone = [row for row in rows if not row.is_ok and row.label != only.label]
    others = list(dict.fromkeys(f"{row.label} ({_end_text(row)})" for row in gone))
    text = f"only {only.label} {'ended well' if others else 'was measured'}: {format_rate(only.rate or 0)} samples/s"
    why = f"{join_words(others)} did not" if others else pluralize(len(only.rates), "launch", "launches")
    settle = "" if only.scale.devices == 1 or gone else "another strategy at this scale"
    if any(row.status in _STOPPED_STATUSES for row in gone):
        settle = "submit the sweep again: it runs what was stopped"
    return Finding(
        "fastest", subject, text, INCONCLUSIVE if settle else OBSERVED, why, settle,
        doubts=_caveats([only], rows), cluster=only.cluster,
        nodes=only.scale.nodes, devices=only.scale.devices, strategy=only.label, evidence=(only.evidence(),),
    )  # fmt: skip


def _end_text(row: ConfigurationLaunches) -> str:
    return "without a throughput" if row.status == STATUS_OK else printable_excerpt(row.status)


_STOPPED_STATUSES = frozenset({"cancelled", "preempted"})
"""Ends that say nothing of a strategy."""


def _fastest_finding(
    subject: str, ranking: list[ConfigurationLaunches], rows: list[ConfigurationLaunches], verdict: WinnerVerdict
) -> Finding:
    first, second, *_ = ranking
    return Finding(
        "fastest", subject, _fastest_text(first, second, verdict), verdict.sure, verdict.why, verdict.settle,
        doubts=_caveats([first, second], rows), cluster=first.cluster, nodes=first.scale.nodes,
        devices=first.scale.devices,
        strategy=first.label, rival=second.label, ratio=verdict.ratio, ratio_low=verdict.ratio_low,
        ratio_high=verdict.ratio_high, evidence=tuple(row.evidence() for row in ranking),
    )  # fmt: skip


def _fastest_text(first: ConfigurationLaunches, second: ConfigurationLaunches, verdict: WinnerVerdict) -> str:
    rate = f"{format_rate(first.rate or 0)} samples/s"
    more = f"{format_ratio_percent(verdict.ratio or 1)}{_interval_text(verdict)}"
    if verdict.sure == SIGNIFICANT:
        return f"{first.label} is the fastest: {rate}, {more} over {second.label}"
    if verdict.sure == INCONCLUSIVE:
        return f"cannot tell; the most was measured with {first.label}: {rate}, {more} over {second.label}"
    return f"{first.label} and {second.label} are alike: {rate}, {more}"


def _interval_text(verdict: WinnerVerdict) -> str:
    if verdict.ratio_low is None or verdict.ratio_high is None:
        return ""
    return f" [{format_ratio_percent(verdict.ratio_low)}, {format_ratio_percent(verdict.ratio_high)}]"


def _caveats(compared: list[ConfigurationLaunches], rows: list[ConfigurationLaunches]) -> tuple[str, ...]:
    """What speaks against a comparison: unequal batches, launches that did not end well, warnings."""
    first, *rest = compared
    found = [
        f"a step takes {first.spec.global_batch_size} samples with {first.label}, "
        f"{row.spec.global_batch_size} with {row.label}"
        for row in rest if row.spec.global_batch_size != first.spec.global_batch_size
    ]  # fmt: skip
    warned: dict[str, tuple[dict[str, None], str]] = {}
    for row in compared:
        ends = Counter(one.status for one in rows if one.config_id == row.config_id and one.status != STATUS_OK)
        if ends:
            said = join_words([f"{count} {printable_excerpt(status)}" for status, count in sorted(ends.items())])
            found.append(f"other launches of {row.label} did not end well: {said}")
        for text in row.warnings:
            named, said = warned.setdefault(message_pattern(text), ({}, printable_excerpt(text.partition(": ")[0])))
            named[row.label] = None
    return *found, *(f"warning of {join_words(list(named))}: {said}" for named, said in warned.values())


def crossover_findings(table: WorkloadTable, subjects: SubjectNames) -> list[Finding]:
    """Between which neighbouring scales the fastest strategy changes. Told where both sides of it are."""
    changes = []
    for place, by_scale in table.items():
        # On one device there is no parallelism to choose.
        ranked = [(scale, best_per_strategy(rows)) for scale, rows in by_scale.items() if scale.devices > 1]
        ranked = [(scale, ranking) for scale, ranking in ranked if ranking]
        for (small, before), (large, after) in itertools.pairwise(ranked):
            if before[0].spec.strategy != after[0].spec.strategy:
                changes.append((place, small, before, large, after))
    duels, known = [], []
    for place, small, before, large, after in changes:
        sides = [(before, after[0], small), (after, before[0], large)]
        pairs = [(ranking[0], _find_strategy(ranking, other)) for ranking, other, _ in sides]
        known.append(pairs)
        duels += [
            WinnerTest(winner.rates, [rival.rates], count_configurations(winner, table[place][scale]))
            for (winner, rival), (_, _, scale) in zip(pairs, sides, strict=True)
            if rival is not None
        ]
    verdicts = iter(judge_winners(duels, MIN_DIFFERENCE))
    return [
        _crossover_finding(subjects.of(place), small, large, [
            (winner, rival, None if rival is None else _demote_across_environments([winner, rival], next(verdicts)))
            for winner, rival in pairs
        ])
        for (place, small, _, large, _), pairs in zip(changes, known, strict=True)
    ]  # fmt: skip


def _find_strategy(ranking: list[ConfigurationLaunches], other: ConfigurationLaunches) -> ConfigurationLaunches | None:
    """The same strategy as ``other``'s at the scale of ``ranking``; of a hybrid with whatever degrees."""
    exact = [row for row in ranking if row.label == other.label]
    return next(iter(exact or [row for row in ranking if row.spec.strategy == other.spec.strategy]), None)


def _crossover_finding(
    subject: str,
    small: RunScale,
    large: RunScale,
    sides: list[tuple[ConfigurationLaunches, ConfigurationLaunches | None, WinnerVerdict | None]],
) -> Finding:
    (first, _, _), (last, _, _) = sides
    text = f"from {small} to {large} the fastest changes from {first.label} to {last.label}"
    missing = [
        f"{winner.label}'s rival was not measured at {scale}"
        for (winner, rival, _), scale in zip(sides, (small, large), strict=True) if rival is None
    ]  # fmt: skip
    verdicts = [verdict for _, _, verdict in sides if verdict is not None]
    told = not missing and all(one.sure == SIGNIFICANT for one in verdicts)
    why = [*missing, *(f"at {scale}: {verdict.why}" for (_, _, verdict), scale in
                       zip(sides, (small, large), strict=True) if verdict)]  # fmt: skip
    settle = dict.fromkeys(one.settle for one in verdicts if one.settle)
    rows = [row for winner, rival, _ in sides for row in (winner, rival) if row is not None]
    return Finding(
        "crossover", subject, text if told else f"cannot tell; as measured, {text}",
        SIGNIFICANT if told else INCONCLUSIVE,
        "; ".join(why), "; ".join(settle) or ("" if told else "both strategies at both scales"),
        cluster=first.cluster, nodes=large.nodes, devices=large.devices, strategy=last.label, rival=first.label,
        evidence=tuple(row.evidence() for row in rows),
    )  # fmt: skip


EFFICIENCY_BOUND = 0.8


def efficiency_findings(table: WorkloadTable, subjects: SubjectNames, bound: float = EFFICIENCY_BOUND) -> list[Finding]:
    """Of each strategy the smallest scale with less efficiency than ``bound``, or the largest that still has it.

    Efficiency is that of ``groups.with_speedups``: the throughput per device over that of one device with the same
    batch per replica. It is told where launches differ by more than chance from ``bound`` times the ideal throughput.
    """
    found = [(place, *entry) for place, by_scale in table.items() for entry in _turning_points(by_scale, bound)]
    verdicts = judge_winners(
        [_bound_test(row, bound, table[place][row.scale]) for place, _, row, _ in found], threshold=0
    )
    answers = [
        _efficiency_finding(place, row, rows, _demote_foreign_baseline(row, verdict), bound, subjects)
        for (place, _, row, rows), verdict in zip(found, verdicts, strict=True)
    ]
    return answers + _missing_baseline_findings(table, subjects)


def _turning_points(
    by_scale: dict[RunScale, list[ConfigurationLaunches]], bound: float
) -> list[tuple[str, ConfigurationLaunches, list[ConfigurationLaunches]]]:
    """Strategy, the configuration that decides, and the best ones of all scales."""
    series: dict[str, list[ConfigurationLaunches]] = {}
    for rows in by_scale.values():
        # Hybrids of one strategy with other degrees are one line over scales.
        for row in best_per_strategy(rows):
            line = series.setdefault(row.spec.strategy, [])
            if row.efficiency is not None and row.baseline_rates and row.scale.devices > (row.baseline_devices or 1):
                if line and line[-1].scale == row.scale:
                    continue
                line.append(row)
    found = []
    for strategy, line in sorted(series.items()):
        if line:
            under = [row for row in line if (row.efficiency or 0) < bound]
            found.append((strategy, under[0] if under else line[-1], line))
    return found


def _bound_test(row: ConfigurationLaunches, bound: float, rows: list[ConfigurationLaunches]) -> WinnerTest:
    """What was measured, against the least that ``bound`` allows; the larger one first."""
    factor = bound * row.scale.devices / (row.baseline_devices or 1)
    least = [rate * factor for rate in row.baseline_rates]
    # Where the best of a strategy is under the bound, all of it are: nothing was gained by choosing.
    return (
        WinnerTest(least, [row.rates])
        if (row.efficiency or 0) < bound
        else WinnerTest(row.rates, [least], count_configurations(row, rows))
    )


def _demote_foreign_baseline(row: ConfigurationLaunches, verdict: WinnerVerdict) -> WinnerVerdict:
    if row.baseline_environment == row.environment_digest:
        return verdict
    why = "the run on one device was measured in another environment"
    return replace(verdict, sure=INCONCLUSIVE, why=why, settle="measure both in one environment")


def _efficiency_finding(
    place: ClusterWorkload,
    row: ConfigurationLaunches,
    line: list[ConfigurationLaunches],
    verdict: WinnerVerdict,
    bound: float,
    subjects: SubjectNames,
) -> Finding:
    falls = (row.efficiency or 0) < bound
    name = row.spec.strategy
    shown = f"{row.efficiency:.0%}"
    if falls:
        text = f"{name} falls under {bound:.0%} at {row.scale}: {shown}"
    else:
        text = f"{name} stays at {bound:.0%} or more up to {row.scale}: {shown}"
    told = verdict.sure == SIGNIFICANT
    return Finding(
        "efficiency", subjects.of(place), text if told else f"cannot tell; as measured, {text}",
        SIGNIFICANT if told else INCONCLUSIVE, verdict.why, verdict.settle, cluster=row.cluster, nodes=row.scale.nodes,
        devices=row.scale.devices, strategy=name, evidence=tuple(one.evidence() for one in line),
    )  # fmt: skip


def _missing_baseline_findings(table: WorkloadTable, subjects: SubjectNames) -> list[Finding]:
    """Workloads on several devices without any run on one."""
    found = []
    for place, by_scale in table.items():
        wide = [row for scale, rows in by_scale.items() for row in rows if scale.devices > 1 and row.is_ok]
        if wide and all(row.efficiency is None for row in wide):
            found.append(Finding(
                "efficiency", subjects.of(place), "cannot tell: there is no run on one device with the same batch",
                INCONCLUSIVE, "efficiency is against one device", "single (or any strategy) on one device",
                cluster=place[0],
            ))  # fmt: skip
    return found
