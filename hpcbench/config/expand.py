"""From a sweep to points: the product of its axes, times its repeats. Points are plain dictionaries."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from hpcbench.config.load import Sweep


def expand(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """The points of a sweep: the last axis of the file moves fastest, repeats fastest of all."""
    for values in itertools.product(*sweep.grid.values()):
        point = copy.deepcopy(sweep.fixed)
        for axis, value in zip(sweep.grid, values, strict=True):
            table = point
            for key in axis[:-1]:
                table = table.setdefault(key, {})
            table[axis[-1]] = value
        for repeat in range(sweep.repeats):
            yield {**point, "repeat": repeat}


def count_points(sweep: Sweep) -> int:
    """How many points ``expand`` gives."""
    total = sweep.repeats
    for values in sweep.grid.values():
        total *= len(values)
    return total
