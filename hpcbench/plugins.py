"""Packages of third parties that add strategies, schedulers, models or data sets, found by their entry points."""

from __future__ import annotations

import importlib
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

from hpcbench.errors import ConfigError

GROUPS = ("hpcbench.strategies", "hpcbench.schedulers", "hpcbench.models", "hpcbench.datasets")


@cache
def _entry_points() -> dict[str, dict[str, str]]:
    """The value of each entry point by group and name; the folders of all installed packages are read once."""
    return {group: {point.name: point.value for point in metadata.entry_points(group=group)} for group in GROUPS}


def plugin_modules(group: str) -> dict[str, str]:
    """Return the modules that the entry points of ``group`` name, by the names of the entry points."""
    return _entry_points()[group]


def load_plugin(group: str, module: str) -> ModuleType:
    """Import ``module``, which an entry point of ``group`` names.

    Raises:
        ConfigError: It cannot be imported; the message has its error.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"the plug-in {module} of {group} cannot be imported: {type(error).__name__}: {error}",
            hint="update it, or uninstall its package",
        ) from error


def add_plugins(group: str, table: str, entries: dict[str, Any]) -> None:
    """Add to ``entries`` the dictionary ``table`` of each module of ``group``.

    Raises:
        ConfigError: A module cannot be imported, or a name is there already.
    """
    for _, module in sorted(plugin_modules(group).items()):
        added = getattr(load_plugin(group, module), table)
        if taken := sorted(entries.keys() & added.keys()):
            raise ConfigError(
                f"the plug-in {module} of {group} has {taken[0]!r}, which is there already",
                hint="rename it, or uninstall one of the two packages",
            )
        entries.update(added)
