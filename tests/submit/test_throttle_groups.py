from __future__ import annotations

import pytest

from hpcbench.submit.batches import next_throttle_group, split_arrays, throttle_group_sizes


@pytest.mark.parametrize(
    ("max_running", "arrays", "widths"),
    [
        (8, [20], [8]),
        (8, [20, 20], [4, 4]),
        (8, [20, 20, 20], [5, 3]),
        (2, [20, 20, 20], [2]),
        (1, [1] * 10, [1]),
        (5, [20, 1, 1, 1, 1], [4, 1]),
        (8, [2, 18, 3, 3, 3], [1, 4, 1, 1, 1]),
        (20, [100, 2, 2], [18, 1, 1]),
        (3, [2, 1, 4], [2, 1]),
        (3, [6, 2, 2], [2, 1]),
        (4, [1, 9, 1, 9], [1, 3]),
        (4, [1, 9, 8], [2, 2]),
        (4, [48, 1, 1, 1], [4]),
        (6, [2, 10, 10, 2, 0, 2, 2], [1, 2, 2, 1]),
        (3, [], [1]),
    ],
)
def test_groups_finish_first_where_jobs_take_equally_long(
    max_running: int, arrays: list[int], widths: list[int]
) -> None:
    found = throttle_group_sizes(max_running, arrays)
    assert found == widths
    assert sum(found) == max(1, min(max_running, sum(arrays)))


def test_arrays_are_cut_by_the_largest_that_is_taken() -> None:
    assert split_arrays([10, 11, 1], 10) == [10, 10, 1, 1]
    assert split_arrays([], 10) == []


@pytest.mark.parametrize(("used", "lanes", "lane"), [([], 3, 0), ([0], 3, 1), ([0, 1, 2], 3, 0), ([0, 0, 1], 2, 1)])
def test_next_array_takes_the_throttle_group_with_the_fewest(used: list[int], lanes: int, lane: int) -> None:
    assert next_throttle_group(used, lanes) == lane
