"""Crossings of literal lines, straight in log-log scales."""

from __future__ import annotations

import pytest

from hpcbench.report.plots.scaling_plots import Crossover, LinePoints, find_crossovers

FLAT = [(1.0, 2.0), (4.0, 2.0)]
CASES: dict[str, tuple[LinePoints, LinePoints, list[tuple[float, float, str, str]]]] = {
    "rising over flat": ([(1, 1), (4, 4)], FLAT, [(2, 2, "b", "a")]),
    "in a point that both have": ([(1, 1), (2, 2), (4, 4)], [(1, 2), (2, 2), (4, 2)], [(2, 2, "b", "a")]),
    "only touching": ([(1, 1), (2, 2), (4, 1)], [(1, 2), (2, 2), (4, 2)], []),
    "there and back": ([(1, 1), (2, 4), (4, 1)], FLAT, [(2**0.5, 2, "b", "a"), (2**1.5, 2, "a", "b")]),
    "side by side": ([(1, 1), (2, 1)], [(4, 2), (8, 0.5)], []),
    "one point": ([(2, 1)], FLAT, []),
    "the same line": (FLAT, FLAT, []),
    "in the part that both cover": ([(1, 4), (16, 1)], [(4, 1), (64, 4)], [(8, 2**0.5, "a", "b")]),
    "in any order": ([(4, 4), (1, 1)], [(4, 2), (1, 2)], [(2, 2, "b", "a")]),
}


@pytest.mark.parametrize(("one", "other", "expected"), CASES.values(), ids=CASES.keys())
def test_crossovers_of_two_lines_are_those_of_the_table(
    one: LinePoints, other: LinePoints, expected: list[tuple[float, float, str, str]]
) -> None:
    found = find_crossovers({"a": one, "b": other})
    assert [one[2:] for one in found] == [one[2:] for one in expected]
    assert [one[:2] for one in found] == [pytest.approx(one[:2]) for one in expected]


def test_all_pairs_in_the_order_of_their_place() -> None:
    lines: dict[str, LinePoints] = {"a": [(1, 1), (16, 16)], "b": [(1, 2), (16, 2)], "c": [(1, 4), (16, 4)]}
    assert [one[2:] for one in find_crossovers(lines)] == [("b", "a"), ("c", "a")]
    assert find_crossovers({"a": lines["a"]}) == []
    assert isinstance(find_crossovers(lines)[0], Crossover)
