"""Expansion of a sweep into points: the product of its axes and its includes, without excluded points, times its
repeats.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hpcbench.config.run_spec import DEGREE_NAMES, PARAMETER_DEFAULTS, RunSpec
from hpcbench.config.sweep_file import TABLE_PARAMETERS
from hpcbench.config.sweep_loader import ExclusionRule, ParameterPath, ParameterSettings, Sweep
from hpcbench.errors import ConfigError

SweepPoint = dict[str, Any]
"""Parameters by name; those of tables in dictionaries of their own."""


@dataclass(frozen=True)
class ExcludedPoint:
    """A point that a rule of the sweep leaves out."""

    point: SweepPoint
    rule: str


def expand_sweep(sweep: Sweep) -> Iterator[SweepPoint | ExcludedPoint]:
    """The points of a sweep: the last axis moves fastest, includes follow the product, repeats are fastest of all.

    A sweep without axes is its includes, or else the one point of its fixed parameters. Points share the tables that
    they have in common; nobody may change them in place.
    """
    fixed = _nest_parameters(sweep.fixed)
    axes = [[_nest_parameters(step) for step in axis.steps] for axis in sweep.axes]
    steps_of_product = itertools.product(*axes) if sweep.has_product else ()
    product = (_merge_steps(fixed, steps) for steps in steps_of_product)
    includes = (_merge_steps(fixed, [_nest_parameters(include)]) for include in sweep.includes)
    for point in itertools.chain(product, includes):
        _apply_derived(sweep, point)
        rule = find_exclusion(sweep, point)
        for repeat in range(sweep.repeats):
            numbered = {**point, "repeat": repeat}
            yield numbered if rule is None else ExcludedPoint(numbered, rule)


def count_points(sweep: Sweep) -> int:
    """How many points ``expand`` gives, those that are excluded among them."""
    product = int(sweep.has_product)
    for axis in sweep.axes:
        product *= len(axis.steps)
    return (product + len(sweep.includes)) * sweep.repeats


def _nest_parameters(settings: ParameterSettings) -> SweepPoint:
    point: SweepPoint = {}
    for parameter, value in settings.items():
        _set_parameter(point, parameter, value)
    return point


def _set_parameter(point: SweepPoint, parameter: ParameterPath, value: Any) -> None:
    """Set one parameter; a table that is there already is replaced, since other points may share it."""
    name = parameter[0]
    point[name] = value if len(parameter) == 1 else {**point.get(name, {}), parameter[1]: value}


def _merge_steps(fixed: SweepPoint, steps: Iterable[SweepPoint]) -> SweepPoint:
    point = dict(fixed)
    for step in steps:
        for name, value in step.items():
            point[name] = {**point.get(name, {}), **value} if name in TABLE_PARAMETERS else value
    return point


def _apply_derived(sweep: Sweep, point: SweepPoint) -> None:
    """In the order of the file, so that one may use another that stands above it. An include's own value wins.

    What is ``None`` is left open: an option that only some strategies have, a degree that follows from the others.
    """
    for parameter, expression in sweep.derived.items():
        if parameter[-1] not in (point if len(parameter) == 1 else point.get(parameter[0], ())):
            value = expression(expression_values(point))
            if value is not None:
                _set_parameter(point, parameter, _convert_derived(parameter, value, expression.where))


def _convert_derived(parameter: ParameterPath, value: Any, where: str | None) -> Any:
    """``value`` as the parameter's type wants it: a whole float is an integer where one is needed."""
    name = parameter[0]
    if len(parameter) > 1:
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        if name == "global_batch_size":
            return msgspec.convert(value, int)
        return msgspec.convert(value, _PARAMETER_TYPES[name])
    except msgspec.ValidationError as error:
        raise ConfigError(f"derive: {name} = {value!r} does not fit: {error}", where=where) from error


_PARAMETER_TYPES = {one.name: one.type for one in msgspec.structs.fields(RunSpec)}
_UNSET_VALUES = {**PARAMETER_DEFAULTS, **dict.fromkeys(DEGREE_NAMES)}


def find_exclusion(sweep: Sweep, point: Mapping[str, Any]) -> str | None:
    """The first rule of the sweep that leaves ``point`` out.

    A point does not know the degrees that are left to it; the run that it resolves to does, and is asked again.
    """
    if not sweep.excludes:
        return None
    seen = expression_values(point)
    return next((exclusion.rule for exclusion in sweep.excludes if _exclusion_matches(exclusion, seen)), None)


def expression_values(point: Mapping[str, Any]) -> dict[str, Any]:
    """What an expression sees of a point: defaults filled in, and what follows from them. Open degrees are ``None``."""
    seen = {**_UNSET_VALUES, **point}
    seen["ranks"] = seen["nodes"] * seen["tasks_per_node"]
    seen["devices"] = seen["ranks"] * seen["devices_per_task"]
    return seen


def _exclusion_matches(exclusion: ExclusionRule, seen: Mapping[str, Any]) -> bool:
    for parameter, allowed in exclusion.keys.items():
        value: Any = seen
        for key in parameter:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in allowed:
            return False
    return exclusion.when is None or exclusion.when.holds(seen)
