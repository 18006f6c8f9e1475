"""Which strategy is the fastest at each scale, and where that changes."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from hpcbench.fileio import brief
from hpcbench.report.answers.answer import CANNOT_TELL, COUNTED, TOLD, Answer, counted, listed, percent
from hpcbench.report.answers.contest import Duel, Verdict, judge
from hpcbench.report.answers.measured import Measured, Place, Scale, Subjects, best_of_each
from hpcbench.report.marks import kind_of
from hpcbench.results.schema import OK
from hpcbench.units import format_rate

Table = dict[Place, dict[Scale, list[Measured]]]
THRESHOLD = 0.02
"""The least difference that counts, as in ``compare``."""


def fastest(table: Table, subjects: Subjects) -> list[Answer]:
    """The strategy with the most samples/s for each workload and scale, against the best of every other strategy.

    On one device there is no parallelism to choose: it is left out where there are larger scales.
    """
    contests = [
        (place, scale, ranking)
        for place, by_scale in table.items()
        for scale, rows in by_scale.items()
        if (scale.devices > 1 or max(by_scale).devices == 1) and (ranking := best_of_each(rows))
    ]
    rankings = [_in_one_environment(ranking, table[place][scale]) for place, scale, ranking in contests]
    verdicts = judge(
        [
            Duel(first.rates, [one.rates for one in rest], choices(first, table[place][scale]))
            for (place, scale, _), (first, *rest) in zip(contests, rankings, strict=True)
        ],
        THRESHOLD,
    )
    return [
        _answer(subjects.of(place, scale), ranking, table[place][scale], _believed(ranking, verdict))
        if len(ranking) > 1
        else _alone(subjects.of(place, scale), ranking[0], table[place][scale])
        for (place, scale, _), ranking, verdict in zip(contests, rankings, verdicts, strict=True)
    ]


def _in_one_environment(ranking: list[Measured], rows: list[Measured]) -> list[Measured]:
    """``ranking`` with its rivals in the winner's environment where they were measured there too."""
    first = ranking[0]
    alike = {row.label: row for row in best_of_each([row for row in rows if _same_environment(row, first)])}
    rest = [alike.get(row.label, row) for row in ranking[1:]]
    return [first, *sorted(rest, key=lambda row: row.rate or 0, reverse=True)]


def choices(best: Measured, rows: list[Measured]) -> int:
    """Of how many configurations of its strategy ``best`` is the one with the highest throughput."""
    return sum(row.is_ok and row.label == best.label for row in rows)


def _same_environment(one: Measured, other: Measured) -> bool:
    return one.environment_digest == other.environment_digest


def _believed(ranking: list[Measured], verdict: Verdict) -> Verdict:
    """Nothing can be told of strategies where something else than chance may make the difference."""
    others = [row.label for row in ranking[1:] if not _same_environment(row, ranking[0])]
    if not others or verdict.sure == CANNOT_TELL:
        return verdict
    why = f"{listed(others)}: measured in another environment than {ranking[0].label}"
    return replace(verdict, sure=CANNOT_TELL, why=why, settle="measure all strategies in one environment")


def _alone(subject: str, only: Measured, rows: list[Measured]) -> Answer:
    """Where one strategy has a throughput: there is no other on one device, or the others did not end well."""
    gone = [row for row in rows if not row.is_ok and row.label != only.label]
    others = list(dict.fromkeys(f"{row.label} ({_end(row)})" for row in gone))
    text = f"only {only.label} {'ended well' if others else 'was measured'}: {format_rate(only.rate or 0)} samples/s"
    why = f"{listed(others)} did not" if others else counted(len(only.rates), "launch", "launches")
    settle = "" if only.scale.devices == 1 or gone else "another strategy at this scale"
    if any(row.status in _STOPPED for row in gone):
        settle = "submit the sweep again: it runs what was stopped"
    return Answer(
        "fastest", subject, text, CANNOT_TELL if settle else COUNTED, why, settle,
        doubts=_doubts([only], rows), cluster=only.cluster,
        nodes=only.scale.nodes, devices=only.scale.devices, strategy=only.label, evidence=(only.evidence(),),
    )  # fmt: skip


def _end(row: Measured) -> str:
    return "without a throughput" if row.status == OK else brief(row.status)


_STOPPED = frozenset({"cancelled", "preempted"})
"""Ends that say nothing of a strategy."""


def _answer(subject: str, ranking: list[Measured], rows: list[Measured], verdict: Verdict) -> Answer:
    first, second, *_ = ranking
    return Answer(
        "fastest", subject, _text(first, second, verdict), verdict.sure, verdict.why, verdict.settle,
        doubts=_doubts([first, second], rows), cluster=first.cluster, nodes=first.scale.nodes,
        devices=first.scale.devices,
        strategy=first.label, rival=second.label, ratio=verdict.ratio, ratio_low=verdict.ratio_low,
        ratio_high=verdict.ratio_high, evidence=tuple(row.evidence() for row in ranking),
    )  # fmt: skip


