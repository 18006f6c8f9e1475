"""Key-value stores and process groups along the axes of a run's mesh."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcbench.parallel.mesh import MESH_AXES, RankMesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import HashStore, PrefixStore, Store, TCPStore

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "clone_connection", "to_timedelta"]


def to_timedelta(value: float) -> datetime.timedelta:
    """Return a time limit in the form that stores take."""
    return datetime.timedelta(seconds=max(value, 0.001))


def clone_connection(store: TCPStore) -> TCPStore:
    """A connection of its own to the same store: one that waits in a call blocks every other caller."""
    return TCPStore(store.host, store.port, None, False, to_timedelta(300), wait_for_workers=False)


@dataclass(frozen=True)
class RankContext:
    """A rank of ``group`` (the default group if ``None``) and its device: the place at which a strategy runs."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    wait_s: float = 300.0
    """Seconds that a rank waits for the other ranks before the run fails."""

    def members(self) -> dist.ProcessGroup:
        """The group itself, for libraries that want one named."""
        group = self.group or dist.group.WORLD
        assert group is not None, "a strategy with a degree of its own has a process group"
        return group


class RankGroup(NamedTuple):
    """This rank's group along one axis, or along several."""

    ranks: tuple[int, ...]
    """Ranks of the run, ascending."""
    place: int
    """Place of this rank among ``ranks``."""
    process_group: dist.ProcessGroup | None
    """``None`` where the rank is alone."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def members(self) -> dist.ProcessGroup:
        """The process group of a group that is known to have several ranks."""
        assert self.process_group is not None, "a single rank has no other rank to talk to"
        return self.process_group

    def global_rank(self, place: int) -> int:
        """Return the rank by which torch's point-to-point calls name the member at ``place``."""
        return dist.get_global_rank(self.members(), place)


def make_group(mesh: RankMesh, context: RankContext, *axes: str, purpose: str = "") -> RankGroup:
    """The group of ``context`` along ``axes``. All ranks of the run make the same calls in the same order.

    A ``purpose`` asks for a group of its own, with communicators of its own, beside that of the same ranks without.
    """
    assert mesh.size == context.world_size, f"{mesh} of {context.world_size} ranks"
    return make_group_of_ranks(mesh.group(context.rank, *axes), context, purpose)


def make_group_of_ranks(ranks: Iterable[int], context: RankContext, purpose: str = "") -> RankGroup:
    """The group of just those ``ranks`` of the run, ``context`` among them; each of them calls it."""
    chosen = tuple(sorted(ranks))
    process_group = None
    if len(chosen) > 1:
        process_group = context.members()
        if len(chosen) < context.world_size or purpose:
            global_ranks = dist.get_process_group_ranks(process_group)
            process_group = _new_process_group(tuple(global_ranks[rank] for rank in chosen), context.wait_s, purpose)
    return RankGroup(chosen, chosen.index(context.rank), process_group)


def make_axis_groups(mesh: RankMesh, context: RankContext) -> dict[str, RankGroup]:
    """Return one group for each of ``MESH_AXES``, by axis. Collective: every rank of the run calls it."""
    return {axis: make_group(mesh, context, axis) for axis in MESH_AXES}


@cache
def _new_process_group(global_ranks: tuple[int, ...], wait_s: float, purpose: str) -> dist.ProcessGroup:
    """Once per process: ``verify`` asks for the groups of the measured run again, and each keeps threads."""
    with _fixed_group_name(f"{purpose}({','.join(map(str, global_ranks))})"):
        group: dist.ProcessGroup = dist.new_group(
            list(global_ranks), timeout=to_timedelta(wait_s), use_local_synchronization=True
        )
    return group


@contextmanager
def _fixed_group_name(name: str) -> Iterator[None]:
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


def clear_group_cache() -> None:
    """Forget all groups. Call it after the default process group was destroyed, which destroys them."""
    _new_process_group.cache_clear()
