"""Order of the runs of a submission, so that the time of day is not confounded with the configuration.

In the order ``grid`` the runs of one shape are one array, as the sweep lists them. In the order ``shuffled`` a shape's
array is shuffled, and arrays are cut into slices that alternate; the launches of a configuration are spread:

    one shape     [ launch 1 of every configuration | launch 2 of every configuration | ... ]   each part shuffled
    two shapes    a0 b0 a1 b1 a2 b2 ...                                                         slices of both arrays
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.results.stop_rules import StopGroup

MAX_SLICES = 8
"""Slices of the array of one shape: each costs a call of the scheduler."""

_Shape = TypeVar("_Shape")


def order_seed(run_ids: Iterable[str]) -> int:
    """The seed of a sweep without one: a hash of its sorted ``run_ids``, so that render shows what submit sends."""
    return int.from_bytes(hashlib.sha256("".join(sorted(run_ids)).encode()).digest()[:4], "big")


def shuffle_runs(
    run_ids: Sequence[str], specs: Mapping[str, RunSpec], stops: Sequence[StopGroup], seed: int
) -> list[str]:
    """``run_ids`` of one shape in the order ``shuffled``.

    The n-th launches of all configurations come before the next launches of any; each of these parts is shuffled.
    Within a part, runs that a stop rule compares are ascending, after those that none compares: a small run that ends
    badly spares the larger ones.
    The place of a run within its part depends on the seed and its id alone, not on which other runs are sent.

    Args:
        run_ids: in the order of the sweep, in which the launches of a configuration ascend.
        specs: of every run.
        stops: the groups of runs that a stop rule compares.
    """
    parts: list[list[str]] = []
    launches: dict[str, int] = {}
    for run_id in run_ids:
        configuration = config_id(specs[run_id])
        launch = launches[configuration] = launches.get(configuration, -1) + 1
        if launch == len(parts):
            parts.append([])
        parts[launch].append(run_id)
    sizes = _sizes(stops)

    def place(run_id: str) -> tuple[float, bytes]:
        return sizes.get(run_id, 0.0), hashlib.sha256(f"{seed} {run_id}".encode()).digest()

    return [run_id for part in parts for run_id in sorted(part, key=place)]


def _sizes(stops: Sequence[StopGroup]) -> dict[str, float]:
    """A number for each compared run that is larger for every larger run: the sum of its compared parameters."""
    values: dict[str, dict[str, float]] = {}
    for group in stops:
        for run_id, parameters in group.runs:
            values.setdefault(run_id, {}).update(zip(group.along, parameters, strict=True))
    return {run_id: sum(parameters.values()) for run_id, parameters in values.items()}


def interleave(
    groups: Mapping[_Shape, Sequence[str]], pack_of: Callable[[_Shape], int], *, slices: int
) -> list[tuple[_Shape, list[str]]]:
    """The runs of each shape in at most ``slices`` arrays, arrays of all shapes alternating.

    Args:
        groups: ordered ``run_id``s by shape.
        pack_of: runs of one job of a shape; a job is in one array.
    """
    if slices == 1 or len(groups) == 1:
        return [(shape, list(run_ids)) for shape, run_ids in groups.items()]
    ordered: list[tuple[float, int, _Shape, list[str]]] = []
    for number, (shape, run_ids) in enumerate(groups.items()):
        pack = pack_of(shape)
        jobs = -(-len(run_ids) // pack)
        count = min(slices, jobs)
        bounds = [jobs * index // count * pack for index in range(count)] + [len(run_ids)]
        for index in range(count):
            part = list(run_ids[bounds[index] : bounds[index + 1]])
            ordered.append(((index + 0.5) / count, number, shape, part))
    return [(shape, part) for _, _, shape, part in sorted(ordered, key=lambda entry: entry[:2])]
