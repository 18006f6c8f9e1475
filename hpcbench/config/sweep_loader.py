"""Loading of a sweep (its axes, includes, exclusions and derived parameters, checked against each other), and its
expansion into points: the product of the axes and the includes, without excluded points, times the repeats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.cluster_profile import is_profile
from hpcbench.config.command import Command
from hpcbench.config.command_table import parameter_hint, parameter_key_hint, parse_command
from hpcbench.config.expression import Expression
from hpcbench.config.run_spec import DEGREE_NAMES, PARAMETER_DEFAULTS, RunSpec
from hpcbench.config.sweep_file import (
    TABLE_PARAMETERS,
    ParameterPath,
    StopRule,
    SubmitTable,
    SweepFile,
    apply_overrides,
    find_equal_steps,
    parameter_types,
    parse_stop_rules,
    values_read_too_early,
)
from hpcbench.config.toml_tables import TomlSource, number_problem, read_toml, validate_table
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError
from hpcbench.paths import resolve_beside

ParameterSettings = dict[ParameterPath, Any]

COMPUTED_NAMES = ("ranks", "devices")
"""Names that expressions may use beside the parameters."""


@dataclass(frozen=True)
class SweepAxis:
    """An axis of the product: its steps set one parameter, or several together."""

    place: tuple[str | int, ...]
    """The table in the file."""
    steps: list[ParameterSettings]


MAX_POINTS = 1_000_000
"""More runs would exceed what file systems allow a project in files, and take minutes to expand."""


@dataclass(frozen=True)
class ExclusionRule:
    """Points that match every key and for which the condition holds are dropped."""

    rule: str
    """The rule as text, with its line."""
    keys: dict[ParameterPath, list[Any]]
    when: Expression | None


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was written."""

    name: str
    description: str
    repeats: int
    source: TomlSource
    fixed: ParameterSettings
    axes: list[SweepAxis] = field(default_factory=list)
    """Axes in the order of the file: grid, zips, scaling."""
    includes: list[ParameterSettings] = field(default_factory=list)
    excludes: list[ExclusionRule] = field(default_factory=list)
    derived: dict[ParameterPath, Expression] = field(default_factory=dict)
    stops: list[StopRule] = field(default_factory=list)
    submit: SubmitTable = field(default_factory=SubmitTable)
    model_folder: Path | None = None
    """Absolute path of the folder of users' own models."""
    command: Command | None = None
    """The program that the runs start instead of a training of hpcbench."""

    @property
    def order(self) -> str:
        """The order of the runs: ``shuffled`` or ``grid``."""
        return self.submit.order or ("shuffled" if self.repeats > 1 else "grid")

    @property
    def has_product(self) -> bool:
        """Whether the fixed parameters and the axes make points: where there are includes alone, they do not."""
        return bool(self.axes) or not self.includes

    def settings(self) -> Iterator[tuple[tuple[str | int, ...], ParameterSettings]]:
        """Every table of the file that sets parameters, and what it sets."""
        yield ("fixed",), self.fixed
        for axis in self.axes:
            for step in axis.steps:
                yield axis.place, step
        for number, include in enumerate(self.includes):
            yield ("include", number), include

    def values(self, *parameter: str) -> list[Any]:
        """Return all values of a parameter that the file contains."""
        values = (settings[parameter] for _, settings in self.settings() if parameter in settings)
        # 1, 1.0 and true are equal to Python, not to who wrote them.
        return list({(type(value), value): value for value in values}.values())

    def where(self, *parameter: str) -> str:
        """Return ``file:line`` of the first place that sets a parameter."""
        for place, settings in self.settings():
            if parameter in settings:
                return self.source.where((*place, *parameter))
        return str(self.source.path)

    def workload(self, location: tuple[str | int, ...] = ()) -> str:
        """Return the workload of the points of a table of ``kinds_of_points``."""
        settings = self.includes[int(location[1])] if location else {}
        return str({**self.fixed, **settings}.get(("workload",), "training"))

    def kinds_of_points(self) -> Iterator[tuple[tuple[str | int, ...], set[ParameterPath]]]:
        """The tables that points come from, and which parameters are set in all points from there."""
        everywhere = {*self.fixed, *self.derived}
        if self.has_product:
            yield (), everywhere.union(*(step for axis in self.axes for step in axis.steps))
        for number, include in enumerate(self.includes):
            yield ("include", number), everywhere | include.keys()


