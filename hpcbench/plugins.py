"""Packages of third parties that add strategies, schedulers, models or data sets, found by their entry points."""

from __future__ import annotations

import importlib
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import TypeVar

from hpcbench.errors import ConfigError

EntryT = TypeVar("EntryT")
GROUPS = ("hpcbench.strategies", "hpcbench.schedulers", "hpcbench.models", "hpcbench.datasets")


@cache
def _modules_by_group() -> dict[str, dict[str, str]]:
    """The module of each entry point by group and name; the folders of installed packages are read once."""
    found: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    installed = metadata.entry_points()
    for group, modules in found.items():
        for point in installed.select(group=group):
            # A folder that is on the path twice lists its packages twice.
            if modules.setdefault(point.name, point.value) != point.value:
                raise ConfigError(
                    f"two packages have an entry point {point.name!r} of {group}: "
                    f"{modules[point.name]} and {point.value}",
                    hint="uninstall one of them",
                )
    return found


def plugin_modules(group: str) -> dict[str, str]:
    """Return the modules that the entry points of ``group`` name, by the names of the entry points."""
    return _modules_by_group()[group]


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


def plugin_table(group: str, module: str, name: str, kind: type[EntryT]) -> dict[str, EntryT]:
    """Return the dictionary ``name`` of a plug-in's module.

    Raises:
        ConfigError: The module cannot be imported, or has no such dictionary of texts and values of ``kind``.
    """
    table = getattr(load_plugin(group, module), name, None)
    if isinstance(table, dict) and all(isinstance(value, kind) for value in table.values()):
        return table
    raise ConfigError(
        f"the plug-in {module} of {group}: {name} is not a dictionary of {kind.__name__} by name",
        hint="update it, or uninstall its package",
    )


def add_plugins(group: str, name: str, kind: type[EntryT], entries: dict[str, EntryT]) -> None:
    """Add the dictionary ``name`` of each plug-in of ``group`` to ``entries``.

    Raises:
        ConfigError: As ``plugin_table``; or a name is there already.
    """
    for _, module in sorted(plugin_modules(group).items()):
        added = plugin_table(group, module, name, kind)
        if taken := sorted(entries.keys() & added.keys()):
            raise ConfigError(
                f"the plug-in {module} of {group} has {taken[0]!r}, which is there already",
                hint="rename it, or uninstall one of the two packages",
            )
        entries.update(added)
