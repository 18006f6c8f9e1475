"""The schema of ``sweeps/<name>.toml``, whose parameters are derived from ``RunSpec``, its stop rules, its text,
and changes for one command (``--set key=value``), after which the sweep is validated as if written so."""

from __future__ import annotations

import functools
import json
import operator
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import ConfigDict, Field, create_model, model_validator

from hpcbench.config import toml_tables
from hpcbench.config.command_table import CommandTable, declared_parameters, parameter_hint
from hpcbench.config.expression import Expression
from hpcbench.config.run_spec import NodeName, RunSpec
from hpcbench.config.toml_tables import NAME_PATTERN, KeyPath, Minutes, PositiveInt, TomlSource, TomlTable
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.paths import expand_home

_GENERATED_PARAMETERS = {"spec_version", "repeat", "command_digest"}
TABLE_PARAMETERS = ("options", "model_options", "env", "parameters")
"""Parameters that are tables of their own."""


def parameter_types() -> dict[str, Any]:
    """Every parameter that a sweep may set, with its type in pydantic's words."""
    hints = get_type_hints(RunSpec, include_extras=True)
    kinds = {name: _pydantic_type(hint) for name, hint in hints.items() if name not in _GENERATED_PARAMETERS}
    kinds["global_batch_size"] = Annotated[PositiveInt, Field(description="of all replicas, instead of batch_size")]
    kinds["workload"] = Annotated[
        Literal["training", "collectives"],
        Field(description="whether the runs train or measure collectives; with [command] neither"),
    ]
    kinds["time_limit_min"] = Annotated[Minutes, Field(description="limit of one launch: 30 or '2 h'")]
    return kinds


def _pydantic_type(hint: Any) -> Any:
    """A msgspec annotation as a pydantic one: the constraints and descriptions of ``Meta`` become a ``Field``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        metas = [_pydantic_field(meta) for meta in arguments[1:] if isinstance(meta, msgspec.Meta)]
        return functools.reduce(lambda kind, field: Annotated[kind, field], metas, _pydantic_type(arguments[0]))
    if origin in (Union, types.UnionType):
        members = [_pydantic_type(argument) for argument in arguments if argument is not type(None)]
        return functools.reduce(operator.or_, members)
    if origin is dict:
        return dict[_pydantic_type(arguments[0]), _pydantic_type(arguments[1])]  # type: ignore[misc]
    return hint


def _pydantic_field(meta: msgspec.Meta) -> Any:
    names = ("ge", "gt", "le", "lt", "pattern", "max_length", "description")
    return Field(**{name: getattr(meta, name) for name in names if getattr(meta, name) is not None})


def _make_table(name: str, doc: str, form: Callable[[Any], Any], **fields: Any) -> Any:
    """A table of every parameter; ``form`` makes the type of its key from the parameter's."""
    for parameter, kind in parameter_types().items():
        if parameter in fields:
            continue
        if parameter in TABLE_PARAMETERS:
            (key, value), about = get_args(get_args(kind)[0]), get_args(kind)[1]
            fields[parameter] = (Annotated[dict[key, form(value)], about] | None, None)  # type: ignore[misc, valid-type]
        else:
            fields[parameter] = (form(kind) | None, None)
    return create_model(name, __base__=TomlTable, __doc__=doc, **fields)


_EACH_NODE = Field(description="names of nodes; each: every node of the partition, one node a run")
FixedTable: Any = _make_table("Fixed", "Parameters that all runs share.", lambda kind: kind)
GridTable: Any = _make_table(
    "Grid",
    "Lists whose product is run.",
    lambda kind: Annotated[list[kind], Field(min_length=1)],  # type: ignore[valid-type]
    node=(Annotated[list[Annotated[str, _pydantic_field(NodeName)]] | Literal["each"], _EACH_NODE] | None, None),
)
_Condition = Annotated[str, Field(description="an expression over parameters; true excludes the point")]
ExcludeTable: Any = _make_table(
    "Exclude",
    "Points that match all of these are dropped.",
    lambda kind: kind | list[kind],  # type: ignore[valid-type]
    when=(_Condition | None, None),
)


