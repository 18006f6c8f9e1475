"""Two sets of results, configuration by configuration: what became slower, and how sure that is.

The unit is the launch: steps of one launch share its nodes, placement and clocks, so that many of them say little about
another launch.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcbench.config.spec import RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report.names import column_of, short_of
from hpcbench.report.rows import spec_of
from hpcbench.report.samples import RANKED_FROM, TOLD_FROM, Shift, shift
from hpcbench.results.columns import schema
from hpcbench.results.schema import OK

if TYPE_CHECKING:
    import polars

WORSE, BETTER, ALIKE, CANNOT_TELL, FAILS = "worse", "better", "alike", "cannot tell", "fails"
VERDICTS = (FAILS, WORSE, BETTER, CANNOT_TELL, ALIKE)
"""In the order in which they are shown."""
REGRESSIONS = frozenset({WORSE, FAILS})
LEVEL = 0.05
"""The chance that a comparison of what is alike calls anything worse; the same for better."""
LARGER_IS_BETTER = frozenset({"samples_per_s", "flops_per_s", "mfu", "accuracy"})
_BAD_ENDS = frozenset({"oom", "unsupported", "failed", "timeout"})
"""How a run ends for reasons of its own."""


@dataclass
class Pair:
    """One configuration on both sides: the metric of each launch that is ok, and how the others ended."""

    cluster: str
    config_id: str
    spec: RunSpec
    base: list[float]
    new: list[float]
    ends: Counter[str] = field(default_factory=Counter)
    """How launches of the new side ended that are not ok."""
    verdict: str = CANNOT_TELL
    reason: str = ""
    shift: Shift | None = None
    chance: float | None = None
    """Of such a difference in the direction found, anywhere in the comparison, where there is none."""


def metric_of(name: str) -> str:
    """The column of a metric whose ratio means something; ``ConfigError`` with those that there are."""
    column = column_of(name)
    choices = [one for one in schema() if one.startswith("metrics.") and _is_positive(one)]
    if column not in choices:
        raise ConfigError(f"--metric {name}: no figure to compare", hint=did_you_mean(name, map(short_of, choices)))
    return column


def _is_positive(column: str) -> bool:
    return column.endswith((".median", "_s", "_bytes", "_j")) or short_of(column) in LARGER_IS_BETTER


def pairs_of(base: polars.DataFrame, new: polars.DataFrame, column: str) -> tuple[list[Pair], list[str]]:
    """The configurations that both sides have launches of, and notes on what is on one side alone.

    They are paired by cluster and ``config_id``; where the sides share no cluster, by ``config_id``.
    """
    sides = [_launches(frame, column) for frame in (base, new)]
    notes = []
    common = sides[0].keys & sides[1].keys
    if common:
        notes.append(f"{len(common)} launches are on both sides and are left out of both")
        sides = [_launches(frame, column, common) for frame in (base, new)]
    clusters = [{cluster for cluster, _ in side.groups} for side in sides]
    if clusters[0] and clusters[1] and not clusters[0] & clusters[1]:
        notes.append(f"{_listed(clusters[0])} is compared with {_listed(clusters[1])}")
        sides = [side.without_cluster() for side in sides]
    one, other = (side.groups for side in sides)
    pairs = []
    for key in [key for key in one if key in other]:
        before, after = one[key], other[key]
        pairs.append(Pair(after.cluster, key[1], after.spec, before.values, after.values, after.ends))
    for name, mine, theirs in (("base", one, other), ("new", other, one)):
        alone = len(mine.keys() - theirs.keys())
        if alone:
            notes.append(f"{alone} configuration{'s' * (alone > 1)} only in {name}")
    return pairs, notes


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


@dataclass
class _Group:
    cluster: str
    spec: RunSpec
    values: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


@dataclass
class _Side:
    groups: dict[tuple[str, str], _Group]
    keys: set[tuple[object, ...]]
    """What tells a launch from every other."""

    def without_cluster(self) -> _Side:
        merged: dict[tuple[str, str], _Group] = {}
        for (_, config), group in self.groups.items():
            into = merged.setdefault(("", config), _Group(group.cluster, group.spec))
            into.values += group.values
            into.ends.update(group.ends)
        return _Side(merged, self.keys)


def _launches(frame: polars.DataFrame, column: str, without: set[tuple[object, ...]] | None = None) -> _Side:
    import polars as pl

    side = _Side({}, set())
    for row in frame.filter(pl.col("config_id").is_not_null()).iter_rows(named=True):
        key = (row["cluster"], row["run_id"], row["attempt"], row["status"], row["metrics.step_time_s.mean"])
        if without and key in without:
            continue
        side.keys.add(key)
        place = (row["cluster"], row["config_id"])
        if place not in side.groups:
            side.groups[place] = _Group(row["cluster"], spec_of(row))
        group = side.groups[place]
        if row["status"] != OK:
            group.ends[row["status"]] += 1
        elif row[column] is not None and row[column] > 0:
            group.values.append(row[column])
    return side


def judge(pairs: Sequence[Pair], column: str, threshold: float) -> None:
    """Give every pair its verdict: ``threshold`` is the least change that counts, as a share (0.02).

    A change is called one where the tests find it on ``LEVEL`` for all pairs together (Holm 1979) and it is at least
    ``threshold``; launches that ``RANKED_FROM`` or more a side are compared by ranks and must differ by these too.
    Alike is what has its whole 95 % interval within the threshold.
    """
    for pair in pairs:
        _first_look(pair)
    found = [(pair, pair.shift) for pair in pairs if pair.shift is not None]
    least = math.log1p(threshold)
    larger_is_better = short_of(column) in LARGER_IS_BETTER
    for direction in (True, False):
        chances = together([found_shift for _, found_shift in found], more=direction)
        for (pair, moved), chance in zip(found, chances, strict=True):
            size = moved.estimate if direction else -moved.estimate
            if size > 0:
                pair.chance = chance
            if chance <= LEVEL and size >= least:
                pair.verdict = BETTER if direction == larger_is_better else WORSE
                pair.reason = ""
    for pair, moved in found:
        if pair.verdict == CANNOT_TELL and -least <= moved.low and moved.high <= least:
            pair.verdict, pair.reason = ALIKE, ""


def _first_look(pair: Pair) -> None:
    bad = {status: count for status, count in pair.ends.items() if status in _BAD_ENDS}
    if pair.base and not pair.new and bad:
        pair.verdict = FAILS
        pair.reason = ", ".join(f"{count} {status}" for status, count in sorted(bad.items()))
        return
    fewest = min(len(pair.base), len(pair.new))
    if fewest < TOLD_FROM:
        pair.reason = f"{TOLD_FROM} launches a side are needed, {RANKED_FROM} are better"
        return
    pair.shift = shift(pair.base, pair.new)
    pair.reason = "the interval reaches over the threshold"


def together(shifts: Sequence[Shift], *, more: bool) -> list[float]:
    """Of every shift the chance of it, or one as unlikely, among all of them where none is real.

    By Holm over Welch's tests and, of those with ranks, over the rank tests: the better of the two, doubled where both
    were asked. Ranks of few launches cannot be as unlikely as many configurations ask for; means can, but an outlier
    spoils them.
    """
    side = 0 if more else 1
    by_means = holm([one.welch[side] for one in shifts])
    ranked = [place for place, one in enumerate(shifts) if one.ranks is not None]
    by_ranks = dict(zip(ranked, holm([_rank_chance(shifts[place], side) for place in ranked]), strict=True))
    found = []
    for place, chance in enumerate(by_means):
        if not ranked:
            found.append(chance)
        elif place not in by_ranks:
            found.append(min(1.0, 2 * chance))
        elif _rank_chance(shifts[place], side) > LEVEL:
            found.append(1.0)
        else:
            found.append(min(1.0, 2 * min(chance, by_ranks[place])))
    return found


def _rank_chance(one: Shift, side: int) -> float:
    assert one.ranks is not None
    return one.ranks[side]


def holm(chances: Sequence[float]) -> list[float]:
    """Holm's adjusted probabilities, in the order of ``chances``."""
    order = sorted(range(len(chances)), key=lambda place: chances[place])
    adjusted = [0.0] * len(chances)
    largest = 0.0
    for number, place in enumerate(order):
        largest = max(largest, min(1.0, (len(chances) - number) * chances[place]))
        adjusted[place] = largest
    return adjusted


def ratio_of(pair: Pair) -> float | None:
    """New over base: the estimate of the tests, else that of the medians; ``None`` where a side has no launch."""
    if pair.shift is not None:
        return math.exp(pair.shift.estimate)
    if not pair.base or not pair.new:
        return None
    return statistics.median(pair.new) / statistics.median(pair.base)
