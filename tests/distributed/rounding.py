"""Which tensors of a training are farther from one device than its own rounding explains."""

from __future__ import annotations

from typing import NamedTuple

from hpcbench.worker.verification.reference import TrainingRecord
from hpcbench.worker.verification.rounding import Distances, distances


class Excess(NamedTuple):
    """A tensor that is farther from one device than rounding explains."""

    kind: str
    name: str
    distance: float
    bound: float


def excesses(ours: TrainingRecord, reference: TrainingRecord, allowed: Distances) -> list[Excess]:
    """Kind by kind, the largest excess over its bound first.

    With the first update a mistake spreads to all tensors; the gradients before it show where it began.
    """
    found = [Excess(*key, value, allowed[key]) for key, value in distances(ours, reference).items()]
    too_far = [one for one in found if not one.distance <= one.bound]
    order = ["loss", "first gradient", "last gradient", "weight"]
    return sorted(too_far, key=lambda one: (order.index(one.kind), -one.distance / one.bound))