class ScalingTable(TomlTable):
    """More nodes: with the same work for each replica (weak), or the same work in all (strong)."""

    kind: Literal["weak", "strong"]
    nodes: Annotated[list[PositiveInt], Field(min_length=1)]
    """Node counts: an axis of the sweep."""
    global_batch_size: PositiveInt | None = None
    """Samples of one step over all replicas, for strong scaling."""

    @model_validator(mode="after")
    def _fits(self) -> ScalingTable:
        if (self.kind == "strong") != (self.global_batch_size is not None):
            raise ValueError(
                f"{self.kind} scaling {'needs' if self.kind == 'strong' else 'takes no'} global_batch_size"
            )
        return self


StopParameters = str | Annotated[list[str], Field(min_length=1)]


class StopTable(TomlTable):
    """The parameters, by status, along which larger runs are skipped once a smaller run has ended with that status."""

    oom: StopParameters | None = None
    """`"batch_size"`: a run that did not fit into memory does not fit with a larger batch."""
    timeout: StopParameters | None = None
    """`["batch_size", "steps"]`: larger in one of them, and smaller in none."""
    unsupported: StopParameters | None = None
    failed: StopParameters | None = None


class SubmitTable(TomlTable):
    """The division of the runs into jobs; no part of a run's identity."""

    pack: PositiveInt | None = None
    """Runs of equal shape that one job carries, one after another."""
    pack_minutes: Minutes | None = None
    """Minutes that one job's runs may take together, by their time limits."""
    max_running_jobs: PositiveInt | None = None
    """Jobs of one submission that may run at the same time; on a machine without a scheduler always one."""
    budget_node_hours: Annotated[float, Field(gt=0)] | None = None
    """Maximum cost of one submit at the runs' time limits; `--yes` overrides it."""
    order: Literal["shuffled", "grid"] | None = None
    """`grid` runs the points as they are written, `shuffled` so that a slow hour is in no configuration alone; the
    latter is the default where `repeats` is above 1."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """Seed of the order; a hash of the sorted run ids when absent."""

    @model_validator(mode="after")
    def _one_kind_of_pack(self) -> SubmitTable:
        if self.pack is not None and self.pack_minutes is not None:
            raise ValueError("pack and pack_minutes exclude each other: keep one")
        return self


class SweepFile(TomlTable):
    """A named set of runs."""

    model_config = ConfigDict(title="hpcbench sweep")

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: str = ""
    model_folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the module that `model = "module:function"` names, relative to this file; the profile's when absent."""
    command: CommandTable | None = None
    """A program of your own that the runs start, instead of a training of hpcbench."""
    fixed: FixedTable = FixedTable()
    """Parameters that all runs share."""
    grid: GridTable = GridTable()
    """Lists; every combination of their values is one run."""
    zip_: Annotated[list[GridTable], Field(alias="zip")] = []
    """Lists of equal length that move together; each group is one axis of the grid."""
    scaling: ScalingTable | None = None
    """Weak or strong scaling over node counts."""
    derive: dict[str, str] = {}
    """Parameters computed from others: `micro_batches = "batch_size // 4"`, `"options.x" = "nodes * 2"`."""
    include: list[FixedTable] = []
    """Further points: these parameters over the fixed ones."""
    exclude: list[ExcludeTable] = []
    """Points to leave out: keys that match, and a condition that holds."""
    stop: StopTable = StopTable()
    """Runs that are not worth starting once a smaller one has ended badly: `oom = "batch_size"`."""
    submit: SubmitTable = SubmitTable()
    """The division of the runs into jobs: packing, limits, budget."""
    repeats: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Launches of every configuration; each has its own seed."""


ParameterPath = tuple[str, ...]

_NON_SIZE_PARAMETERS = frozenset({"seed", "time_limit_min"})
"""Numbers that make no run larger."""


@dataclass(frozen=True)
class StopRule:
    """Runs that are larger ``along`` these parameters are skipped once a smaller one has ended with a status."""

    statuses: list[str]
    along: tuple[ParameterPath, ...]


def parse_stop_rules(
    table: StopTable, varied: Iterable[tuple[ParameterPath, object]], source: TomlSource, problems: list[HpcbenchError]
) -> list[StopRule]:
    """The rules of ``[stop]``, one for each set of parameters.

    ``varied`` holds every value that the sweep's axes and includes give to a parameter.
    """
    numeric: dict[str, bool] = {}
    for parameter, value in varied:
        name = ".".join(parameter)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        numeric[name] = numeric.get(name, True) and is_number and name not in _NON_SIZE_PARAMETERS
    choices = [name for name, fits in numeric.items() if fits]
    statuses: dict[tuple[ParameterPath, ...], list[str]] = {}
    for status, along in table.model_dump(exclude_none=True).items():
        names = dict.fromkeys([along] if isinstance(along, str) else along)
        wrong = [name for name in names if name not in choices]
        for name in wrong:
            reason = "has no size" if name in numeric else "is not varied by this sweep"
            hint = did_you_mean(name, choices)
            problems.append(source.error(f"stop.{status}: {name!r} {reason}", "stop", status, hint=hint))
        if not wrong:
            statuses.setdefault(tuple(tuple(name.split(".", 1)) for name in names), []).append(status)
    return [StopRule(ended, parameters) for parameters, ended in statuses.items()]


def find_equal_steps(
    place: tuple[str | int, ...], steps: Iterable[Mapping[ParameterPath, Any]], source: TomlSource
) -> HpcbenchError | None:
    """The error of an axis with equal steps: both would be counted as points, and be measured as one run."""
    seen: set[str] = set()
    for step in steps:
        # 1, 1.0 and true are equal to Python, not to who wrote them.
        if (written := repr(step)) in seen:
            words = ", ".join(f"{'.'.join(parameter)} = {value}" for parameter, value in step.items())
            hint = "for several launches of every run set repeats = 2"
            return source.error(f"{words} is listed twice", *place, *next(iter(step), ()), hint=hint)
        seen.add(written)
    return None


def sweep_toml(settings: Mapping[str, Any], fixed: Mapping[str, Any], points: Iterable[Mapping[str, Any]]) -> str:
    """Return a sweep file with top-level ``settings``, the table ``[fixed]`` and one ``[[include]]`` per point."""
    lines = [*settings_lines(settings), "", "[fixed]", *settings_lines(fixed)]
    for point in points:
        lines += ["", "[[include]]", *settings_lines(point)]
    return "\n".join(lines) + "\n"


def settings_lines(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The lines of a TOML table; keys of nested tables have dots."""
    for name, value in table.items():
        key = prefix + (name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name))
        if isinstance(value, dict):
            yield from settings_lines(value, f"{key}.")
        else:
            # JSON's strings, numbers, truth values and lists are TOML's, except for DEL.
            yield f"{key} = {json.dumps(value)}".replace("\x7f", "\\u007f")


