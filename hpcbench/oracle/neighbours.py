"""Ranks that exchange halos: which of them sets the pace, and which of its neighbours are on other nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from hpcbench.oracle.placement import Group
from hpcbench.parallel.halo import coordinates

INSIDE = Group(2, 1, 2, 1)


class Neighbours(NamedTuple):
    """A place in a grid of ranks."""

    place: int
    ranks_per_node: int
    across: Group
    """It and a rank of another node."""

    def group_with(self, other: int) -> Group:
        """It and the rank at ``other``."""
        return self.across if other // self.ranks_per_node != self.place // self.ranks_per_node else INSIDE


@lru_cache(maxsize=1024)
def neighbours_of(grid: tuple[int, ...], group: Group) -> Neighbours:
    """Of the places of two nodes away from the edge that with most neighbours, and most of them on other nodes.

    The others of its node send at the same time: ``across`` shares the way out with as many as do so on average for
    each of its own messages.
    """
    ranks, per_node = prod(grid), group.ranks_per_node
    if group.nodes == 1:
        per_node = ranks
    # The second in every dim has neighbours on both sides, and as large a share as nearly all.
    inner = 0
    for parts in grid:
        inner = inner * parts + int(parts > 2)
    first = inner // per_node * per_node
    candidates = range(first, min(first + 2 * per_node, ranks)) if group.nodes > 1 else range(inner, inner + 1)
    crossings = {one: _crossings(grid, one, per_node) for one in candidates}
    leaving = {one // per_node: 0 for one in candidates}
    for one, crossing in crossings.items():
        leaving[one // per_node] += crossing
    place = max(candidates, key=lambda one: (_count(grid, one), crossings[one], leaving[one // per_node], -one))
    rivals = group.rivals * max(1, round(leaving[place // per_node] / crossings[place])) if crossings[place] else 1
    return Neighbours(place, per_node, Group(2, 2, 1, rivals))


def _faces(grid: tuple[int, ...], place: int) -> Iterator[int]:
    """Places that lie next to it in one dim."""
    at = coordinates(grid, place)
    for dim, way in product(range(len(grid)), (-1, 1)):
        if 0 <= at[dim] + way < grid[dim]:
            yield place + way * prod(grid[dim + 1 :])


def _count(grid: tuple[int, ...], place: int) -> int:
    return sum(1 for _ in _faces(grid, place))


def _crossings(grid: tuple[int, ...], place: int, per_node: int) -> int:
    """Neighbours on other nodes."""
    return sum(other // per_node != place // per_node for other in _faces(grid, place))
