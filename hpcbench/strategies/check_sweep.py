"""Validation of a sweep against the registry: its names and options, whose errors are reported at once, and whether any
point can run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.command import Command
from hpcbench.config.command_table import parameter_hint
from hpcbench.config.option import Option, toml_literal
from hpcbench.config.sweep_loader import ExcludedPoint, Sweep, command_settings, count_points, expand_sweep
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.strategies.catalog import COLLECTIVES, WORKLOADS, selectable_strategies
from hpcbench.strategies.decoder_shapes import named_shapes
from hpcbench.strategies.resolve import WORKLOAD_PARAMETERS, InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import MODELS, check_custom_model, is_custom_model

REQUIRED_PARAMETERS = ("model", "dataset", "strategy")
BATCH_SIZE_PARAMETERS = ("batch_size", "global_batch_size")


def check_names(sweep: Sweep, profile: ClusterProfile | None = None) -> None:
    """Raise ``ConfigErrors`` with every name in ``sweep`` that does not exist and every parameter that is missing."""
    choices_by_name: dict[str, Iterable[str]] = {
        "model": MODELS,
        "dataset": DATASETS,
        "strategy": selectable_strategies(),
    }
    if profile is not None:
        choices_by_name |= {"partition": profile.partitions, "environment": profile.environments}
    problems = _workload_problems(sweep)
    if sweep.command is not None:
        options = {name: Option(default, "") for name, default in sweep.command.defaults.items()}
        problems += _option_problems(sweep, "parameters", options, "[command] has no parameter")
        problems += _layout_problems(sweep, sweep.command)
        choices_by_name = {name: known for name, known in choices_by_name.items() if name not in REQUIRED_PARAMETERS}
    else:
        problems += [*_missing_parameter_problems(sweep), *_custom_model_problems(sweep, profile)]
        strategies = {**selectable_strategies(), **WORKLOADS}
        keys = [*sweep.values("strategy"), *sweep.values("workload")]
        options = {name: one for key in keys if key in strategies for name, one in strategies[key].options.items()}
        problems += _option_problems(sweep, "options", options, "no strategy of this sweep has the option")
        models = sweep.values("model")
        options = {name: one for key in models if key in MODELS for name, one in MODELS[key].options.items()}
        # Users' own models may have any.
        unknown = "" if any(map(is_custom_model, models)) else "no model of this sweep has the option"
        problems += _option_problems(sweep, "model_options", options, unknown)
    for name, choices in choices_by_name.items():
        for value in sweep.values(name):
            if value not in choices and not (name == "model" and is_custom_model(value)):
                where = f" of cluster {profile.name}" if profile and name in ("partition", "environment") else ""
                message = f"unknown {name}{where}: {value!r}"
                problems.append(ConfigError(message, where=sweep.where(name), hint=did_you_mean(value, choices)))
    if problems:
        raise ConfigErrors(problems)


_POINTS_TRIED = 10_000


def check_feasible(sweep: Sweep) -> None:
    """Raise ``ConfigError`` if no point of ``sweep`` can run, on whatever cluster; a huge sweep is not tried whole."""
    dropped = []
    for point in islice(expand_sweep(sweep), _POINTS_TRIED):
        if isinstance(point, ExcludedPoint):
            dropped.append(InfeasiblePoint(point.point, point.rule))
        elif isinstance(resolved := resolve_point(point, PartitionLimits("any")), InfeasiblePoint):
            dropped.append(resolved)
        else:
            return
    if len(dropped) == count_points(sweep):
        raise nothing_feasible(sweep, dropped, "every cluster")


def nothing_feasible(sweep: Sweep, dropped: Sequence[InfeasiblePoint], cluster: str) -> ConfigError:
    """The error of a sweep whose points are all infeasible on a cluster, with up to ten reasons."""
    reasons = sorted({point.reason for point in dropped})
    all_of = "the only point" if len(dropped) == 1 else f"every one of the {len(dropped)} points"
    message = f"{all_of} of sweep {sweep.name!r} is infeasible on {cluster}"
    return ConfigError(message, where=str(sweep.source.path), hint="\n  ".join(reasons[:10]))


def _workload_problems(sweep: Sweep) -> list[HpcbenchError]:
    """Parameters of other workloads, and a workload that is no constant."""
    problems: list[HpcbenchError] = []
    own_settings = command_settings(sweep.command)
    workloads = {sweep.workload(location) for location, _ in sweep.kinds_of_points()}
    for place, settings in sweep.settings():
        workload = "command" if sweep.command else sweep.workload(place if place[0] == "include" else ())
        for parameter, value in settings.items():
            if place == ("fixed",) and value == own_settings.get(parameter):
                continue
            where = sweep.source.where((*place, *parameter))
            name, known = ".".join(parameter), WORKLOAD_PARAMETERS.get(workload)
            if parameter[0] == "workload" and sweep.command is None:
                if place[0] not in ("fixed", "include"):
                    hint = "set it in [fixed] or in an [[include]]"
                    problems.append(ConfigError("workload is not an axis", where=where, hint=hint))
            elif known is not None and parameter[0] not in known:
                message = f"{name} belongs to trainings of hpcbench, and these runs have workload = {workload!r}"
                hint = f"they have {', '.join(known)}"
                if sweep.command is not None:
                    hint = parameter_hint(parameter[-1], sweep.command.defaults)
                problems.append(ConfigError(message, where=where, hint=hint))
            elif COLLECTIVES not in workloads and parameter[0] in ("operation", "message_bytes", "group_tasks"):
                hint = f'set workload = "{COLLECTIVES}" in [fixed]'
                problems.append(ConfigError(f"{name} belongs to collectives", where=where, hint=hint))
            elif sweep.command is None and parameter[0] == "parameters":
                problems.append(ConfigError(f"{name} is set without a [command]", where=where))
    return problems


def _layout_problems(sweep: Sweep, command: Command) -> list[HpcbenchError]:
    if command.layout is None or command.layout.model in named_shapes():
        return []
    hint, where = did_you_mean(command.layout.model, named_shapes()), sweep.source.where(("command", "layout", "model"))
    return [ConfigError(f"layout: unknown model {command.layout.model!r}", where=where, hint=hint)]


def _custom_model_problems(sweep: Sweep, profile: ClusterProfile | None) -> list[ConfigError]:
    """Users' own models and the folder that they are in; a sweep without a profile may leave that to the profile."""
    custom = [value for value in sweep.values("model") if is_custom_model(value)]
    folder = custom_model_folder(sweep, profile)
    if folder is not None and not folder.is_dir() and (custom or sweep.model_folder):
        where = sweep.source.where(("model_folder",)) if sweep.model_folder else f"cluster {profile and profile.name}"
        return [ConfigError(f"model_folder: there is no folder {folder}", where=where)]
    where = sweep.where("model")
    problems = [problem for value in custom if (problem := check_custom_model(value, folder, where)) is not None]
    if custom and folder is None and profile is not None and not problems:
        message = f"model {custom[0]!r} is your own, but neither the sweep nor cluster {profile.name} says where it is"
        problems.append(ConfigError(message, where=where, hint='set model_folder = "." at the top of the sweep'))
    return problems


