"""Where lines cross: at how many devices one strategy overtakes another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple


class Crossing(NamedTuple):
    """``below`` is lower than ``above`` from ``x`` on; ``y`` is what both have there."""

    x: float
    y: float
    below: str
    above: str


Line = Sequence[tuple[float, float]]


def crossings(lines: Mapping[str, Line]) -> list[Crossing]:
    """Where the lines of each two series cross, in the order of ``x``; straight between points in log-log scales.

    Points are positive; a line that only touches another does not cross it.
    """
    found = [
        crossing for (one, first), (other, second) in combinations(lines.items(), 2)
        for crossing in _of_two(one, sorted(first), other, sorted(second))
    ]  # fmt: skip
    return sorted(found)


def _of_two(one: str, first: Line, other: str, second: Line) -> list[Crossing]:
    start, end = max(first[0][0], second[0][0]), min(first[-1][0], second[-1][0])
    places = sorted({x for x, _ in (*first, *second) if start <= x <= end})
    apart = [(math.log(x), _at(first, x) - _at(second, x)) for x in places]
    # Where they are equal nobody leads: the crossing is there, if the lead changes.
    leads = [(x, gap) for x, gap in apart if gap]
    found = []
    for (x1, gap1), (x2, gap2) in pairwise(leads):
        if gap1 * gap2 > 0:
            continue
        equal = [x for x, gap in apart if not gap and x1 < x < x2]
        place = math.exp(equal[0] if equal else x1 + (x2 - x1) * gap1 / (gap1 - gap2))
        below, above = (one, other) if gap2 < 0 else (other, one)
        found.append(Crossing(place, math.exp(_at(first, place)), below, above))
    return found


def _at(line: Line, x: float) -> float:
    """The logarithm of the line's height at ``x``."""
    for (x1, y1), (x2, y2) in pairwise(line):
        if x1 <= x <= x2:
            share = math.log(x / x1) / math.log(x2 / x1) if x2 > x1 else 0.0
            return math.log(y1) + share * math.log(y2 / y1)
    # Beyond the ends by rounding alone, or a line of one point.
    return math.log(line[0][1] if x <= line[0][0] else line[-1][1])
