"""Stop rules at run time: a run is skipped if a smaller run of its group has already ended with one of the rule's
statuses.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec

MAX_RUNS_CHECKED = 100
"""Smaller runs that one start looks at. Submit, which has listed all results, looks at every one."""


class StopGroup(msgspec.Struct):
    """One line of ``stop.jsonl``: runs that are equal but for their repeat and the parameters ``along``."""

    statuses: list[str]
    """A run that ended with one of these stops the larger ones."""
    along: list[str]
    runs: list[tuple[str, list[float]]]
    """``run_id``s and their values of ``along``."""


def read_stop_group(path: Path, line: int) -> StopGroup | None:
    """The group on ``line`` (from 0) of a ``stop.jsonl``; ``None`` where the file or the line is absent or broken."""
    try:
        with open(path, "rb") as file:
            text = next(itertools.islice(file, line, None), None)
        return None if text is None else msgspec.json.decode(text, type=StopGroup)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def find_stop_reason(group: StopGroup, run_id: str, status_of: Callable[[str], str | None]) -> str | None:
    """Why the run is not worth starting: a smaller one that ended so; ``None`` where there is none.

    ``status_of`` is asked for the ``MAX_RUNS_CHECKED`` nearest of the smaller runs: it may have to read a file for
    each.
    """
    own = next((values for key, values in group.runs if key == run_id), None)
    if own is None:
        return None
    smaller = [(key, values) for key, values in group.runs if is_smaller_run(values, own)]
    for key, values in heapq.nsmallest(MAX_RUNS_CHECKED, smaller, key=_distance_below(own, smaller)):
        status = status_of(key)
        if status in group.statuses:
            return format_stop_reason(group, key, values, status)
    return None


def _distance_below(
    own: list[float], smaller: list[tuple[str, list[float]]]
) -> Callable[[tuple[str, list[float]]], tuple[int, list[float]]]:
    """Return the number of values between a run and ``own`` over all parameters; ties have a fixed order."""
    columns = zip(own, *(values for _, values in smaller), strict=True)
    places = [{value: place for place, value in enumerate(sorted(set(column), reverse=True))} for column in columns]

    def steps(entry: tuple[str, list[float]]) -> tuple[int, list[float]]:
        return sum(place[value] for place, value in zip(places, entry[1], strict=True)), entry[1]

    return steps


def is_smaller_run(values: list[float], others: list[float]) -> bool:
    """Whether ``values`` are in no parameter larger than ``others``, and in one smaller."""
    return values != others and all(value <= other for value, other in zip(values, others, strict=True))


def format_stop_reason(group: StopGroup, run_id: str, values: list[float], status: str | None) -> str:
    """Return the text of a stopped run's reason."""
    named = ", ".join(
        f"{name} {int(value) if value == int(value) else value}"
        for name, value in zip(group.along, values, strict=True)
    )
    return f"run {run_id} with {named} ended as {status}"
