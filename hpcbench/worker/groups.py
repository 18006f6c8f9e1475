"""Process groups along the axes of a run's mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcbench.parallel.mesh import AXES, Mesh
from hpcbench.worker.stores import seconds
from hpcbench.worker.strategies.base import Place


class Group(NamedTuple):
    """This rank's group along one axis, or along several."""

    ranks: tuple[int, ...]
    """Ranks of the run, ascending."""
    place: int
    """Of this rank within them."""
    process_group: dist.ProcessGroup | None
    """``None`` where the rank is alone."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def members(self) -> dist.ProcessGroup:
        """The process group of a group that is known to have several ranks."""
        assert self.process_group is not None, "a rank alone has nobody to talk to"
        return self.process_group

    def global_rank(self, place: int) -> int:
        """What torch's point-to-point calls name the member at ``place``."""
        return dist.get_global_rank(self.members(), place)


def make_group(mesh: Mesh, place: Place, *axes: str, purpose: str = "") -> Group:
    """The group of ``place`` along ``axes``. All ranks of the run make the same calls in the same order.

    A ``purpose`` asks for a group of its own, with communicators of its own, beside that of the same ranks without.
    """
    assert mesh.size == place.world_size, f"{mesh} of {place.world_size} ranks"
    ranks = tuple(mesh.group(place.rank, *axes))
    return Group(ranks, ranks.index(place.rank), _process_group(ranks, place, purpose))


def make_group_of(ranks: Iterable[int], place: Place, purpose: str = "") -> Group:
    """The group of just those ``ranks`` of the run, ``place`` among them; each of them calls it."""
    chosen = tuple(sorted(ranks))
    return Group(chosen, chosen.index(place.rank), _process_group(chosen, place, purpose))


def make_groups(mesh: Mesh, place: Place) -> dict[str, Group]:
    """One group for each of ``AXES``."""
    return {axis: make_group(mesh, place, axis) for axis in AXES}


def _process_group(ranks: tuple[int, ...], place: Place, purpose: str = "") -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    whole = place.members()
    if len(ranks) == place.world_size and not purpose:
        return whole
    of_whole = dist.get_process_group_ranks(whole)
    return _made(tuple(of_whole[rank] for rank in ranks), place.wait_s, purpose)


@cache
def _made(global_ranks: tuple[int, ...], wait_s: float, purpose: str) -> dist.ProcessGroup:
    """Once per process: ``verify`` asks for the groups of the measured run again, and each keeps threads."""
    with _named(f"{purpose}({','.join(map(str, global_ranks))})"):
        group: dist.ProcessGroup = dist.new_group(
            list(global_ranks), timeout=seconds(wait_s), use_local_synchronization=True
        )
    return group


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Groups made in here are called ``name``.

    torch counts the groups that a process is in already into the name of a group that is made by its members alone:
    members that are in different numbers of others would wait for each other under different names.
    """
    names: Any = distributed_c10d
    original = names._process_group_name
    names._process_group_name = lambda _ranks, use_hashed_name: name  # noqa: ARG005 - torch's own signature
    try:
        yield
    finally:
        names._process_group_name = original


def forget_groups() -> None:
    """After the default process group was destroyed, and all others with it."""
    _made.cache_clear()
