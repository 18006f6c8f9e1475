"""Files to typed values: a sweep by its path, a cluster's profile by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcbench.config.cluster import NAME, ClusterProfile
from hpcbench.config.sweep import NESTED, SweepFile
from hpcbench.config.tomlfile import read_toml
from hpcbench.config.validate import Source, validate
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.paths import search_folders


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was written: ``fixed`` values, ``grid`` axes in the order of the file."""

    name: str
    description: str
    fixed: dict[str, Any]
    grid: dict[tuple[str, ...], list[Any]]
    """Axis path, for instance ``("nodes",)`` or ``("options", "bucket_cap_mb")``, to its values."""
    repeats: int
    source: Source

    def where(self, parameter: str, *rest: str) -> str:
        """``file:line`` of a parameter, wherever it is set."""
        table = "fixed" if parameter in self.fixed else "grid"
        return self.source.where((table, parameter, *rest))


def load_sweep(path: Path) -> Sweep:
    """Read a sweep. Raises ``ConfigErrors`` with everything that is wrong in it."""
    data, text = read_toml(path)
    source = Source(path, text)
    file = validate(SweepFile, data, source)
    fixed = file.fixed.model_dump(exclude_none=True)
    grid = _axes(file.grid.model_dump(exclude_none=True), data.get("grid", {}))
    problems: list[HpcbenchError] = [
        ConfigError(
            f"{'.'.join(axis)} is set in [fixed] and in [grid]",
            where=source.where(("grid", *axis)),
            hint="keep one of them",
        )
        for axis in grid
        if _holds(fixed, axis)
    ]
    if problems:
        raise ConfigErrors(problems)
    return Sweep(file.name, file.description, fixed, grid, file.repeats, source)


def _axes(values: dict[str, Any], written: dict[str, Any]) -> dict[tuple[str, ...], list[Any]]:
    axes: dict[tuple[str, ...], list[Any]] = {}
    for name, inner_names in written.items():
        if name in NESTED:
            axes.update({(name, inner): values[name][inner] for inner in inner_names})
        else:
            axes[(name,)] = values[name]
    return axes


def _holds(values: dict[str, Any], axis: tuple[str, ...]) -> bool:
    node: Any = values
    for key in axis:
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return True


def cluster_paths() -> dict[str, Path]:
    """Every profile that can be named, the one that wins: the project's, the user's, the shipped."""
    found: dict[str, Path] = {}
    for folder in search_folders("clusters"):
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def load_cluster(name: str) -> tuple[ClusterProfile, Source]:
    """The profile called ``name``. Raises ``ConfigError`` with the nearest name where there is none."""
    known = cluster_paths()
    if not re.match(NAME, name) or name not in known:
        folders = ", ".join(str(folder) for folder in search_folders("clusters"))
        raise ConfigError(f"unknown cluster {name!r}", hint=f"{did_you_mean(name, known)} (looked in {folders})")
    return load_cluster_file(known[name])


def load_cluster_file(path: Path) -> tuple[ClusterProfile, Source]:
    """The profile in a file; its name must be the file's."""
    data, text = read_toml(path)
    source = Source(path, text)
    profile = validate(ClusterProfile, data, source)
    if profile.name != path.stem:
        raise ConfigError(
            f"name = {profile.name!r}, but the file is called {path.name}",
            where=source.where(("name",)),
            hint="results are stored under the name: give both the same",
        )
    return profile, source
