"""Names and options that a sweep uses, against the registry: typing errors end the command, they drop no point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.load import Sweep
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.parallel.catalog import STRATEGIES, Option, models
from hpcbench.parallel.datasets import DATASETS

REQUIRED = ("model", "dataset", "strategy")
BATCH_SIZES = ("batch_size", "global_batch_size")


def check_names(sweep: Sweep, profile: ClusterProfile | None = None) -> None:
    """Raise ``ConfigErrors`` with every name in ``sweep`` that does not exist and every parameter that is missing."""
    known: dict[str, Iterable[str]] = {"model": models(), "dataset": DATASETS, "strategy": STRATEGIES}
    if profile is not None:
        known |= {"partition": profile.partitions, "environment": profile.environments}
    problems = _missing(sweep)
    for name, choices in known.items():
        for value in sweep.values(name):
            if value not in choices:
                where = f" of cluster {profile.name}" if profile and name in ("partition", "environment") else ""
                problems.append(
                    ConfigError(
                        f"unknown {name}{where}: {value!r}",
                        where=sweep.where(name),
                        hint=did_you_mean(value, choices),
                    )
                )
    problems += _option_problems(
        sweep, "options", "strategy", {key: entry.options for key, entry in STRATEGIES.items()}
    )
    problems += _option_problems(
        sweep, "model_options", "model", {key: entry.options for key, entry in models().items()}
    )
    if problems:
        raise ConfigErrors(problems)


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
            message = f"no {owner} of this sweep has the option {name!r}"
            problems.append(ConfigError(message, where=where, hint=did_you_mean(name, known)))
            continue
        for value in sweep.values(table, name):
            if not _fits(known[name], value):
                wanted = f"one of {known[name].choices}" if known[name].choices else known[name].kind.__name__
                problems.append(ConfigError(f"{table}.{name}: {wanted} expected, not {value!r}", where=where))
    return problems


def _fits(option: Option, value: Any) -> bool:
    if option.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True
    return type(value) is option.kind and (not option.choices or value in option.choices)
