"""Files to typed values: a sweep by its path, a cluster's profile by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcbench.config.expression import Expression
from hpcbench.config.profiles import cluster_paths, load_cluster, load_cluster_file
from hpcbench.config.stops import StopRule, stop_rules
from hpcbench.config.sweep import NESTED, SubmitTable, SweepFile, parameter_types
from hpcbench.config.tomlfile import read_toml
from hpcbench.config.validate import Source, validate
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.paths import beside

__all__ = ["Sweep", "cluster_paths", "load_cluster", "load_cluster_file", "load_sweep"]

Parameter = tuple[str, ...]
"""``("nodes",)`` or, inside a table, ``("options", "bucket_cap_mb")``."""
Settings = dict[Parameter, Any]

COMPUTED = ("ranks", "devices")
"""Names that expressions may use beside the parameters."""


@dataclass(frozen=True)
class Axis:
    """One axis of the product: its steps set one parameter, or several that move together."""

    place: tuple[str | int, ...]
    """The table in the file."""
    steps: list[Settings]


@dataclass(frozen=True)
class Exclusion:
    """Points that match every key and for which the condition holds are dropped."""

    rule: str
    """The rule in words, with its line."""
    keys: dict[Parameter, list[Any]]
    when: Expression | None


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was written."""

    name: str
    description: str
    repeats: int
    source: Source
    fixed: Settings
    axes: list[Axis] = field(default_factory=list)
    """In the order of the file: grid, zips, scaling."""
    includes: list[Settings] = field(default_factory=list)
    excludes: list[Exclusion] = field(default_factory=list)
    derived: dict[Parameter, Expression] = field(default_factory=dict)
    stops: list[StopRule] = field(default_factory=list)
    submit: SubmitTable = field(default_factory=SubmitTable)
    model_folder: Path | None = None
    """Absolute."""

    @property
    def has_product(self) -> bool:
        """Whether the fixed parameters and the axes make points: where there are includes alone, they do not."""
        return bool(self.axes) or not self.includes

    def settings(self) -> Iterator[tuple[tuple[str | int, ...], Settings]]:
        """Every table of the file that sets parameters, and what it sets."""
        yield ("fixed",), self.fixed
        for axis in self.axes:
            for step in axis.steps:
                yield axis.place, step
        for number, include in enumerate(self.includes):
            yield ("include", number), include

    def values(self, *parameter: str) -> list[Any]:
        """All values that are written for a parameter."""
        found = (settings[parameter] for _, settings in self.settings() if parameter in settings)
        # 1, 1.0 and true are equal to Python, not to who wrote them.
        return list({(type(value), value): value for value in found}.values())

    def where(self, *parameter: str) -> str:
        """``file:line`` of the first place that sets a parameter."""
        for place, settings in self.settings():
            if parameter in settings:
                return self.source.where((*place, *parameter))
        return str(self.source.path)

    def kinds_of_points(self) -> Iterator[tuple[tuple[str | int, ...], set[Parameter]]]:
        """The tables that points come from, and which parameters are set in all points from there."""
        everywhere = {*self.fixed, *self.derived}
        if self.has_product:
            yield (), everywhere.union(*(step for axis in self.axes for step in axis.steps))
        for number, include in enumerate(self.includes):
            yield ("include", number), everywhere | include.keys()


def load_sweep(path: Path) -> Sweep:
    """Read a sweep. Raises ``ConfigErrors`` with everything that is wrong in it."""
    data, text = read_toml(path)
    source = Source(path, text)
    file = validate(SweepFile, data, source)
    problems: list[HpcbenchError] = []
    axes = _axes(file, data, source, problems)
    includes = [_flat(include.model_dump(exclude_none=True)) for include in file.include]
    varied = (
        item for settings in (*(step for axis in axes for step in axis.steps), *includes) for item in settings.items()
    )
    sweep = Sweep(
        name=file.name,
        description=file.description,
        repeats=file.repeats,
        source=source,
        fixed=_flat(file.fixed.model_dump(exclude_none=True)),
        axes=axes,
        includes=includes,
        excludes=_excludes(file, source, problems),
        derived=_derived(file, source, problems),
        stops=stop_rules(file.stop, varied, source, problems),
        submit=file.submit,
        model_folder=beside(path, file.model_folder) if file.model_folder else None,
    )
    problems += _set_twice(sweep)
    if problems:
        raise ConfigErrors(problems)
    return sweep


