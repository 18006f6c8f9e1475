"""From a sweep to points: the product of its axes, its includes, without its excludes, times its repeats."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hpcbench.config.load import Exclusion, Parameter, Settings, Sweep
from hpcbench.config.spec import DEGREES, RunSpec
from hpcbench.errors import ConfigError

Point = dict[str, Any]
"""Parameters by name; those of tables in dictionaries of their own."""


@dataclass(frozen=True)
class Excluded:
    """A point that a rule of the sweep leaves out."""

    point: Point
    rule: str


def expand(sweep: Sweep) -> Iterator[Point | Excluded]:
    """The points of a sweep: the last axis moves fastest, includes follow the product, repeats are fastest of all."""
    for settings in itertools.chain(_product(sweep), ({**sweep.fixed, **include} for include in sweep.includes)):
        point = _nested(_with_derived(sweep, settings))
        rule = excluded_by(sweep, point)
        for repeat in range(sweep.repeats):
            numbered = {**point, "repeat": repeat}
            yield numbered if rule is None else Excluded(numbered, rule)


def count_points(sweep: Sweep) -> int:
    """How many points ``expand`` gives, those that are excluded among them."""
    product = 1
    for axis in sweep.axes:
        product *= len(axis.steps)
    return (product + len(sweep.includes)) * sweep.repeats


def _product(sweep: Sweep) -> Iterator[Settings]:
    for steps in itertools.product(*(axis.steps for axis in sweep.axes)):
        settings = dict(sweep.fixed)
        for step in steps:
            settings.update(step)
        yield settings


def _with_derived(sweep: Sweep, settings: Settings) -> Settings:
    """In the order of the file, so that one may use another that stands above it. An include's own value wins."""
    if not sweep.derived:
        return settings
    filled = dict(settings)
    for parameter, expression in sweep.derived.items():
        if parameter not in filled:
            filled[parameter] = _fitting(parameter, expression(names(_nested(filled))), expression.where)
    return filled


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
_DEFAULTS = {
    one.name: one.default if one.default is not msgspec.NODEFAULT else one.default_factory()
    for one in msgspec.structs.fields(RunSpec)
    if not one.required
}


def excluded_by(sweep: Sweep, point: Mapping[str, Any]) -> str | None:
    """The first rule of the sweep that leaves ``point`` out.

    A point does not know the degrees that are left to it; the run that it resolves to does, and is asked again.
    """
    return next((exclusion.rule for exclusion in sweep.excludes if _matches(exclusion, point)), None)


def names(point: Mapping[str, Any]) -> dict[str, Any]:
    """What an expression sees of a point: defaults filled in, and what follows from them. Open degrees are ``None``."""
    seen = {**_DEFAULTS, **dict.fromkeys(DEGREES), **point}
    seen["ranks"] = seen["nodes"] * seen["tasks_per_node"]
    seen["devices"] = seen["ranks"] * seen["devices_per_task"]
    return seen


def _matches(exclusion: Exclusion, point: Mapping[str, Any]) -> bool:
    seen = names(point)
    for parameter, allowed in exclusion.keys.items():
        value: Any = seen
        for key in parameter:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in allowed:
            return False
    return exclusion.when is None or exclusion.when.holds(seen)


def _nested(settings: Settings) -> Point:
    point: Point = {}
    for parameter, value in settings.items():
        if len(parameter) == 1:
            point[parameter[0]] = value
        else:
            point.setdefault(parameter[0], {})[parameter[1]] = value
    return point