def _text(first: Measured, second: Measured, verdict: Verdict) -> str:
    rate = f"{format_rate(first.rate or 0)} samples/s"
    more = f"{percent(verdict.ratio or 1)}{_interval(verdict)}"
    if verdict.sure == TOLD:
        return f"{first.label} is the fastest: {rate}, {more} over {second.label}"
    if verdict.sure == CANNOT_TELL:
        return f"cannot tell; the most was measured with {first.label}: {rate}, {more} over {second.label}"
    return f"{first.label} and {second.label} are alike: {rate}, {more}"


def _interval(verdict: Verdict) -> str:
    if verdict.ratio_low is None or verdict.ratio_high is None:
        return ""
    return f" [{percent(verdict.ratio_low)}, {percent(verdict.ratio_high)}]"


def _doubts(compared: list[Measured], rows: list[Measured]) -> tuple[str, ...]:
    """What speaks against a comparison: unequal batches, launches that did not end well, warnings."""
    first, *rest = compared
    found = [
        f"a step takes {first.spec.global_batch_size} samples with {first.label}, "
        f"{row.spec.global_batch_size} with {row.label}"
        for row in rest if row.spec.global_batch_size != first.spec.global_batch_size
    ]  # fmt: skip
    warned: dict[str, tuple[dict[str, None], str]] = {}
    for row in compared:
        ends = Counter(one.status for one in rows if one.config_id == row.config_id and one.status != OK)
        if ends:
            said = listed([f"{count} {brief(status)}" for status, count in sorted(ends.items())])
            found.append(f"other launches of {row.label} did not end well: {said}")
        for text in row.warnings:
            named, said = warned.setdefault(kind_of(text), ({}, brief(text.partition(": ")[0])))
            named[row.label] = None
    return *found, *(f"warning of {listed(list(named))}: {said}" for named, said in warned.values())


def crossovers(table: Table, subjects: Subjects) -> list[Answer]:
    """Between which neighbouring scales the fastest strategy changes. Told where both sides of it are."""
    changes = []
    for place, by_scale in table.items():
        # On one device there is no parallelism to choose.
        ranked = [(scale, best_of_each(rows)) for scale, rows in by_scale.items() if scale.devices > 1]
        ranked = [(scale, ranking) for scale, ranking in ranked if ranking]
        for (small, before), (large, after) in itertools.pairwise(ranked):
            if before[0].spec.strategy != after[0].spec.strategy:
                changes.append((place, small, before, large, after))
    duels, known = [], []
    for place, small, before, large, after in changes:
        sides = [(before, after[0], small), (after, before[0], large)]
        pairs = [(ranking[0], _found(ranking, other)) for ranking, other, _ in sides]
        known.append(pairs)
        duels += [
            Duel(winner.rates, [rival.rates], choices(winner, table[place][scale]))
            for (winner, rival), (_, _, scale) in zip(pairs, sides, strict=True)
            if rival is not None
        ]
    verdicts = iter(judge(duels, THRESHOLD))
    return [
        _crossover(subjects.of(place), small, large, [
            (winner, rival, None if rival is None else _believed([winner, rival], next(verdicts)))
            for winner, rival in pairs
        ])
        for (place, small, _, large, _), pairs in zip(changes, known, strict=True)
    ]  # fmt: skip


def _found(ranking: list[Measured], other: Measured) -> Measured | None:
    """The same strategy as ``other``'s at the scale of ``ranking``; of a hybrid with whatever degrees."""
    exact = [row for row in ranking if row.label == other.label]
    return next(iter(exact or [row for row in ranking if row.spec.strategy == other.spec.strategy]), None)


def _crossover(
    subject: str, small: Scale, large: Scale, sides: list[tuple[Measured, Measured | None, Verdict | None]]
) -> Answer:
    (first, _, _), (last, _, _) = sides
    text = f"from {small} to {large} the fastest changes from {first.label} to {last.label}"
    missing = [
        f"{winner.label}'s rival was not measured at {scale}"
        for (winner, rival, _), scale in zip(sides, (small, large), strict=True) if rival is None
    ]  # fmt: skip
    verdicts = [verdict for _, _, verdict in sides if verdict is not None]
    told = not missing and all(one.sure == TOLD for one in verdicts)
    why = [*missing, *(f"at {scale}: {verdict.why}" for (_, _, verdict), scale in
                       zip(sides, (small, large), strict=True) if verdict)]  # fmt: skip
    settle = dict.fromkeys(one.settle for one in verdicts if one.settle)
    rows = [row for winner, rival, _ in sides for row in (winner, rival) if row is not None]
    return Answer(
        "crossover", subject, text if told else f"cannot tell; as measured, {text}", TOLD if told else CANNOT_TELL,
        "; ".join(why), "; ".join(settle) or ("" if told else "both strategies at both scales"),
        cluster=first.cluster, nodes=large.nodes, devices=large.devices, strategy=last.label, rival=first.label,
        evidence=tuple(row.evidence() for row in rows),
    )  # fmt: skip
