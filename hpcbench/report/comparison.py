"""Comparison of two sets of results, configuration by configuration, with multiplicity correction.

The unit is the launch: steps of one launch share its nodes, placement and clocks, so many steps of one launch carry
little information about another launch."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report.column_names import resolve_column, short_name
from hpcbench.report.configurations import run_spec_of
from hpcbench.report.hypothesis_tests import (
    MIN_LAUNCHES_RANK_TEST,
    MIN_LAUNCHES_T_TEST,
    LogRatioEstimate,
    estimate_log_ratio,
)
from hpcbench.results.frame import column_types
from hpcbench.results.schema import STATUS_OK

if TYPE_CHECKING:
    import polars

WORSE, BETTER, EQUIVALENT, INCONCLUSIVE, FAILS = "worse", "better", "alike", "cannot tell", "fails"
COMPARISON_VERDICTS = (FAILS, WORSE, BETTER, INCONCLUSIVE, EQUIVALENT)
"""In the order in which they are shown."""
REGRESSIONS = frozenset({WORSE, FAILS})
SIGNIFICANCE_LEVEL = 0.05
"""The chance that a comparison of what is alike calls anything worse; the same for better."""
LARGER_IS_BETTER = frozenset({"samples_per_s", "flops_per_s", "mfu", "accuracy"})
_FAILED_STATUSES = frozenset({"oom", "unsupported", "failed", "timeout"})
"""How a run ends for reasons of its own."""


@dataclass
class ConfigurationPair:
    """One configuration on both sides: the metric of each launch that is ok, and how the others ended."""

    cluster: str
    config_id: str
    spec: RunSpec
    base: list[float]
    new: list[float]
    ends: Counter[str] = field(default_factory=Counter)
    """How launches of the new side ended that are not ok."""
    verdict: str = INCONCLUSIVE
    reason: str = ""
    shift: LogRatioEstimate | None = None
    chance: float | None = None
    """Of such a difference in the direction found, anywhere in the comparison, where there is none."""


def comparison_metric(name: str) -> str:
    """The column of a metric whose ratio means something; ``ConfigError`` with those that there are."""
    column = resolve_column(name)
    choices = [one for one in column_types() if one.startswith("metrics.") and _has_ratio(one)]
    if column not in choices:
        raise ConfigError(f"--metric {name}: no figure to compare", hint=did_you_mean(name, map(short_name, choices)))
    return column


def _has_ratio(column: str) -> bool:
    return column.endswith((".median", "_s", "_bytes", "_j")) or short_name(column) in LARGER_IS_BETTER


def pair_configurations(
    base: polars.DataFrame, new: polars.DataFrame, column: str
) -> tuple[list[ConfigurationPair], list[str]]:
    """The configurations that both sides have launches of, and notes on what is on one side alone.

    They are paired by cluster and ``config_id``; where the sides share no cluster, by ``config_id``.
    """
    sides = [_group_launches(frame, column) for frame in (base, new)]
    notes = []
    common = sides[0].keys & sides[1].keys
    if common:
        notes.append(f"{len(common)} launches are on both sides and are left out of both")
        sides = [_group_launches(frame, column, common) for frame in (base, new)]
    clusters = [{cluster for cluster, _ in side.groups} for side in sides]
    if clusters[0] and clusters[1] and not clusters[0] & clusters[1]:
        notes.append(f"{_join_sorted(clusters[0])} is compared with {_join_sorted(clusters[1])}")
        sides = [side.without_cluster() for side in sides]
    one, other = (side.groups for side in sides)
    pairs = []
    for key in [key for key in one if key in other]:
        before, after = one[key], other[key]
        pairs.append(ConfigurationPair(after.cluster, key[1], after.spec, before.values, after.values, after.ends))
    for name, mine, theirs in (("base", one, other), ("new", other, one)):
        alone = len(mine.keys() - theirs.keys())
        if alone:
            notes.append(f"{alone} configuration{'s' * (alone > 1)} only in {name}")
    return pairs, notes


def _join_sorted(names: set[str]) -> str:
    return ", ".join(sorted(names))


@dataclass
class _LaunchGroup:
    cluster: str
    spec: RunSpec
    values: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


@dataclass
class _ComparisonSide:
    groups: dict[tuple[str, str], _LaunchGroup]
    keys: set[tuple[object, ...]]
    """What tells a launch from every other."""

    def without_cluster(self) -> _ComparisonSide:
        merged: dict[tuple[str, str], _LaunchGroup] = {}
        for (_, config), group in self.groups.items():
            into = merged.setdefault(("", config), _LaunchGroup(group.cluster, group.spec))
            into.values += group.values
            into.ends.update(group.ends)
        return _ComparisonSide(merged, self.keys)


def _group_launches(
    frame: polars.DataFrame, column: str, without: set[tuple[object, ...]] | None = None
) -> _ComparisonSide:
    import polars as pl

    side = _ComparisonSide({}, set())
    for row in frame.filter(pl.col("config_id").is_not_null()).iter_rows(named=True):
        key = (row["cluster"], row["run_id"], row["attempt"], row["status"], row["metrics.step_time_s.mean"])
        if without and key in without:
            continue
        side.keys.add(key)
        place = (row["cluster"], row["config_id"])
        if place not in side.groups:
            side.groups[place] = _LaunchGroup(row["cluster"], run_spec_of(row))
        group = side.groups[place]
        if row["status"] != STATUS_OK:
            group.ends[row["status"]] += 1
        elif row[column] is not None and row[column] > 0:
            group.values.append(row[column])
    return side


def judge_pairs(pairs: Sequence[ConfigurationPair], column: str, threshold: float) -> None:
    """Give every pair its verdict: ``threshold`` is the least change that counts, as a share (0.02).

    A change is called one where the tests find it on ``SIGNIFICANCE_LEVEL`` for all pairs together (Holm 1979) and it
    is at least
    ``threshold``; launches that ``MIN_LAUNCHES_RANK_TEST`` or more a side are compared by ranks and must differ by
    these too.
    Alike is what has its whole 95 % interval within the threshold.
    """
    for pair in pairs:
        _prepare_pair(pair)
    found = [(pair, pair.shift) for pair in pairs if pair.shift is not None]
    least = math.log1p(threshold)
    larger_is_better = short_name(column) in LARGER_IS_BETTER
    for direction in (True, False):
        chances = adjusted_chances([found_shift for _, found_shift in found], more=direction)
        for (pair, moved), chance in zip(found, chances, strict=True):
            size = moved.estimate if direction else -moved.estimate
            if size > 0:
                pair.chance = chance
            if chance <= SIGNIFICANCE_LEVEL and size >= least:
                pair.verdict = BETTER if direction == larger_is_better else WORSE
                pair.reason = ""
    for pair, moved in found:
        if pair.verdict == INCONCLUSIVE and -least <= moved.low and moved.high <= least:
            pair.verdict, pair.reason = EQUIVALENT, ""


def _prepare_pair(pair: ConfigurationPair) -> None:
    bad = {status: count for status, count in pair.ends.items() if status in _FAILED_STATUSES}
    if pair.base and not pair.new and bad:
        pair.verdict = FAILS
        pair.reason = ", ".join(f"{count} {status}" for status, count in sorted(bad.items()))
        return
    fewest = min(len(pair.base), len(pair.new))
    if fewest < MIN_LAUNCHES_T_TEST:
        pair.reason = f"{MIN_LAUNCHES_T_TEST} launches a side are needed, {MIN_LAUNCHES_RANK_TEST} are better"
        return
    pair.shift = estimate_log_ratio(pair.base, pair.new)
    pair.reason = "the interval reaches over the threshold"


def adjusted_chances(shifts: Sequence[LogRatioEstimate], *, more: bool) -> list[float]:
    """Of every shift the chance of it, or one as unlikely, among all of them where none is real.

    By Holm over Welch's tests and, of those with ranks, over the rank tests: the better of the two, doubled where both
    were asked. Ranks of few launches cannot be as unlikely as many configurations ask for; means can, but an outlier
    spoils them.
    """
    side = 0 if more else 1
    by_means = holm_adjust([one.welch[side] for one in shifts])
    ranked = [place for place, one in enumerate(shifts) if one.ranks is not None]
    by_ranks = dict(zip(ranked, holm_adjust([_rank_chance(shifts[place], side) for place in ranked]), strict=True))
    found = []
    for place, chance in enumerate(by_means):
        if not ranked:
            found.append(chance)
        elif place not in by_ranks:
            found.append(min(1.0, 2 * chance))
        elif _rank_chance(shifts[place], side) > SIGNIFICANCE_LEVEL:
            found.append(1.0)
        else:
            found.append(min(1.0, 2 * min(chance, by_ranks[place])))
    return found


def _rank_chance(one: LogRatioEstimate, side: int) -> float:
    assert one.ranks is not None
    return one.ranks[side]


def holm_adjust(chances: Sequence[float]) -> list[float]:
    """Holm's adjusted probabilities, in the order of ``chances``."""
    order = sorted(range(len(chances)), key=lambda place: chances[place])
    adjusted = [0.0] * len(chances)
    largest = 0.0
    for number, place in enumerate(order):
        largest = max(largest, min(1.0, (len(chances) - number) * chances[place]))
        adjusted[place] = largest
    return adjusted


def change_ratio(pair: ConfigurationPair) -> float | None:
    """New over base: the estimate of the tests, else that of the medians; ``None`` where a side has no launch."""
    if pair.shift is not None:
        return math.exp(pair.shift.estimate)
    if not pair.base or not pair.new:
        return None
    return statistics.median(pair.new) / statistics.median(pair.base)
