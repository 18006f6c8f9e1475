"""Where a group's ranks lie: how many on a node, how many nodes, and who shares the way between nodes with them."""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.mesh import AXES, Mesh


class Group(NamedTuple):
    """Ranks that take part in one collective, as far as time depends on them."""

    ranks: int
    nodes: int
    ranks_per_node: int
    """On the fullest node."""
    rivals: int
    """Groups like this one that use a node's way out at the same time, itself among them."""


def group_of(spec: RunSpec, *axes: str) -> Group:
    """The group along ``axes`` of the mesh, of any rank: they are alike.

    Nodes are filled one after the other, ``tasks_per_node`` ranks each.
    """
    steps, stride = [], 1
    for axis, degree in zip(reversed(AXES), reversed(Mesh.of(spec)), strict=True):
        if axis in axes:
            steps.append((degree, stride))
        stride *= degree
    return _lying(spec, steps)


def parts_of(spec: RunSpec, axis: str, inner: int) -> tuple[Group, Group]:
    """``axis`` cut into neighbours, ``inner`` at a time: such a part, and the group of those alike across parts."""
    mesh = Mesh.of(spec)
    place = AXES.index(axis)
    stride = prod(mesh[place + 1 :])
    return _lying(spec, [(inner, stride)]), _lying(spec, [(mesh[place] // inner, stride * inner)])


def _lying(spec: RunSpec, steps: list[tuple[int, int]]) -> Group:
    """The group whose ranks are sums of so many multiples of each stride."""
    here = spec.tasks_per_node * spec.devices_per_task
    own, ranks = [0], 1
    for degree, stride in steps:
        ranks *= degree
        places = range(min(degree, ceil(here / stride)))
        own = [rank + place * stride for place in places for rank in own if rank + place * stride < here]
    per_node = len(own)
    nodes = ceil(ranks / per_node)
    return Group(ranks, nodes, per_node, rivals=max(here // per_node, 1) if nodes > 1 else 1)


def pair_of(spec: RunSpec, axis: str, is_far: bool | None = None) -> Group:
    """Two neighbours along ``axis``, on one node or on two.

    Where nobody says which: of all such pairs those that are furthest apart, who set the pace.
    """
    whole = group_of(spec, axis)
    if is_far is None:
        is_far = whole.nodes > 1
    if not is_far:
        return Group(2, 1, 2, 1)
    # Every rank of a node whose neighbour lies elsewhere sends at the same time.
    return Group(2, 2, 1, rivals=whole.rivals)


def is_within_node(spec: RunSpec, axis: str, left: int, right: int) -> bool:
    """Whether the ranks at two places on ``axis`` have a node in common, in every replica of the run."""
    mesh = Mesh.of(spec)
    place = AXES.index(axis)
    stride = prod(mesh[place + 1 :])
    here = spec.tasks_per_node * spec.devices_per_task
    # Where groups do not fill nodes evenly, each begins elsewhere on its node; after as many as fit they come round.
    firsts = {
        outer * stride * mesh[place] + inner
        for outer in range(min(prod(mesh[:place]), here))
        for inner in {0, stride - 1}
    }
    return all((first + left * stride) // here == (first + right * stride) // here for first in firsts)
