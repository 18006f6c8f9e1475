"""Order of the runs of a submission, so that the time of day is not confounded with the configuration.

In the order ``grid`` the runs of one shape are one array, as the sweep lists them. In the order ``shuffled`` a shape's
array is shuffled, and arrays are cut into slices that alternate; the launches of a configuration are spread:

    one shape     [ launch 1 of every configuration | launch 2 of every configuration | ... ]   each part shuffled
    two shapes    a0 b0 a1 b1 a2 b2 ...                                                         slices of both arrays

Reference runs are put between the others at equal distances.
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
    Within a part, runs that a stop rule compares are ascending: a small run that ends badly spares the larger ones.
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
    return [
        run_id for part in parts for run_id in _ascend(sorted(part, key=lambda key: _place(seed, key)), stops, sizes)
    ]


def _place(seed: int, run_id: str) -> bytes:
    return hashlib.sha256(f"{seed} {run_id}".encode()).digest()


def _sizes(stops: Sequence[StopGroup]) -> dict[str, float]:
    """A number for each compared run that is larger for every larger run: the sum of its compared parameters."""
    values: dict[str, dict[str, float]] = {}
    for group in stops:
        for run_id, parameters in group.runs:
            values.setdefault(run_id, {}).update(zip(group.along, parameters, strict=True))
    return {run_id: sum(parameters.values()) for run_id, parameters in values.items()}


def _ascend(run_ids: list[str], stops: Sequence[StopGroup], sizes: Mapping[str, float]) -> list[str]:
    """``run_ids`` with the compared runs ascending in the places that they have together."""
    here = set(run_ids)
    owner = {run_id: run_id for run_id in run_ids if run_id in sizes}

    def root(run_id: str) -> str:
        while owner[run_id] != run_id:
            owner[run_id] = run_id = owner[owner[run_id]]
        return run_id

    for group in stops:
        members = [run_id for run_id, _ in group.runs if run_id in here]
        for member in members[1:]:
            owner[root(member)] = root(members[0])
    together: dict[str, list[int]] = {}
    for position, run_id in enumerate(run_ids):
        if run_id in owner:
            together.setdefault(root(run_id), []).append(position)
    ordered = list(run_ids)
    for positions in together.values():
        members = sorted((run_ids[position] for position in positions), key=sizes.__getitem__)
        for position, run_id in zip(positions, members, strict=True):
            ordered[position] = run_id
    return ordered


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


def insert_references(
    arrays: Sequence[tuple[_Shape, list[str]]], shape: _Shape, references: Sequence[str]
) -> list[tuple[_Shape, list[str]]]:
    """``arrays`` with the reference runs at equal distances, the first at the start and the last at the end.

    They go into the nearest array of their shape; if one is too far away, they all go into arrays of their own.

    Args:
        arrays: as ``interleave`` returns them.
        shape: of the reference runs.
        references: their ``run_id``s in order.
    """
    total = sum(len(run_ids) for _, run_ids in arrays)
    places = [round(index * total / max(1, len(references) - 1)) for index in range(len(references))]
    starts = [sum(len(run_ids) for _, run_ids in arrays[:number]) for number in range(len(arrays))]
    equal = [number for number, (other, _) in enumerate(arrays) if other == shape]
    if not equal:
        return _insert_arrays(arrays, shape, references)
    inserted: dict[int, list[tuple[int, str]]] = {}
    for place, run_id in zip(places, references, strict=True):
        distances = {
            number: max(starts[number] - place, place - starts[number] - len(arrays[number][1]), 0) for number in equal
        }
        nearest = min(equal, key=distances.__getitem__)
        if distances[nearest] * len(references) > total:
            return _insert_arrays(arrays, shape, references)
        offset = min(max(place - starts[nearest], 0), len(arrays[nearest][1]))
        inserted.setdefault(nearest, []).append((offset, run_id))
    merged = []
    for number, (other, run_ids) in enumerate(arrays):
        with_references = list(run_ids)
        for offset, run_id in reversed(inserted.get(number, [])):
            with_references.insert(offset, run_id)
        merged.append((other, with_references))
    return merged


def _insert_arrays(
    arrays: Sequence[tuple[_Shape, list[str]]], shape: _Shape, references: Sequence[str]
) -> list[tuple[_Shape, list[str]]]:
    """``arrays`` cut at equal distances, with an array of reference runs at each cut; at most ``MAX_SLICES`` cuts."""
    total, count = sum(len(run_ids) for _, run_ids in arrays), min(MAX_SLICES, len(references))
    cuts = [round(index * total / max(1, count - 1)) for index in range(count)]
    bounds = [len(references) * index // count for index in range(count + 1)]
    parts = [list(references[bounds[index] : bounds[index + 1]]) for index in range(count)]
    merged: list[tuple[_Shape, list[str]]] = []
    start = 0
    for other, run_ids in arrays:
        rest = list(run_ids)
        while parts and cuts[0] < start + len(rest):
            before, rest = rest[: cuts[0] - start], rest[cuts[0] - start :]
            start = cuts.pop(0)
            merged += [(other, before)] if before else []
            merged.append((shape, parts.pop(0)))
        merged.append((other, rest))
        start += len(rest)
    return [*merged, *((shape, part) for part in parts)]
