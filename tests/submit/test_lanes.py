from __future__ import annotations

import pytest

from hpcbench.submit.lanes import count_arrays, lane_widths, next_lane


@pytest.mark.parametrize(
    ("max_running", "arrays", "widths"),
    [
        (8, 1, [8]),
        (8, 2, [4, 4]),
        (8, 3, [3, 3, 2]),
        (2, 3, [1, 1]),
        (1, 10, [1]),
        (5, 5, [1, 1, 1, 1, 1]),
        (3, 0, [3]),
    ],
)
def test_the_lanes_share_what_may_run(max_running: int, arrays: int, widths: list[int]) -> None:
    assert lane_widths(max_running, arrays) == widths
    assert sum(widths) == max_running


def test_arrays_are_counted_by_the_largest_that_is_taken() -> None:
    assert count_arrays([10, 11, 1], 10) == 4
    assert count_arrays([], 10) == 0


@pytest.mark.parametrize(("used", "lanes", "lane"), [([], 3, 0), ([0], 3, 1), ([0, 1, 2], 3, 0), ([0, 0, 1], 2, 1)])
def test_the_next_array_goes_to_the_lane_with_the_fewest(used: list[int], lanes: int, lane: int) -> None:
    assert next_lane(used, lanes) == lane
