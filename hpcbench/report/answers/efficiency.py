"""Where a strategy's efficiency first falls under a bound."""

from __future__ import annotations

from dataclasses import replace

from hpcbench.report.answers.answer import CANNOT_TELL, TOLD, Answer
from hpcbench.report.answers.contest import Duel, Verdict, judge
from hpcbench.report.answers.fastest import Table, choices
from hpcbench.report.answers.measured import Measured, Place, Scale, Subjects, best_of_each

BOUND = 0.8


def efficiencies(table: Table, subjects: Subjects, bound: float = BOUND) -> list[Answer]:
    """Of each strategy the smallest scale with less efficiency than ``bound``, or the largest that still has it.

    Efficiency is that of ``groups.with_speedups``: the throughput per device over that of one device with the same
    batch per replica. It is told where launches differ by more than chance from ``bound`` times the ideal throughput.
    """
    found = [(place, *entry) for place, by_scale in table.items() for entry in _turning_points(by_scale, bound)]
    verdicts = judge([_duel(row, bound, table[place][row.scale]) for place, _, row, _ in found], threshold=0)
    answers = [
        _answer(place, row, rows, _believed(row, verdict), bound, subjects)
        for (place, _, row, rows), verdict in zip(found, verdicts, strict=True)
    ]
    return answers + _unknown(table, subjects)


def _turning_points(by_scale: dict[Scale, list[Measured]], bound: float) -> list[tuple[str, Measured, list[Measured]]]:
    """Strategy, the configuration that decides, and the best ones of all scales."""
    series: dict[str, list[Measured]] = {}
    for rows in by_scale.values():
        # Hybrids of one strategy with other degrees are one line over scales.
        for row in best_of_each(rows):
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


def _duel(row: Measured, bound: float, rows: list[Measured]) -> Duel:
    """What was measured, against the least that ``bound`` allows; the larger one first."""
    factor = bound * row.scale.devices / (row.baseline_devices or 1)
    least = [rate * factor for rate in row.baseline_rates]
    # Where the best of a strategy is under the bound, all of it are: nothing was gained by choosing.
    return Duel(least, [row.rates]) if (row.efficiency or 0) < bound else Duel(row.rates, [least], choices(row, rows))


def _believed(row: Measured, verdict: Verdict) -> Verdict:
    if row.baseline_environment == row.environment_digest:
        return verdict
    why = "the run on one device was measured in another environment"
    return replace(verdict, sure=CANNOT_TELL, why=why, settle="measure both in one environment")


def _answer(
    place: Place, row: Measured, line: list[Measured], verdict: Verdict, bound: float, subjects: Subjects
) -> Answer:
    falls = (row.efficiency or 0) < bound
    name = row.spec.strategy
    shown = f"{row.efficiency:.0%}"
    if falls:
        text = f"{name} falls under {bound:.0%} at {row.scale}: {shown}"
    else:
        text = f"{name} stays at {bound:.0%} or more up to {row.scale}: {shown}"
    told = verdict.sure == TOLD
    return Answer(
        "efficiency", subjects.of(place), text if told else f"cannot tell; as measured, {text}",
        TOLD if told else CANNOT_TELL, verdict.why, verdict.settle, cluster=row.cluster, nodes=row.scale.nodes,
        devices=row.scale.devices, strategy=name, evidence=tuple(one.evidence() for one in line),
    )  # fmt: skip


def _unknown(table: Table, subjects: Subjects) -> list[Answer]:
    """Workloads on several devices without any run on one."""
    found = []
    for place, by_scale in table.items():
        wide = [row for scale, rows in by_scale.items() for row in rows if scale.devices > 1 and row.is_ok]
        if wide and all(row.efficiency is None for row in wide):
            found.append(Answer(
                "efficiency", subjects.of(place), "cannot tell: there is no run on one device with the same batch",
                CANNOT_TELL, "efficiency is against one device", "single (or any strategy) on one device",
                cluster=place[0],
            ))  # fmt: skip
    return found
