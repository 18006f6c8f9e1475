from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcbench.results.intervals import Interval, clip, length_s, subtract, union


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(5, 7), (0, 2)], [(0, 2), (5, 7)]),
        ([(0, 2), (2, 4)], [(0, 4)]),
        ([(0, 9), (2, 3)], [(0, 9)]),
        ([(0, 3), (2, 5), (7, 8)], [(0, 5), (7, 8)]),
    ],
)
def test_union(intervals: list[Interval], expected: list[Interval]) -> None:
    assert union(intervals) == expected


@pytest.mark.parametrize(
    ("intervals", "without", "expected"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(-5, 20)], []),
        ([(0, 10)], [(2, 3), (8, 20)], [(0, 2), (3, 8)]),
        ([(0, 4), (6, 10)], [(3, 7)], [(0, 3), (7, 10)]),
        ([(0, 4), (6, 10)], [(1, 2), (3, 4), (9, 12)], [(0, 1), (2, 3), (6, 9)]),
        ([], [(0, 1)], []),
    ],
)
def test_subtract(intervals: list[Interval], without: list[Interval], expected: list[Interval]) -> None:
    assert subtract(intervals, without) == expected


def test_clip_and_length() -> None:
    assert clip([(0, 4), (8, 12), (20, 30)], (2, 10)) == [(2, 4), (8, 10)]
    assert length_s([(0, 1_000_000_000), (500_000_000, 1_500_000_000)]) == 1.5


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def points(intervals: list[Interval]) -> set[int]:
    return {point for begin, end in intervals for point in range(begin, end)}


@given(INTERVALS, INTERVALS)
def test_they_are_sets_of_points(a: list[Interval], b: list[Interval]) -> None:
    assert points(union(a)) == points(a)
    assert points(subtract(a, b)) == points(a) - points(b)
    assert length_s(a) == len(points(a)) / 1e9
    joined = union(a)
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(joined))