def values_read_too_early(derived: Mapping[tuple[str, ...], Expression], source: TomlSource) -> Iterator[HpcbenchError]:
    """Yield an error for each derived parameter that reads one below it, whose value is not computed yet."""
    names = [path[-1] if path[0] == "parameters" else ".".join(path) for path in derived]
    for place, (path, expression) in enumerate(derived.items()):
        for name in sorted(expression.names.intersection(names[place + 1 :])):
            message = f"derive: {names[place]} reads {name}, which is derived below it"
            hint = f"put {name} above it; values that read each other cannot be computed"
            yield source.error(message, "derive", ".".join(path), hint=hint)


_SETTABLE_TABLES = ("fixed", "grid", "scaling", "derive", "stop", "submit")
_SETTABLE_KEYS = ("name", "description", "model_folder", "repeats")


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[KeyPath, str]:
    """Change the sweep ``data`` in place.

    A bare parameter (``steps=5``, ``options.x=1``) goes to ``[fixed]`` and leaves every other table, so that all points
    have it. ``grid.x=a,b`` makes it an axis. Other keys are those of the file: ``repeats=5``, ``submit.pack=4``.

    Args:
        data: The decoded TOML file.
        overrides: ``key=value`` each; the value is TOML, or text as it stands.

    Returns:
        For each key that was set its origin, for messages.

    Raises:
        ConfigErrors: Every override that is wrong.
    """
    origins: dict[KeyPath, str] = {}
    problems: list[HpcbenchError] = []
    for text in overrides:
        try:
            origins[_apply(data, text)] = f"--set {text}"
        except ConfigError as error:
            problems.append(error)
    if problems:
        raise ConfigErrors(problems)
    return origins