def load_sweep(path: Path, overrides: Iterable[str] = ()) -> Sweep:
    """Read the TOML file of a sweep, and check its keys, types, axes and expressions.

    Names of models, data sets, strategies and their options are not checked: ``check_names`` does that.

    Args:
        path: The file.
        overrides: Replacements of values, ``"key=value"`` each (``apply_overrides``).

    Raises:
        ConfigError: The file cannot be read or is not TOML.
        ConfigErrors: Overrides, or keys or values of the file are wrong; it contains all of them.

    Example:
        >>> sweep = load_sweep(Path("sweeps/quickstart.toml"), ["steps=5", "repeats=3"])
        >>> sweep.repeats, sweep.fixed["steps",], [len(axis.steps) for axis in sweep.axes]
        (3, 5, [2, 2, 2])
    """
    data, source = read_toml(path)
    if is_profile(data, path):
        raise ConfigError("a cluster profile, no sweep", where=str(path), hint=f"plan SWEEP --cluster {path}")
    source.origins = apply_overrides(data, overrides)
    return parse_sweep(data, source)


def parse_sweep(data: dict[str, Any], source: TomlSource) -> Sweep:
    """The sweep in decoded TOML. Raises ``ConfigErrors`` with everything that is wrong in it."""
    data = _name_parameters(data, source)
    file = validate_table(SweepFile, data, source, parameter_key_hint(data))
    problems: list[HpcbenchError] = []
    command = parse_command(file.command, source, problems) if file.command is not None else None
    declared = file.command.parameters if file.command is not None else {}
    axes = _read_axes(file, data, source, problems)
    includes = [_flatten_tables(include.model_dump(exclude_none=True)) for include in file.include]
    varied = (
        item for settings in (*(step for axis in axes for step in axis.steps), *includes) for item in settings.items()
    )
    rules = []
    for number, table in enumerate(file.exclude):
        values = table.model_dump(exclude_none=True)
        when = values.pop("when", None)
        place = source.where(("exclude", number))
        keys = {key: value if isinstance(value, list) else [value] for key, value in _flatten_tables(values).items()}
        if not keys and when is None:
            message = "an [[exclude]] without keys and without `when` excludes everything"
            problems.append(source.error(message, "exclude", number))
            continue
        words = [f"{'.'.join(key)} = {', '.join(map(str, values))}" for key, values in keys.items()]
        rule = f"[[exclude]] {' and '.join([*words, *([when] if when else [])])} ({place})"
        expression = (
            _parse_expression(when, source.where(("exclude", number, "when")), problems, declared) if when else None
        )
        rules.append(ExclusionRule(rule, keys, expression))
    sweep = Sweep(
        name=file.name,
        description=file.description,
        repeats=file.repeats,
        source=source,
        fixed={**command_settings(command), **_flatten_tables(file.fixed.model_dump(exclude_none=True))},
        axes=axes,
        includes=includes,
        excludes=rules,
        derived=_parse_derived(file, source, problems),
        stops=parse_stop_rules(file.stop, varied, source, problems),
        submit=file.submit,
        model_folder=resolve_beside(source.path, file.model_folder) if file.model_folder else None,
        command=command,
    )
    problems += _find_duplicate_settings(sweep)
    problems += filter(None, (find_equal_steps(axis.place, axis.steps, source) for axis in axes))
    if (points := count_points(sweep)) > MAX_POINTS:
        factors = [f"{'.'.join(next(iter(axis.steps[0])))} {len(axis.steps)}" for axis in axes]
        message = f"{points:,} points, at most {MAX_POINTS:,}: {' x '.join([*factors, f'repeats {sweep.repeats}'])}"
        hint = "values that change together belong in one [[zip]]; other parts into sweeps of their own"
        problems.append(source.error(message, hint=hint))
    if problems:
        raise ConfigErrors(problems)
    return sweep


def _name_parameters(data: dict[str, Any], source: TomlSource) -> dict[str, Any]:
    """Return ``data`` in which parameters of ``[command]`` are called ``parameters.lr`` wherever ``lr`` is set."""
    command = data.get("command")
    declared = command.get("parameters") if isinstance(command, dict) else None
    if not isinstance(declared, dict):
        return data
    origins: dict[tuple[str | int, ...], str] = {}

    def named(table: Any, *place: str | int) -> Any:
        if not isinstance(table, dict):
            return table
        renamed: dict[str, Any] = {}
        for key, value in table.items():
            if key in declared:
                renamed.setdefault("parameters", {})[key] = value
                renamed_place = (*place, "parameters", key)
                origins[renamed_place] = source.where((*place, key))
            elif key == "parameters" and isinstance(value, dict):
                renamed.setdefault(key, {}).update(value)
            else:
                renamed[key] = value
        return renamed

    changed = {key: named(table, key) if key in ("fixed", "grid") else table for key, table in data.items()}
    for key in ("zip", "include", "exclude"):
        if isinstance(data.get(key), list):
            changed[key] = [named(table, key, number) for number, table in enumerate(data[key])]
    if isinstance(data.get("derive"), dict):
        names = {key: f"parameters.{key}" for key in declared}
        changed["derive"] = {names.get(key, key): text for key, text in data["derive"].items()}
    source.origins = {**origins, **source.origins}
    return changed


