from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hpcbench.results.timing_statistics import (
    TimeInterval,
    clip_intervals,
    covered_seconds,
    subtract_intervals,
    union_intervals,
)


def test_intervals_are_clipped_and_overlaps_count_once() -> None:
    assert clip_intervals([(0, 4), (8, 12), (20, 30)], (2, 10)) == [(2, 4), (8, 10)]
    assert covered_seconds([(0, 1_000_000_000), (500_000_000, 1_500_000_000)]) == 1.5


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def points(intervals: list[TimeInterval]) -> set[int]:
    return {point for begin, end in intervals for point in range(begin, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_behave_as_sets_of_points(a: list[TimeInterval], b: list[TimeInterval]) -> None:
    assert points(union_intervals(a)) == points(a)
    assert points(subtract_intervals(a, b)) == points(a) - points(b)
    assert covered_seconds(a) == len(points(a)) / 1e9
    joined = union_intervals(a)
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(joined))