def _apply(data: dict[str, Any], text: str) -> KeyPath:
    key, separator, value_text = (part.strip() for part in text.partition("="))
    where = f"--set {text}"
    if not separator or not key:
        raise ConfigError("no key=value", where=where, hint="for instance steps=5 or grid.batch_size=8,16")
    path = _key_path(key, where, declared_parameters(data))
    is_list = path[0] == "grid" or path == ("scaling", "nodes")
    value = _parse_list(value_text) if is_list else toml_tables.parse_toml_value(value_text)
    if path[0] == "fixed" and path[1] != "env" and isinstance(value, str) and "," in value:
        raise ConfigError(f"{path[-1]} is one value", where=where, hint=f"an axis is grid.{'.'.join(path[1:])}={value}")
    if path == ("model_folder",):
        value = str(expand_home(str(value)).absolute())
    if path[0] in ("fixed", "grid"):
        had_axes = _has_axes(data)
        _remove_parameter(data, path[1:], with_includes=path[0] == "fixed")
        if path[1] in ("nodes", "global_batch_size") and path[1] in _table(data, "scaling"):
            # Scaling has an axis of nodes of its own; the kind of scaling stays.
            path = ("scaling", path[1])
            if path[1] == "nodes" and not is_list:
                # Includes are no part of the axis.
                data["include"] = [{**include, "nodes": value} for include in data.get("include", [])]
                value = [value]
        elif path[0] == "fixed" and had_axes and not _has_axes(data) and data.get("include"):
            # A sweep of includes alone has no other points: the product stays, with one value.
            path, value = ("grid", *path[1:]), [value]
    table = data
    for step in path[:-1]:
        table = table.setdefault(step, {})
    table[path[-1]] = value
    return path


def _key_path(key: str, where: str, declared: Collection[str] | None) -> tuple[str, ...]:
    """The place of ``key`` in the file: parameters without a table stand in ``[fixed]``.

    ``declared`` are the names of a command's own parameters; ``None`` without a command.
    """
    first, _, rest = key.partition(".")
    parameters = parameter_types()
    table, name = (first, rest) if first in ("fixed", "grid") else ("fixed", key)
    if name.removeprefix("parameters.") in (declared or ()):
        return (table, name.removeprefix("parameters."))
    if first in parameters:
        first, rest = "fixed", key
    if first in ("fixed", "grid"):
        name, _, option = rest.partition(".")
        if name not in parameters:
            raise ConfigError(
                f"unknown parameter {name!r}", where=where, hint=parameter_hint(name, declared, parameters)
            )
        return (first, name, option) if name in TABLE_PARAMETERS and option else (first, rest)
    if first in _SETTABLE_TABLES and rest:
        return (first, rest)
    if key in _SETTABLE_KEYS:
        return (key,)
    if first in (field.alias or name for name, field in SweepFile.model_fields.items()):
        raise ConfigError(f"[{first}] cannot be set here", where=where, hint="change it in the sweep's file")
    hint = parameter_hint(key, declared, [*parameters, *_SETTABLE_KEYS])
    raise ConfigError(f"unknown key {key!r}", where=where, hint=hint)


def _parse_list(text: str) -> list[Any]:
    if text.startswith("["):
        value = toml_tables.parse_toml_value(text)
        return value if isinstance(value, list) else [value]
    return [toml_tables.parse_toml_value(part.strip()) for part in text.split(",")]


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    table = data.get(name)
    return table if isinstance(table, dict) else {}


def _has_axes(data: dict[str, Any]) -> bool:
    return bool(_table(data, "grid") or data.get("zip") or "scaling" in data)


def _remove_parameter(data: dict[str, Any], parameter: tuple[str, ...], *, with_includes: bool) -> None:
    """Take ``parameter`` out of every table that gives it values; ``[scaling]`` keeps its own."""
    dotted = ".".join(parameter)
    groups = [group for group in data.get("zip", []) if isinstance(group, dict)]
    includes = [include for include in data.get("include", []) if isinstance(include, dict)] if with_includes else []
    for table in (_table(data, "fixed"), _table(data, "grid"), *groups, *includes):
        inner: Any = table if len(parameter) == 1 else table.get(parameter[0])
        if isinstance(inner, dict):
            inner.pop(parameter[-1], None)
    _table(data, "derive").pop(dotted, None)
    if "zip" in data:
        data["zip"] = [group for group in data["zip"] if group]
    if with_includes:
        # What has one value is no size along which runs can be stopped.
        stops = _table(data, "stop")
        for status, names in list(stops.items()):
            sizes = [name for name in ([names] if isinstance(names, str) else names) if name != dotted]
            if sizes:
                stops[status] = sizes
            else:
                del stops[status]
