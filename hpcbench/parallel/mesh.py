"""The ranks as a grid with an axis per degree: who shares a layer, an image, a stage or a gradient with whom."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from hpcbench.config.spec import RunSpec

AXES = ("dp", "pp", "sp", "tp")
"""From the outermost axis to the innermost: ranks that differ in the last one alone are neighbours, on one node where
the group is no larger than it. What communicates most lies innermost; data parallelism crosses nodes."""


class Mesh(NamedTuple):
    """Degrees in the order of ``AXES``; ranks are numbered row by row.

    >>> mesh = Mesh(dp=2, tp=2)
    >>> mesh.group(2, "tp"), mesh.group(2, "dp")
    ([2, 3], [0, 2])
    """

    dp: int = 1
    pp: int = 1
    sp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, spec: RunSpec) -> Mesh:
        """The mesh of a run's devices."""
        return cls(spec.dp_degree, spec.pp_degree, spec.sp_degree, spec.tp_degree)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self)

    def coordinates(self, rank: int) -> Mesh:
        """Where ``rank`` stands on each axis."""
        places = []
        for degree in reversed(self):
            rank, place = divmod(rank, degree)
            places.append(place)
        assert rank == 0, "a rank beyond the mesh"
        return Mesh(*reversed(places))

    def rank(self, coordinates: Mesh) -> int:
        """The rank that stands there."""
        number = 0
        for degree, place in zip(self, coordinates, strict=True):
            number = number * degree + place
        return number

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from ``rank`` on ``axes`` alone, itself among them, in ascending order."""
        own = self.coordinates(rank)
        kept = [place if axis not in axes else None for axis, place in zip(AXES, own, strict=True)]
        return [
            other
            for other in range(self.size)
            if all(place in (None, at) for place, at in zip(kept, self.coordinates(other), strict=True))
        ]

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups along ``axes``: together they hold every rank once."""
        return [group for rank in range(self.size) if (group := self.group(rank, *axes))[0] == rank]
