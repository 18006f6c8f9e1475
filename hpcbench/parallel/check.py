"""Names and options that a sweep uses, against the registry: typing errors end the command, they drop no point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.load import Sweep
from hpcbench.config.profiles import cluster_paths
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.parallel.catalog import models, named
from hpcbench.parallel.datasets import DATASETS
from hpcbench.parallel.entry import Option
from hpcbench.parallel.own_model import check_own, is_own

REQUIRED = ("model", "dataset", "strategy")
BATCH_SIZES = ("batch_size", "global_batch_size")


def check_names(sweep: Sweep, profile: ClusterProfile | None = None) -> None:
    """Raise ``ConfigErrors`` with every name in ``sweep`` that does not exist and every parameter that is missing."""
    known: dict[str, Iterable[str]] = {"model": models(), "dataset": DATASETS, "strategy": named()}
    if sweep.values("rehearse"):
        known["rehearse"] = cluster_paths()
    if profile is not None:
        known |= {"partition": profile.partitions, "environment": profile.environments}
    problems = [*_missing(sweep), *_own_models(sweep, profile)]
    for name, choices in known.items():
        for value in sweep.values(name):
            if value not in choices and not (name == "model" and is_own(value)):
                where = f" of cluster {profile.name}" if profile and name in ("partition", "environment") else ""
                problems.append(
                    ConfigError(
                        f"unknown {name}{where}: {value!r}",
                        where=sweep.where(name),
                        hint=did_you_mean(value, choices),
                    )
                )
    problems += _option_problems(sweep, "options", "strategy", {key: entry.options for key, entry in named().items()})
    problems += _option_problems(
        sweep, "model_options", "model", {key: entry.options for key, entry in models().items()}
    )
    if problems:
        raise ConfigErrors(problems)


def _own_models(sweep: Sweep, profile: ClusterProfile | None) -> list[HpcbenchError]:
    """Users' own models and the folder that they are in; a sweep without a profile may leave that to the profile."""
    own = [value for value in sweep.values("model") if is_own(value)]
    folder = model_folder(sweep, profile)
    if folder is not None and not folder.is_dir() and (own or sweep.model_folder):
        where = sweep.source.where(("model_folder",)) if sweep.model_folder else f"cluster {profile and profile.name}"
        return [ConfigError(f"model_folder: there is no folder {folder}", where=where)]
    where = sweep.where("model")
    found: list[HpcbenchError] = [problem for value in own if (problem := check_own(value, folder, where))]
    if own and folder is None and profile is not None and not found:
        message = f"model {own[0]!r} is your own, but neither the sweep nor cluster {profile.name} says where it is"
        found.append(ConfigError(message, where=where, hint='set model_folder = "." at the top of the sweep'))
    return found


def model_folder(sweep: Sweep, profile: ClusterProfile | None) -> Path | None:
    """Where users' own models are: the sweep's word counts before the profile's."""
    if sweep.model_folder is not None:
        return sweep.model_folder
    return Path(profile.model_folder) if profile is not None and profile.model_folder else None


def _missing(sweep: Sweep) -> list[HpcbenchError]:
    problems: list[HpcbenchError] = []
    for place, given in sweep.kinds_of_points():
        problems += [
            ConfigError(f"{name} is missing", where=sweep.source.where(place), hint="set it in [fixed] or [grid]")
            for name in REQUIRED
            if (name,) not in given
        ]
        sizes = [name for name in BATCH_SIZES if (name,) in given]
        if len(sizes) != 1:
            said = "both are set" if sizes else "neither is set"
            hint = "batch_size is per replica, global_batch_size of all replicas"
            where = sweep.source.where(place)
            problems.append(ConfigError(f"batch_size or global_batch_size: {said}", where=where, hint=hint))
    return problems


def _option_problems(
    sweep: Sweep, table: str, owner: str, options: Mapping[str, Mapping[str, Option]]
) -> list[HpcbenchError]:
    known: dict[str, Option] = {}
    for key in sweep.values(owner):
        known.update(options.get(key, {}))
    names = {parameter[1] for _, settings in sweep.settings() for parameter in settings if parameter[0] == table}
    problems: list[HpcbenchError] = []
    for name in sorted(names):
        where = sweep.where(table, name)
        if name not in known:
            if owner == "model" and any(is_own(key) for key in sweep.values(owner)):
                continue
            message = f"no {owner} of this sweep has the option {name!r}"
            problems.append(ConfigError(message, where=where, hint=did_you_mean(name, known)))
            continue
        for value in sweep.values(table, name):
            if not _fits(known[name], value):
                problems.append(
                    ConfigError(f"{table}.{name}: {_wanted(known[name])} expected, not {_as_toml(value)}", where=where)
                )
    return problems


_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _wanted(option: Option) -> str:
    return " or ".join(_as_toml(choice) for choice in option.choices) if option.choices else _WANTED[option.kind]


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _fits(option: Option, value: Any) -> bool:
    if option.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True
    return type(value) is option.kind and (not option.choices or value in option.choices)
