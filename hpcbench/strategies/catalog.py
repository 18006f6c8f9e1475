"""The registry of strategies, calibration probes and models: one entry per name.
The modules ``train`` and ``cost`` of a family are imported on use: a login node reads the registry without torch."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from hpcbench.config.run_spec import OptionValue, RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.plugins import load_plugin, plugin_modules, plugin_table
from hpcbench.strategies.probes import entry as probes
from hpcbench.strategies.strategy_entry import HybridAlias, Parallelism, StrategyEntry

FAMILIES = (
    "hpcbench.strategies.data",
    "hpcbench.strategies.sharded",
    "hpcbench.strategies.fairscale",
    "hpcbench.strategies.horovod",
    "hpcbench.strategies.channel",
    "hpcbench.strategies.spatial",
    "hpcbench.strategies.tensor",
    "hpcbench.strategies.pipeline",
)
"""The packages of the families, in the order of tables."""
STRATEGIES: dict[str, StrategyEntry] = {}
PROBES: dict[str, StrategyEntry] = dict(probes.STRATEGIES)
"""Runs of a calibration instead of trainings."""
COLLECTIVES = probes.COLLECTIVES
WORKLOADS = {
    "command": StrategyEntry(own_degree=None, description="the sweep's [command] instead of a training"),
    COLLECTIVES: probes.COLLECTIVES_ENTRY,
}
"""The strategies of runs that are no trainings, by their workload; no sweep names them as its strategy."""
ALIASES: dict[str, HybridAlias] = {}
"""Names of hybrids; a resolved run has the strategy's own name."""
_PACKAGES: dict[str, str] = dict.fromkeys(PROBES, "hpcbench.strategies.probes")
"""The package of each strategy, which has the modules ``entry``, ``train`` and, if runs are predicted, ``cost``."""


def _register_family(package: str, entries: dict[str, StrategyEntry], aliases: dict[str, HybridAlias]) -> None:
    for name in (*entries, *aliases):
        if name in (*_PACKAGES, *ALIASES):
            raise ConfigError(
                f"two packages have a strategy {name!r}: {_PACKAGES.get(name, 'hpcbench.strategies')} and {package}",
                hint="uninstall one of them, or rename its strategy",
            )
    STRATEGIES.update(entries)
    ALIASES.update(aliases)
    _PACKAGES.update(dict.fromkeys(entries, package))


def _register_plugin(package: str) -> None:
    group, module = "hpcbench.strategies", f"{package}.entry"
    has_aliases = hasattr(load_plugin(group, module), "ALIASES")
    aliases = plugin_table(group, module, "ALIASES", HybridAlias) if has_aliases else {}
    _register_family(package, plugin_table(group, module, "STRATEGIES", StrategyEntry), aliases)


for _package in FAMILIES:
    _entries = importlib.import_module(f"{_package}.entry")
    _register_family(_package, _entries.STRATEGIES, getattr(_entries, "ALIASES", {}))
for _, _package in sorted(plugin_modules("hpcbench.strategies").items()):
    _register_plugin(_package)


def load_member(key: str, module: str, table: str) -> Any:
    """Return what ``table`` of a module of the strategy's family has for ``key``; ``None`` where there is none.

    The typed functions are ``worker.strategy.resolve_runtime`` and ``predict.strategy_cost.find_cost``: this module
    imports neither torch nor the oracle.
    """
    name = ALIASES[key].strategy if key in ALIASES else key
    get_strategy(name)
    package = _PACKAGES.get(name)
    if package is None or importlib.util.find_spec(f"{package}.{module}") is None:
        return None
    return getattr(importlib.import_module(f"{package}.{module}"), table, {}).get(name)


def selectable_strategies() -> dict[str, StrategyEntry]:
    """Return every name that a sweep may use, with the entry that it stands for."""
    return {**STRATEGIES, **PROBES, **{name: STRATEGIES[alias.strategy] for name, alias in ALIASES.items()}}


def representative(parallelism: Parallelism) -> str:
    """Return the key of the strategy that hpcbench itself chooses for ``parallelism``.

    >>> representative("single_device")
    'single'
    """
    return next(key for key, entry in STRATEGIES.items() if entry.represents == parallelism)


SINGLE_DEVICE = representative("single_device")
"""The strategy that every speed-up, and the overhead of every other strategy, refers to."""


def get_strategy(key: str) -> StrategyEntry:
    """Return the entry of ``key``, a strategy, probe or alias; ``ConfigError`` with the nearest key if unknown."""
    alias = ALIASES.get(key)
    if alias is not None:
        return STRATEGIES[alias.strategy]
    entry = STRATEGIES.get(key) or PROBES.get(key) or WORKLOADS.get(key)
    if entry is None:
        raise ConfigError(f"unknown strategy {key!r}", hint=did_you_mean(key, selectable_strategies()))
    return entry


def options_with_defaults(spec: RunSpec) -> dict[str, OptionValue]:
    """The options of the run's strategy, defaults filled in."""
    return {name: option.default for name, option in get_strategy(spec.strategy).options.items()} | spec.options


def exclusion_reason(spec: RunSpec) -> str | None:
    """Return the reason why the run's strategy cannot execute it, as far as integers and names determine it."""
    entry = get_strategy(spec.strategy)
    return None if entry.exclusion is None else entry.exclusion(spec)
