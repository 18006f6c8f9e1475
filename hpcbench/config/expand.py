"""From a sweep to points: the product of its axes, its includes, without its excludes, times its repeats."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hpcbench.config.load import Exclusion, Parameter, Settings, Sweep
from hpcbench.config.spec import DEFAULTS, DEGREES, RunSpec
from hpcbench.config.sweep import NESTED
from hpcbench.errors import ConfigError

Point = dict[str, Any]
"""Parameters by name; those of tables in dictionaries of their own."""


@dataclass(frozen=True)
class Excluded:
    """A point that a rule of the sweep leaves out."""

    point: Point
    rule: str


def expand(sweep: Sweep) -> Iterator[Point | Excluded]:
    """The points of a sweep: the last axis moves fastest, includes follow the product, repeats are fastest of all.

    A sweep without axes is its includes, or else the one point of its fixed parameters. Points share the tables that
    they have in common; nobody may change them in place.
    """
    fixed = _nested(sweep.fixed)
    axes = [[_nested(step) for step in axis.steps] for axis in sweep.axes]
    steps_of_product = itertools.product(*axes) if sweep.has_product else ()
    product = (_joined(fixed, steps) for steps in steps_of_product)
    includes = (_joined(fixed, [_nested(include)]) for include in sweep.includes)
    for point in itertools.chain(product, includes):
        _derive(sweep, point)
        rule = excluded_by(sweep, point)
        for repeat in range(sweep.repeats):
            numbered = {**point, "repeat": repeat}
            yield numbered if rule is None else Excluded(numbered, rule)


def count_points(sweep: Sweep) -> int:
    """How many points ``expand`` gives, those that are excluded among them."""
    product = int(sweep.has_product)
    for axis in sweep.axes:
        product *= len(axis.steps)
    return (product + len(sweep.includes)) * sweep.repeats


def _nested(settings: Settings) -> Point:
    point: Point = {}
    for parameter, value in settings.items():
        _set(point, parameter, value)
    return point


def _set(point: Point, parameter: Parameter, value: Any) -> None:
    """Set one parameter; a table that is there already is replaced, since other points may share it."""
    name = parameter[0]
    point[name] = value if len(parameter) == 1 else {**point.get(name, {}), parameter[1]: value}


def _joined(fixed: Point, steps: Iterable[Point]) -> Point:
    point = dict(fixed)
    for step in steps:
        for name, value in step.items():
            point[name] = {**point.get(name, {}), **value} if name in NESTED else value
    return point


def _derive(sweep: Sweep, point: Point) -> None:
    """In the order of the file, so that one may use another that stands above it. An include's own value wins.

    What is ``None`` is left open: an option that only some strategies have, a degree that follows from the others.
    """
    for parameter, expression in sweep.derived.items():
        if parameter[-1] not in (point if len(parameter) == 1 else point.get(parameter[0], ())):
            value = expression(names(point))
            if value is not None:
                _set(point, parameter, _fitting(parameter, value, expression.where))


def _fitting(parameter: Parameter, value: Any, where: str | None) -> Any:
    """``value`` as the parameter's type wants it: a whole float is an integer where one is needed."""
    name = parameter[0]
    if len(parameter) > 1:
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        if name == "global_batch_size":
            return msgspec.convert(value, int)
        return msgspec.convert(value, _TYPES[name])
    except msgspec.ValidationError as error:
        raise ConfigError(f"derive: {name} = {value!r} does not fit: {error}", where=where) from error


_TYPES = {one.name: one.type for one in msgspec.structs.fields(RunSpec)}
_OPEN = {**DEFAULTS, **dict.fromkeys(DEGREES)}


def excluded_by(sweep: Sweep, point: Mapping[str, Any]) -> str | None:
    """The first rule of the sweep that leaves ``point`` out.

    A point does not know the degrees that are left to it; the run that it resolves to does, and is asked again.
    """
    if not sweep.excludes:
        return None
    seen = names(point)
    return next((exclusion.rule for exclusion in sweep.excludes if _matches(exclusion, seen)), None)


def names(point: Mapping[str, Any]) -> dict[str, Any]:
    """What an expression sees of a point: defaults filled in, and what follows from them. Open degrees are ``None``."""
    seen = {**_OPEN, **point}
    seen["ranks"] = seen["nodes"] * seen["tasks_per_node"]
    seen["devices"] = seen["ranks"] * seen["devices_per_task"]
    return seen


def _matches(exclusion: Exclusion, seen: Mapping[str, Any]) -> bool:
    for parameter, allowed in exclusion.keys.items():
        value: Any = seen
        for key in parameter:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in allowed:
            return False
    return exclusion.when is None or exclusion.when.holds(seen)
