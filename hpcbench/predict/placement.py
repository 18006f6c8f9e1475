"""Placement of process groups on nodes, and of the ranks of a halo exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.mesh import MESH_AXES, RankMesh, grid_coordinates


class GroupPlacement(NamedTuple):
    """Ranks that take part in one collective, as far as time depends on them."""

    ranks: int
    nodes: int
    ranks_per_node: int
    """The largest number on one node."""
    rivals: int
    """Groups like this one that use a node's way out at the same time, itself among them."""


def place_group(spec: RunSpec, *axes: str) -> GroupPlacement:
    """The group along ``axes`` of the mesh, of any rank: they are equal.

    Nodes are filled one after the other, ``tasks_per_node`` ranks each.
    """
    steps, stride = [], 1
    for axis, degree in zip(reversed(MESH_AXES), reversed(RankMesh.of(spec)), strict=True):
        if axis in axes:
            steps.append((degree, stride))
        stride *= degree
    return _place_strided(spec, steps)


def place_subgroups(spec: RunSpec, axis: str, inner: int) -> tuple[GroupPlacement, GroupPlacement]:
    """Return a part of ``inner`` neighbours of ``axis``, and the group of equal positions across such parts."""
    mesh = RankMesh.of(spec)
    place = MESH_AXES.index(axis)
    stride = prod(mesh[place + 1 :])
    return _place_strided(spec, [(inner, stride)]), _place_strided(spec, [(mesh[place] // inner, stride * inner)])


def _place_strided(spec: RunSpec, steps: list[tuple[int, int]]) -> GroupPlacement:
    """The group whose ranks are sums of so many multiples of each stride."""
    here = spec.tasks_per_node * spec.devices_per_task
    members, ranks = [0], 1
    for degree, stride in steps:
        ranks *= degree
        places = range(min(degree, ceil(here / stride)))
        members = [rank + place * stride for place in places for rank in members if rank + place * stride < here]
    per_node = len(members)
    nodes = ceil(ranks / per_node)
    return GroupPlacement(ranks, nodes, per_node, rivals=max(here // per_node, 1) if nodes > 1 else 1)


def place_neighbour_pair(spec: RunSpec, axis: str, is_far: bool | None = None) -> GroupPlacement:
    """Two neighbours along ``axis``, on one node or on two.

    Without ``pairs``, the pairs that are furthest apart: the slowest ones.
    """
    whole = place_group(spec, axis)
    if is_far is None:
        is_far = whole.nodes > 1
    if not is_far:
        return GroupPlacement(2, 1, 2, 1)
    # Every rank of a node whose neighbour lies elsewhere sends at the same time.
    return GroupPlacement(2, 2, 1, rivals=whole.rivals)


def are_on_one_node(spec: RunSpec, axis: str, left: int, right: int) -> bool:
    """Whether the ranks at two places on ``axis`` have a node in common, in every replica of the run."""
    mesh = RankMesh.of(spec)
    place = MESH_AXES.index(axis)
    stride = prod(mesh[place + 1 :])
    here = spec.tasks_per_node * spec.devices_per_task
    # Where groups do not fill nodes evenly, each begins elsewhere on its node; after as many as fit they come round.
    firsts = {
        outer * stride * mesh[place] + inner
        for outer in range(min(prod(mesh[:place]), here))
        for inner in {0, stride - 1}
    }
    return all((first + left * stride) // here == (first + right * stride) // here for first in firsts)


SAME_NODE_PAIR = GroupPlacement(2, 1, 2, 1)


class HaloPlacement(NamedTuple):
    """A place in a grid of ranks."""

    place: int
    ranks_per_node: int
    across: GroupPlacement
    """It and a rank of another node."""

    def group_with(self, other: int) -> GroupPlacement:
        """It and the rank at ``other``."""
        return self.across if other // self.ranks_per_node != self.place // self.ranks_per_node else SAME_NODE_PAIR


@lru_cache(maxsize=1024)
def halo_placement(grid: tuple[int, ...], group: GroupPlacement) -> HaloPlacement:
    """Return the inner rank with most neighbours, and among those with most on other nodes.

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
    neighbours = {index: list(_adjacent_places(grid, index)) for index in candidates}
    crossings = {
        index: sum(other // per_node != index // per_node for other in others) for index, others in neighbours.items()
    }
    leaving: Counter[int] = Counter()
    for index, crossing in crossings.items():
        leaving[index // per_node] += crossing
    place = max(
        candidates, key=lambda index: (len(neighbours[index]), crossings[index], leaving[index // per_node], -index)
    )
    rivals = group.rivals * max(1, round(leaving[place // per_node] / crossings[place])) if crossings[place] else 1
    return HaloPlacement(place, per_node, GroupPlacement(2, 2, 1, rivals))


def _adjacent_places(grid: tuple[int, ...], place: int) -> Iterator[int]:
    """Places that lie next to it in one dim."""
    at = grid_coordinates(grid, place)
    for dim, way in product(range(len(grid)), (-1, 1)):
        if 0 <= at[dim] + way < grid[dim]:
            yield place + way * prod(grid[dim + 1 :])