def command_settings(command: Command | None) -> ParameterSettings:
    """The parameters that every run of a command has."""
    if command is None:
        return {}
    launch: ParameterSettings = {("options", "launch"): command.launch} if command.launch != "rank" else {}
    return {("workload",): "command", ("strategy",): "command", ("command_digest",): command.digest, **launch}


def _flatten_tables(values: dict[str, Any]) -> ParameterSettings:
    flat: ParameterSettings = {}
    for name, value in values.items():
        flat |= {(name, key): inner for key, inner in value.items()} if name in TABLE_PARAMETERS else {(name,): value}
    return flat


def _read_axes(
    file: SweepFile, data: dict[str, Any], source: TomlSource, problems: list[HpcbenchError]
) -> list[SweepAxis]:
    written = _flatten_tables(data.get("grid", {}))
    grid = _flatten_tables(file.grid.model_dump(exclude_none=True))
    if ("node",) in grid:
        grid["node",] = [grid["node",]] if isinstance(grid["node",], str) else grid["node",]
    axes = [SweepAxis(("grid",), [{parameter: value} for value in grid[parameter]]) for parameter in written]
    for number, group in enumerate(file.zip_):
        lists = _flatten_tables(group.model_dump(exclude_none=True))
        lengths = {len(values) for values in lists.values()}
        if len(lengths) > 1:
            named = ", ".join(f"{'.'.join(parameter)} has {len(values)}" for parameter, values in lists.items())
            problems.append(source.error(f"lists of a zip have equal lengths: {named}", "zip", number))
        rows = zip(*lists.values(), strict=False)
        axes.append(SweepAxis(("zip", number), [dict(zip(lists, row, strict=True)) for row in rows]))
    if file.scaling is not None:
        size = file.scaling.global_batch_size
        strong: ParameterSettings = {("global_batch_size",): size} if size is not None else {}
        axes.append(SweepAxis(("scaling",), [{("nodes",): nodes, **strong} for nodes in file.scaling.nodes]))
    return axes


def _parse_derived(
    file: SweepFile, source: TomlSource, problems: list[HpcbenchError]
) -> dict[ParameterPath, Expression]:
    derived, parameters = dict[ParameterPath, Expression](), parameter_types()
    declared = file.command.parameters if file.command is not None else None
    for name, text in file.derive.items():
        parameter = tuple(name.split(".", 1)) if name.partition(".")[0] in TABLE_PARAMETERS else (name,)
        if parameter[0] not in parameters or (parameter[0] in TABLE_PARAMETERS and len(parameter) == 1):
            message = f"derive: unknown parameter {name!r}"
            problems.append(source.error(message, "derive", name, hint=parameter_hint(name, declared, parameters)))
            continue
        if expression := _parse_expression(text, source.where(("derive", name)), problems, declared or ()):
            derived[parameter] = expression
    problems += values_read_too_early(derived, source)
    return derived


def _parse_expression(
    text: str, where: str, problems: list[HpcbenchError], declared: Collection[str] = ()
) -> Expression | None:
    try:
        return Expression(text, [*parameter_types(), *COMPUTED_NAMES, *declared], where)
    except ConfigError as error:
        problems.append(error)
        return None


def _find_duplicate_settings(sweep: Sweep) -> list[HpcbenchError]:
    """A parameter belongs to one table (an include may replace any)."""
    tables: dict[tuple[str | int, ...], list[ParameterPath]] = {("fixed",): list(sweep.fixed)}
    for axis in sweep.axes:
        tables.setdefault(axis.place, []).extend(axis.steps[0] if axis.steps else ())
    tables["derive",] = list(sweep.derived)
    owners: dict[ParameterPath, str] = {}
    problems: list[HpcbenchError] = []
    for place, parameters in tables.items():
        table = f"[{place[0]}]" if len(place) == 1 else f"[[{place[0]}]] number {int(place[1]) + 1}"
        for parameter in dict.fromkeys(parameters):
            owner = owners.setdefault(parameter, table)
            if owner != table:
                message = f"{'.'.join(parameter)} is set in {owner} and in {table}"
                problems.append(sweep.source.error(message, *place, *parameter, hint="keep one of them"))
    return problems


SweepPoint = dict[str, Any]
"""Parameters by name; those of tables in dictionaries of their own."""


@dataclass(frozen=True)
class ExcludedPoint:
    """A point that a rule of the sweep leaves out."""

    point: SweepPoint
    rule: str