def _flat(values: dict[str, Any]) -> Settings:
    flat: Settings = {}
    for name, value in values.items():
        flat |= {(name, key): inner for key, inner in value.items()} if name in NESTED else {(name,): value}
    return flat


def _axes(file: SweepFile, data: dict[str, Any], source: Source, problems: list[HpcbenchError]) -> list[Axis]:
    written = _flat(data.get("grid", {}))
    grid = _flat(file.grid.model_dump(exclude_none=True))
    axes = [Axis(("grid",), [{parameter: value} for value in grid[parameter]]) for parameter in written]
    for number, group in enumerate(file.zip_):
        lists = _flat(group.model_dump(exclude_none=True))
        lengths = {len(values) for values in lists.values()}
        if len(lengths) > 1:
            named = ", ".join(f"{_dotted(parameter)} has {len(values)}" for parameter, values in lists.items())
            problems.append(
                ConfigError(f"lists of a zip have equal lengths: {named}", where=source.where(("zip", number)))
            )
        rows = zip(*lists.values(), strict=False)
        axes.append(Axis(("zip", number), [dict(zip(lists, row, strict=True)) for row in rows]))
    if file.scaling is not None:
        size = file.scaling.global_batch_size
        strong: Settings = {("global_batch_size",): size} if size is not None else {}
        axes.append(Axis(("scaling",), [{("nodes",): nodes, **strong} for nodes in file.scaling.nodes]))
    return axes


def _excludes(file: SweepFile, source: Source, problems: list[HpcbenchError]) -> list[Exclusion]:
    found = []
    for number, table in enumerate(file.exclude):
        values = table.model_dump(exclude_none=True)
        when = values.pop("when", None)
        place = source.where(("exclude", number))
        keys = {key: value if isinstance(value, list) else [value] for key, value in _flat(values).items()}
        if not keys and when is None:
            problems.append(
                ConfigError("an [[exclude]] without keys and without `when` excludes everything", where=place)
            )
            continue
        words = [f"{_dotted(key)} = {', '.join(str(one) for one in value)}" for key, value in keys.items()]
        rule = f"[[exclude]] {' and '.join([*words, *([when] if when else [])])} ({place})"
        expression = _expression(when, source.where(("exclude", number, "when")), problems) if when else None
        found.append(Exclusion(rule, keys, expression))
    return found


def _derived(file: SweepFile, source: Source, problems: list[HpcbenchError]) -> dict[Parameter, Expression]:
    found: dict[Parameter, Expression] = {}
    known = parameter_types()
    for name, text in file.derive.items():
        where = source.where(("derive", name))
        parameter = tuple(name.split(".", 1)) if name.partition(".")[0] in NESTED else (name,)
        if parameter[0] not in known or (parameter[0] in NESTED and len(parameter) == 1):
            problems.append(
                ConfigError(f"derive: unknown parameter {name!r}", where=where, hint=did_you_mean(name, known))
            )
            continue
        expression = _expression(text, where, problems)
        if expression is not None:
            found[parameter] = expression
    return found


def _expression(text: str, where: str, problems: list[HpcbenchError]) -> Expression | None:
    try:
        return Expression(text, [*parameter_types(), *COMPUTED], where)
    except ConfigError as error:
        problems.append(error)
        return None


def _set_twice(sweep: Sweep) -> list[HpcbenchError]:
    """A parameter belongs to one table (an include may replace any)."""
    tables = [("fixed",), *dict.fromkeys(axis.place for axis in sweep.axes), ("derive",)]
    owners: dict[Parameter, str] = {}
    problems: list[HpcbenchError] = []
    for place in tables:
        name = f"[{place[0]}]" if len(place) == 1 else f"[[{place[0]}]] number {int(place[1]) + 1}"
        for parameter in _parameters_of(sweep, place):
            if parameter in owners:
                problems.append(
                    ConfigError(
                        f"{_dotted(parameter)} is set in {owners[parameter]} and in {name}",
                        where=sweep.source.where((*place, *parameter)),
                        hint="keep one of them",
                    )
                )
            owners.setdefault(parameter, name)
    return problems


def _parameters_of(sweep: Sweep, place: tuple[str | int, ...]) -> list[Parameter]:
    if place == ("fixed",):
        return list(sweep.fixed)
    if place == ("derive",):
        return list(sweep.derived)
    steps = [axis.steps[0] for axis in sweep.axes if axis.place == place and axis.steps]
    return list(dict.fromkeys(parameter for step in steps for parameter in step))


def _dotted(parameter: Parameter) -> str:
    return ".".join(parameter)
