"""The ranks as a grid with one axis per degree of parallelism, and the ranges of samples that each replica takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec

MESH_AXES = ("dp", "pp", "sp", "tp")
"""The axes from the outermost to the innermost: ranks that differ in the last one alone are neighbours, on one node if
the group is no larger than it. The axes with most communication are innermost; data parallelism crosses nodes."""


class RankMesh(NamedTuple):
    """Degrees in the order of ``MESH_AXES``; ranks are numbered row by row.

    >>> mesh = RankMesh(dp=2, tp=2)
    >>> mesh.group(2, "tp"), mesh.group(2, "dp")
    ([2, 3], [0, 2])
    """

    dp: int = 1
    pp: int = 1
    sp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, spec: RunSpec) -> RankMesh:
        """The mesh of a run's devices."""
        return cls(spec.dp_degree, spec.pp_degree, spec.sp_degree, spec.tp_degree)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self)

    def coordinates(self, rank: int) -> RankMesh:
        """Return the index of ``rank`` on each axis."""
        return RankMesh(*grid_coordinates(self, rank))

    def rank(self, coordinates: RankMesh) -> int:
        """Return the rank at ``coordinates``."""
        return grid_rank(self, coordinates)

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from ``rank`` on ``axes`` alone, itself among them, in ascending order."""
        fixed = [index for index, axis in enumerate(MESH_AXES) if axis not in axes]
        position = self.coordinates(rank)
        return [other for other in range(self.size) if all(position[at] == self.coordinates(other)[at] for at in fixed)]

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups along ``axes``; each rank is in one of them."""
        return [group for rank in range(self.size) if (group := self.group(rank, *axes))[0] == rank]


def grid_coordinates(grid: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the coordinates of ``rank`` in a grid whose ranks are numbered row by row."""
    coordinates = []
    for parts in reversed(grid):
        rank, index = divmod(rank, parts)
        coordinates.append(index)
    assert rank == 0, "a rank beyond the grid"
    return tuple(reversed(coordinates))


def grid_rank(grid: Sequence[int], coordinates: Sequence[int]) -> int:
    """Return the rank at ``coordinates``."""
    rank = 0
    for parts, index in zip(grid, coordinates, strict=True):
        rank = rank * parts + index
    return rank


MIN_SAMPLES_PER_REPLICA = 2
"""BatchNorm needs two values per channel, and a share of one sample can leave it a single one."""


def even_ranges(total: int, parts: int) -> list[range]:
    """Divide ``total`` positions into ``parts`` ranges; the first ``total % parts`` have one more.

    >>> even_ranges(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    small, extra = divmod(total, parts)
    return [range(part * small + min(part, extra), (part + 1) * small + min(part + 1, extra)) for part in range(parts)]


def steps_per_epoch(samples: int, global_batch_size: int, replicas: int, drop_last: bool = False) -> int:
    """Steps that one pass over ``samples`` takes.

    The last batch may be partial; it is left out with ``drop_last``, and where it would give a replica fewer than
    ``MIN_SAMPLES_PER_REPLICA`` samples. An epoch has one step even where the whole data set is smaller than that.
    """
    whole, rest = divmod(samples, global_batch_size)
    return max(1, whole + (not drop_last and rest >= MIN_SAMPLES_PER_REPLICA * replicas))


def dropped_samples(samples: int, global_batch_size: int, replicas: int, drop_last: bool = False) -> int:
    """Samples of an epoch that no step takes, see ``steps_per_epoch``."""
    rest = samples % global_batch_size
    return rest if samples > global_batch_size and (drop_last or rest < MIN_SAMPLES_PER_REPLICA * replicas) else 0


def micro_batch_ranges(count: int, smallest: int, batch_size: int, micro_batches: int) -> list[range]:
    """Return the micro-batches of a replica's ``count`` samples of one step.

    Whole batches are cut as configured; partial ones into as many parts as leave each ``MIN_SAMPLES_PER_REPLICA``
    samples.
    ``smallest`` is the share of the replica with the fewest: all are cut into as many parts, because sharded
    strategies communicate in each, and a rank with one more would wait in it for ever.
    """
    parts = micro_batches if smallest >= batch_size else max(1, min(micro_batches, smallest // MIN_SAMPLES_PER_REPLICA))
    return even_ranges(count, parts)
