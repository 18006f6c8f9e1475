"""Clusters' profiles by name or file: the project's, the user's, the shipped; what they extend; the user's accounts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcbench.config.cluster import NAME, ClusterProfile
from hpcbench.config.table import OneLine, Table
from hpcbench.config.tomlfile import read_toml
from hpcbench.config.validate import Source, validate
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.paths import beside, search_folders, user_folder


class UserConfig(Table):
    """``~/.config/hpcbench/config.toml``: what is a person's own and belongs into no shared profile."""

    accounts: dict[str, OneLine] = {}
    """A cluster's name and the account that jobs there are charged to."""


def cluster_paths() -> dict[str, Path]:
    """Every profile that can be named, the one that wins: the project's, the user's, the shipped.

    Profiles may lie in folders one below (``historic``); they are named without it.
    """
    found: dict[str, Path] = {}
    for path in _candidates():
        found.setdefault(path.stem, path)
    return found


def _candidates() -> list[Path]:
    return [
        path
        for folder in search_folders("clusters")
        for pattern in ("*.toml", "*/*.toml")
        for path in sorted(folder.glob(pattern))
    ]


def load_cluster(name: str) -> tuple[ClusterProfile, Source]:
    """The profile called ``name``. Raises ``ConfigError`` with the nearest name where there is none."""
    known = cluster_paths()
    if not re.match(NAME, name) or name not in known:
        folders = ", ".join(str(folder) for folder in search_folders("clusters"))
        raise ConfigError(f"unknown cluster {name!r}", hint=f"{did_you_mean(name, known)} (looked in {folders})")
    return load_cluster_file(known[name])


def load_cluster_file(path: Path) -> tuple[ClusterProfile, Source]:
    """The profile in a file, laid over the one that it extends; its name must be the file's.

    Where it says no account, the user's own configuration may: for this name, or for that of what it extends.
    """
    data, source, names = _with_base(path, ())
    profile = validate(ClusterProfile, data, source)
    if profile.name != path.stem:
        raise ConfigError(
            f"name = {profile.name!r}, but the file is called {path.name}",
            where=source.where(("name",)),
            hint="results are stored under the name: give both the same",
        )
    if profile.account is None:
        accounts = user_accounts()
        account = next((accounts[name] for name in names if name in accounts), None)
        profile = profile.model_copy(update={"account": account})
    return profile, source


def _with_base(path: Path, above: Sequence[Path]) -> tuple[dict[str, Any], Source, list[str]]:
    """The data of a profile over its base's, where to say so when it is wrong, and the names of both, its own first."""
    data, text = read_toml(path)
    source = Source(path, text)
    folder = data.get("model_folder")
    if isinstance(folder, str) and folder:
        data["model_folder"] = str(beside(path, folder))
    base = data.get("extends")
    if not isinstance(base, str):
        return data, source, [path.stem]
    chain = (*above, path.resolve())
    inherited, _, names = _with_base(_base_path(base, path, chain, source), chain)
    return merged(inherited, data), source, [path.stem, *names]


def _base_path(name: str, path: Path, chain: Sequence[Path], source: Source) -> Path:
    """The file of the profile that ``path`` extends: beside it, or wherever profiles are; never one of ``chain``."""
    candidates = [path.parent / f"{name}.toml", *_candidates()]
    found = next((one for one in candidates if one.stem == name and one.is_file() and one.resolve() not in chain), None)
    if found is None:
        named = [one.stem for one in candidates if one.is_file() and one.resolve() not in chain]
        problem = f"extends = {name!r}: that is the profile itself, and there is no other of that name"
        if name not in (one.stem for one in chain):
            problem = f"extends = {name!r}: there is no such profile"
        raise ConfigError(problem, where=source.where(("extends",)), hint=did_you_mean(name, set(named)))
    return found


def merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """``own`` over ``base``: tables key by key, everything else whole."""
    result = dict(base)
    for key, value in own.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def user_accounts() -> dict[str, str]:
    """The accounts in the user's configuration; empty where there is none."""
    path = user_folder() / "config.toml"
    # Path.is_file raises where the folder may not be entered.
    if not os.path.isfile(path):  # noqa: PTH113
        return {}
    data, text = read_toml(path)
    return dict(validate(UserConfig, data, Source(path, text)).accounts)
