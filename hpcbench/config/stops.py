"""Stop rules of a sweep: which parameters make a run larger, checked against what the sweep varies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpcbench.config.sweep import StopTable
from hpcbench.config.validate import Source
from hpcbench.errors import ConfigError, HpcbenchError, did_you_mean

Parameter = tuple[str, ...]

_NO_SIZE = frozenset({"seed", "time_limit_min"})
"""Numbers that make no run larger."""


@dataclass(frozen=True)
class StopRule:
    """Runs that are larger ``along`` these parameters are skipped once a smaller one has ended with a status."""

    statuses: list[str]
    along: tuple[Parameter, ...]


def stop_rules(
    table: StopTable, varied: Iterable[tuple[Parameter, object]], source: Source, problems: list[HpcbenchError]
) -> list[StopRule]:
    """The rules of ``[stop]``, one for each set of parameters.

    ``varied`` holds every value that the sweep's axes and includes give to a parameter.
    """
    numeric: dict[str, bool] = {}
    for parameter, value in varied:
        name = ".".join(parameter)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        numeric[name] = numeric.get(name, True) and is_number and name not in _NO_SIZE
    choices = [name for name, fits in numeric.items() if fits]
    statuses: dict[tuple[Parameter, ...], list[str]] = {}
    for status, given in table.model_dump(exclude_none=True).items():
        names = dict.fromkeys([given] if isinstance(given, str) else given)
        wrong = [name for name in names if name not in choices]
        problems += [
            ConfigError(
                f"stop.{status}: {name!r} {'has no size' if name in numeric else 'is not varied by this sweep'}",
                where=source.where(("stop", status)),
                hint=did_you_mean(name, choices),
            )
            for name in wrong
        ]
        if not wrong:
            statuses.setdefault(tuple(tuple(name.split(".", 1)) for name in names), []).append(status)
    return [StopRule(found, along) for along, found in statuses.items()]
