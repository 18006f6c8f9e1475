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
from torch.utils._python_dispatch import _disable_current_modes

from hpcbench.strategies.mesh import MESH_AXES, RankMesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import HashStore, PrefixStore, Store, TCPStore

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "clone_connection", "to_timedelta"]


def to_timedelta(value: float) -> datetime.timedelta:
    """Return a time limit in the form that stores take."""
    return datetime.timedelta(seconds=max(value, 0.001))


def clone_connection(store: TCPStore) -> TCPStore:
    """Return another connection to the same store: a call that waits blocks all other calls on its connection."""
    return TCPStore(store.host, store.port, None, False, to_timedelta(300), wait_for_workers=False)


@dataclass(frozen=True)
class RankContext:
    """A rank, its device and the group of all ranks: the argument of ``Strategy.setup``.

    Ranks of a run are numbered 0 to ``world_size - 1``, those of a node after each other.

    Example::

        context = RankContext(0, 1, torch.device("cpu"))  # a rank alone, without a process group
    """

    rank: int
    """Number of this rank in ``group``."""
    world_size: int
    """Number of ranks of ``group``."""
    device: torch.device
    """The device of this rank's tensors."""
    group: dist.ProcessGroup | None = None
    """The group of all ranks; ``None``: the default group, or none if there is one rank."""
    wait_s: float = 300.0
    """Seconds that a rank waits for the other ranks before the run fails."""
    shares_device: bool = False
    """Whether several ranks, or several devices of one rank, may be the same device."""

    def members(self) -> dist.ProcessGroup:
        """Return the process group of all ranks, for libraries that need it as an argument.

        It is an error to call it before a process group exists (``AssertionError``).
        """
        group = self.group or dist.group.WORLD
        assert group is not None, "a strategy with a degree of its own has a process group"
        return group


class RankGroup(NamedTuple):
    """This rank's group along one axis of the mesh, or along several: the argument of collectives.

    Example::

        group = make_group(mesh, context, "tp")
        dist.all_reduce(x, group=group.members())  # if group.size > 1
    """

    ranks: tuple[int, ...]
    """Ranks of the run, ascending."""
    place: int
    """Index of this rank in ``ranks``, 0 to ``size - 1``."""
    process_group: dist.ProcessGroup | None
    """``None`` where the rank is alone."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def members(self) -> dist.ProcessGroup:
        """Return the process group; an error (``AssertionError``) for a group of one rank, which has none."""
        assert self.process_group is not None, "a single rank has no other rank to talk to"
        return self.process_group


def make_group(mesh: RankMesh, context: RankContext, *axes: str, purpose: str = "") -> RankGroup:
    """Return the group of ``context.rank`` along ``axes``.

    All ranks of the run make the same calls in the same order. A process keeps its process groups for equal calls.

    Args:
        mesh: the ranks of the run by their coordinates; its size is ``context.world_size``.
        context: this rank.
        axes: axes of ``MESH_AXES``; the group has the ranks that differ from this one in no other axis.
        purpose: a name; with it the group has its own process group and communicators.
    """
    assert mesh.size == context.world_size, f"{mesh} of {context.world_size} ranks"
    return make_group_of_ranks(mesh.group(context.rank, *axes), context, purpose)


def make_group_of_ranks(ranks: Iterable[int], context: RankContext, purpose: str = "") -> RankGroup:
    """Return the group of ``ranks`` of the run, one of which is ``context.rank``.

    Each of ``ranks`` calls it, no other rank. ``purpose`` as in ``make_group``.
    """
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
    # torch exchanges tensors to make a group: real ones, also where a dry run makes all others fake.
    with _disable_current_modes(), _fixed_group_name(f"{purpose}({','.join(map(str, global_ranks))})"):
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
