"""Stop rules: a run is not worth starting where a smaller one of its group has ended badly already."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec


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


def stopped_by(group: StopGroup, run_id: str, status_of: Callable[[str], str | None]) -> str | None:
    """Why the run is not worth starting: a smaller one that ended so; ``None`` where there is none.

    ``status_of`` is asked for smaller runs only, and for none before those that lie between it and this run.
    """
    own = next((values for key, values in group.runs if key == run_id), None)
    if own is None:
        return None
    smaller = [(values, key) for key, values in group.runs if is_smaller(values, own)]
    for values, key in sorted(smaller, reverse=True):
        status = status_of(key)
        if status in group.statuses:
            return reason(group, key, values, status)
    return None


def is_smaller(values: list[float], others: list[float]) -> bool:
    """Whether ``values`` are in no parameter larger than ``others``, and in one smaller."""
    return values != others and all(one <= other for one, other in zip(values, others, strict=True))


def reason(group: StopGroup, run_id: str, values: list[float], status: str | None) -> str:
    """What a person reads of a run that was stopped."""
    named = ", ".join(
        f"{name} {int(value) if value == int(value) else value}"
        for name, value in zip(group.along, values, strict=True)
    )
    return f"run {run_id} with {named} ended as {status}"
