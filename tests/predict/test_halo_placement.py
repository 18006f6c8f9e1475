"""Which rank of a grid sets the pace, as literal tables."""

from __future__ import annotations

import pytest

from hpcbench.predict.placement import SAME_NODE_PAIR, GroupPlacement, halo_placement


@pytest.mark.parametrize(
    ("grid", "group", "place", "across"),
    [
        # One node: the second of a line, a corner of a square, the inner one of a larger one.
        ((4, 1), GroupPlacement(4, 1, 4, 1), 1, None),
        ((2, 2), GroupPlacement(4, 1, 4, 1), 0, None),
        ((3, 3), GroupPlacement(9, 1, 9, 1), 4, None),
        # A rank a node: everybody is on another, and nobody beside it.
        ((4, 1), GroupPlacement(4, 4, 1, 1), 1, 1),
        # Four a node: the first of the second node has one neighbour outside, and so has the last.
        ((16, 1), GroupPlacement(16, 4, 4, 1), 4, 2),
        # Two lines on each node send as much again.
        ((16, 1), GroupPlacement(16, 8, 2, 2), 2, 4),
        # Two nodes: the last of the first one, alone at that end.
        ((8, 1), GroupPlacement(8, 2, 4, 1), 3, 1),
        # A row of the square a node: each of its four has both vertical neighbours outside.
        ((4, 4), GroupPlacement(16, 4, 4, 1), 5, 4),
    ],
)
def test_the_slowest_halo_rank_and_its_links_are_found(
    grid: tuple[int, ...], group: GroupPlacement, place: int, across: int | None
) -> None:
    found = halo_placement(grid, group)
    assert found.place == place
    if across is not None:
        assert found.across == GroupPlacement(2, 2, 1, across)


def test_halo_neighbours_on_a_node_use_its_links() -> None:
    found = halo_placement((16, 1), GroupPlacement(16, 4, 4, 1))
    assert found.group_with(5) == SAME_NODE_PAIR
    assert found.group_with(3) == found.across


def test_a_large_grid_takes_no_longer() -> None:
    # Eight in a row have four neighbours outside each, and those at its ends one more.
    assert halo_placement((64, 64, 64), GroupPlacement(64**3, 64**3 // 8, 8, 1)).across.rivals == 7