def expand_sweep(sweep: Sweep) -> Iterator[SweepPoint | ExcludedPoint]:
    """Yield the points of a sweep, ``count_points(sweep)`` in number, each repeat as a point of its own.

    The product of the axes comes first, its last axis changing fastest, then the includes; the repeats of a point
    follow each other. A sweep without axes and includes is the one point of its fixed parameters.

    Args:
        sweep: The sweep, as ``load_sweep`` returns it.

    Yields:
        Parameters by name, those of tables in dictionaries, with ``repeat`` from 0; or an excluded point with its rule.
        Points share dictionaries: do not change one in place.

    Raises:
        ConfigError: A derived parameter or a condition cannot be computed, or its value has a wrong type.

    Example:
        >>> first, *others = expand_sweep(load_sweep(Path("sweeps/quickstart.toml")))
        >>> first["strategy"], first["batch_size"], first["repeat"], len(others)
        ('single', 16, 0, 7)
    """
    fixed: SweepPoint = {}
    defaults = sweep.command.defaults if sweep.command is not None else {}
    _set_parameters(fixed, sweep.fixed)
    product = itertools.product(*(axis.steps for axis in sweep.axes)) if sweep.has_product else ()
    for steps in itertools.chain(product, ([include] for include in sweep.includes)):
        point = dict(fixed)
        for step in steps:
            _set_parameters(point, step)
        # Apply derived parameters in the order of the file: one may use those above it. An include's own value wins.
        for parameter, expression in sweep.derived.items():
            if parameter[-1] not in (point if len(parameter) == 1 else point.get(parameter[0], ())):
                value = expression({**defaults, **expression_values(point)})
                if value is not None:
                    _set_parameters(point, {parameter: _convert_derived(parameter, value, expression.where)})
        if sweep.command is not None:
            # 1 and 1.0 are the same value of a parameter that is a number.
            given = {**defaults, **point.get("parameters", {})}
            point["parameters"] = {
                name: float(value) if isinstance(defaults.get(name), float) else value for name, value in given.items()
            }
        rule = find_exclusion(sweep, point)
        for repeat in range(sweep.repeats):
            numbered = {**point, "repeat": repeat}
            yield numbered if rule is None else ExcludedPoint(numbered, rule)


def count_points(sweep: Sweep) -> int:
    """Return the number of points that ``expand_sweep`` yields, excluded ones included."""
    product = int(sweep.has_product)
    for axis in sweep.axes:
        product *= len(axis.steps)
    return (product + len(sweep.includes)) * sweep.repeats


def _set_parameters(point: SweepPoint, settings: ParameterSettings) -> None:
    """Set parameters; a table that is there already is replaced, since other points may share it."""
    for (name, *key), value in settings.items():
        point[name] = {**point.get(name, {}), key[0]: value} if key else value


def _convert_derived(parameter: ParameterPath, value: Any, where: str | None) -> Any:
    """Return ``value`` in the parameter's type: a whole float becomes an integer."""
    name = parameter[0]
    if problem := number_problem(value):
        raise ConfigError(f"derive: {'.'.join(parameter)}: {problem}", where=where)
    if len(parameter) > 1:
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return msgspec.convert(value, _PARAMETER_TYPES[name])
    except msgspec.ValidationError as error:
        hint = "// divides without a rest, round() and floor() round" if isinstance(value, float) else None
        raise ConfigError(f"derive: {name} = {value!r} does not fit: {error}", where=where, hint=hint) from error


_PARAMETER_TYPES = {"global_batch_size": int} | {entry.name: entry.type for entry in msgspec.structs.fields(RunSpec)}
_UNSET_VALUES = {**PARAMETER_DEFAULTS, **dict.fromkeys(DEGREE_NAMES)}


def find_exclusion(sweep: Sweep, point: Mapping[str, Any]) -> str | None:
    """The first rule of the sweep that leaves ``point`` out.

    A point lacks the degrees that it leaves to hpcbench; the resolved run has them, and is checked again.
    """
    if not sweep.excludes:
        return None
    seen = expression_values(point)
    return next((exclusion.rule for exclusion in sweep.excludes if _exclusion_matches(exclusion, seen)), None)


def expression_values(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a point for expressions: with defaults and derived values. Unset degrees are ``None``."""
    # Parameters of a command are called by their own names.
    seen = {**point.get("parameters", {}), **_UNSET_VALUES, **point}
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


def spec_condition(where: str) -> Callable[[RunSpec], bool]:
    """Return whether a run satisfies the expression ``where`` over its parameters; ``ConfigError`` if it is invalid."""
    expression = Expression(where, [*RunSpec.__struct_fields__, *COMPUTED_NAMES], "--where")
    return lambda spec: expression.holds(expression_values(msgspec.structs.asdict(spec)))