def custom_model_folder(sweep: Sweep, profile: ClusterProfile | None) -> Path | None:
    """Return the folder of users' own models: the sweep's setting takes precedence over the profile's."""
    if sweep.model_folder is not None:
        return sweep.model_folder
    return Path(profile.model_folder) if profile is not None and profile.model_folder else None


def _missing_parameter_problems(sweep: Sweep) -> list[HpcbenchError]:
    problems: list[HpcbenchError] = []
    for location, parameters in sweep.kinds_of_points():
        if sweep.workload(location) == COLLECTIVES:
            continue
        missing = [name for name in REQUIRED_PARAMETERS if (name,) not in parameters]
        hint = "set it in [fixed] or [grid]"
        problems += [sweep.source.error(f"{name} is missing", *location, hint=hint) for name in missing]
        sizes = sum((name,) in parameters for name in BATCH_SIZE_PARAMETERS)
        if sizes != 1:
            message = f"batch_size or global_batch_size: {'both are set' if sizes else 'neither is set'}"
            hint = "batch_size is per replica, global_batch_size of all replicas"
            problems.append(sweep.source.error(message, *location, hint=hint))
    return problems


def _option_problems(sweep: Sweep, table: str, options: Mapping[str, Option], unknown: str) -> list[HpcbenchError]:
    """Settings of ``table`` of a wrong type, and with the text ``unknown`` those that are not among ``options``."""
    names = {parameter[1] for _, settings in sweep.settings() for parameter in settings if parameter[0] == table}
    problems: list[HpcbenchError] = []
    for name in sorted(names):
        where = sweep.where(table, name)
        if name not in options and unknown:
            hint = parameter_hint(name, options if table == "parameters" else None, options)
            problems.append(ConfigError(f"{unknown} {name!r}", where=where, hint=hint))
        for value in sweep.values(table, name) if name in options else ():
            if not options[name].accepts(value):
                message = f"{table}.{name}: {options[name].expected()} expected, not {toml_literal(value)}"
                problems.append(ConfigError(message, where=where))
    return problems
