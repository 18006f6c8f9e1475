"""The cluster of a command that names none: a variable, the project, the user, the profile that matches this machine,
or this machine itself.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hpcbench.config.cluster_profile import (
    LoginNodeMatch,
    find_cluster_profiles,
    is_profile_path,
    load_user_config,
    read_profile_data,
)
from hpcbench.config.toml_tables import SingleLineText, TomlTable, load_table
from hpcbench.errors import ConfigError, HpcbenchError
from hpcbench.paths import PROJECT_FILE, project_folder, resolve_beside, search_folders, user_folder

CLUSTER_VARIABLE = "HPCBENCH_CLUSTER"
LOCAL_CLUSTER = "local"


class ProjectConfig(TomlTable):
    """``hpcbench.toml`` in the project's folder: settings that all users of the project share."""

    cluster: Annotated[SingleLineText, Field(min_length=1)] | None = None
    """The cluster of commands without ``--cluster``: a name, or a profile's path from this file on."""


@dataclass(frozen=True)
class DefaultCluster:
    """The profile that a command without ``--cluster`` uses."""

    name: str
    """Name or path, as ``load_cluster`` takes it."""
    reason: str


def default_cluster() -> DefaultCluster:
    """The first of ``HPCBENCH_CLUSTER``, project, user, matching profile and ``local`` that names a cluster.

    Raises ``ConfigError`` if several profiles match this machine: a login node must not be trained on unasked.
    """
    if name := os.environ.get(CLUSTER_VARIABLE):
        return DefaultCluster(name, f"${CLUSTER_VARIABLE} is set")
    project = project_folder() / PROJECT_FILE
    if project.is_file():
        name = load_table(ProjectConfig, project)[0].cluster
        if name is not None:
            return DefaultCluster(_beside(project, name), f"set in {project}")
    user = user_folder() / "config.toml"
    if name := load_user_config().cluster:
        return DefaultCluster(_beside(user, name), f"set in {user}")
    if job := os.environ.get("SLURM_JOB_ID"):
        return DefaultCluster(LOCAL_CLUSTER, f"this is inside job {job}")
    matches = matching_profiles()
    if len(matches) > 1:
        raise ConfigError(
            f"this machine, {socket.getfqdn()}, is a login node of {len(matches)} clusters: {', '.join(matches)}",
            hint=f'name one: --cluster {matches[0]}, {CLUSTER_VARIABLE}, or cluster = "{matches[0]}" in {project}',
        )
    if matches:
        return DefaultCluster(matches[0], f"this machine, {socket.getfqdn()}, is a login node of it")
    return DefaultCluster(LOCAL_CLUSTER, "no cluster is set, and no profile names this machine")


def _beside(file: Path, name: str) -> str:
    return str(resolve_beside(file, name)) if is_profile_path(name) else name


def matching_profiles() -> list[str]:
    """Names of the profiles of which this machine is a login node.

    Those of the project count before the user's and the shipped, and a profile counts before the one that it extends.
    """
    profiles = find_cluster_profiles()
    for folder in search_folders("clusters"):
        bases: dict[str, list[str]] = {}
        for name, path in profiles.items():
            if folder in path.parents:
                try:
                    data, _, names = read_profile_data(path)
                    match = LoginNodeMatch.model_validate(data.get("match", {}))
                except (HpcbenchError, ValueError):
                    continue
                if is_login_node(match):
                    bases[name] = names[1:]
        extended = {base for names in bases.values() for base in names}
        if bases:
            return [name for name in bases if name not in extended]
    return []


def is_login_node(match: LoginNodeMatch, host: str | None = None, environment: Mapping[str, str] | None = None) -> bool:
    """Whether any of the host names, variables or files fit. ``host`` is the full name of this machine by default."""
    full = socket.getfqdn() if host is None else host
    short = full.partition(".")[0]
    if any(re.fullmatch(pattern, name) for pattern in match.hosts for name in (full, short)):
        return True
    variables = os.environ if environment is None else environment
    if any(variables.get(name) == value for name, value in match.variables.items()):
        return True
    return any(_file_holds(Path(name), text) for name, text in match.files.items())


def _file_holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() == text
    except OSError:
        return False
