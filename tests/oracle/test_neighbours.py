"""Which rank of a grid sets the pace, as literal tables."""

from __future__ import annotations

import pytest

from hpcbench.oracle.neighbours import INSIDE, neighbours_of
from hpcbench.oracle.placement import Group


@pytest.mark.parametrize(
    ("grid", "group", "place", "across"),
    [
        # One node: the second of a line, a corner of a square, the inner one of a larger one.
        ((4, 1), Group(4, 1, 4, 1), 1, None),
        ((2, 2), Group(4, 1, 4, 1), 0, None),
        ((3, 3), Group(9, 1, 9, 1), 4, None),
        # A rank a node: everybody is on another, and nobody beside it.
        ((4, 1), Group(4, 4, 1, 1), 1, 1),
        # Four a node: the first of the second node has one neighbour outside, and so has the last.
        ((16, 1), Group(16, 4, 4, 1), 4, 2),
        # Two lines on each node send as much again.
        ((16, 1), Group(16, 8, 2, 2), 2, 4),
        # Two nodes: the last of the first one, alone at that end.
        ((8, 1), Group(8, 2, 4, 1), 3, 1),
        # A row of the square a node: each of its four has both vertical neighbours outside.
        ((4, 4), Group(16, 4, 4, 1), 5, 4),
    ],
)
def test_places(grid: tuple[int, ...], group: Group, place: int, across: int | None) -> None:
    found = neighbours_of(grid, group)
    assert found.place == place
    if across is not None:
        assert found.across == Group(2, 2, 1, across)


def test_neighbours_on_the_same_node() -> None:
    found = neighbours_of((16, 1), Group(16, 4, 4, 1))
    assert found.group_with(5) == INSIDE
    assert found.group_with(3) == found.across


def test_a_large_grid_takes_no_longer() -> None:
    # Eight in a row have four neighbours outside each, and those at its ends one more.
    assert neighbours_of((64, 64, 64), Group(64**3, 64**3 // 8, 8, 1)).across.rivals == 7
