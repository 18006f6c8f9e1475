"""The cluster profile ``clusters/<name>.toml``: its schema, the search for it by name, inheritance by ``extends``,
the user's accounts, and the cluster of a command that names none.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from hpcbench.config import profile_tables as tables
from hpcbench.config.toml_tables import (
    NAME_PATTERN,
    Directives,
    EnvironmentVariables,
    Minutes,
    SingleLineText,
    TomlSource,
    TomlTable,
    VariableName,
    load_table,
    read_toml,
    validate_table,
)
from hpcbench.errors import ConfigError, HpcbenchError, did_you_mean
from hpcbench.paths import PROJECT_FILE, expand_home, project_folder, resolve_beside, search_folders, user_folder

_T = TypeVar("_T", bound=TomlTable)


class LoginNodeMatch(TomlTable):
    """Signs that this machine is a login node of the cluster; one match is enough."""

    hosts: list[str] = []
    """Regular expressions for the whole host name, with or without its domain."""
    variables: EnvironmentVariables = {}
    """Variables of the environment and their values."""
    files: dict[str, SingleLineText] = {}
    """Files and what they hold."""

    @field_validator("hosts")
    @classmethod
    def _compiles(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            try:
                re.compile(host)
            except re.error as error:
                raise ValueError(f"{host!r} is not a regular expression: {error}") from None
        return hosts


class ClusterProfile(TomlTable):
    """The description of a cluster: how jobs run on it, and the figures for predictions.

    Figures are in bytes, seconds, FLOP/s and bytes/s, time limits in minutes. A partition overrides the tables of the
    cluster: `partition` and `environment` return all that holds for the jobs of one.
    """

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    extends: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """Another profile, whose tables this one is laid over, key by key."""
    description: str = ""
    verified: Literal["none", "docs", "run"] = "none"
    """Evidence for the values: never checked, read in the site's documentation, or run there."""
    source: str = ""
    """Source of the values."""
    date: str = ""
    """Date on which the values were looked up."""
    match: LoginNodeMatch = LoginNodeMatch()
    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of device that the ranks compute on; `cuda` includes AMD's devices, as in torch."""
    launcher: Literal["srun", "torchrun", "mpirun", "ibrun", "fork"] = "srun"
    """Program that starts the ranks inside a job; ibrun is TACC's. `fork` is hpcbench's own, for one machine without a
    scheduler: it imports torch once for all ranks."""
    launcher_args: list[SingleLineText] = []
    """More arguments for the launcher, one word each."""
    scheduler: tables.SchedulerConfig = tables.SchedulerConfig()
    account: SingleLineText | None = None
    """Keep yours out of profiles that are shared: `[accounts]` in `~/.config/hpcbench/config.toml` is the place."""
    account_required: bool = False
    """Whether the site refuses jobs that name no account."""
    default_partition: str | None = None
    """A key of `partitions`; without one the scheduler's own default is used."""
    partitions: dict[Annotated[str, Field(pattern=NAME_PATTERN)], tables.PartitionConfig] = {}
    node: tables.NodeConfig = tables.NodeConfig()
    data_folder: SingleLineText | None = None
    """Folder of the sample files, as the nodes see it; `~` and `$VARIABLES` are the job's. `$HPCBENCH_DATA` overrides
    it."""
    devices: dict[str, tables.DeviceConfig] = {}
    links: tables.LinksConfig = tables.LinksConfig()
    network: tables.NetworkConfig = tables.NetworkConfig()
    request: tables.ResourceRequest = tables.ResourceRequest()
    binding: tables.BindingConfig = tables.BindingConfig()
    directives: Directives = {}
    """More #SBATCH directives: `true` writes one without a value, a list repeats it."""
    environments: dict[Annotated[str, Field(pattern=NAME_PATTERN)], tables.EnvironmentConfig] = {}
    default_environment: str | None = None
    setup: list[str] = []
    """Shell lines of the profile's author that every job runs before its environment's modules."""
    env: EnvironmentVariables = {}
    """Variables that every job gets."""
    env_unset: list[VariableName] = []
    """Variables that no job must have."""
    model_folder: Annotated[SingleLineText, Field(min_length=1)] | None = None
    """Folder of the module that `model = "module:function"` of a sweep names, relative to this file."""
    time_limit_min: Minutes = 30.0
    """Limit of a run that names none, nor its partition; never more than its partition allows."""
    budget_node_hours: Annotated[float, Field(gt=0)] | None = None
    """Maximum cost of one submit at the runs' time limits; `--yes` overrides it."""

    @model_validator(mode="after")
    def _names_exist(self) -> ClusterProfile:
        for key, table in (("default_partition", "partitions"), ("default_environment", "environments")):
            chosen, names = getattr(self, key), getattr(self, table)
            if chosen is not None and chosen not in names:
                raise ValueError(f"{key} = {chosen!r} is not among the {table}: {', '.join(sorted(names)) or 'none'}")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> ClusterProfile:
        if self.launcher == "fork" and (self.launcher_args or not self.scheduler.traits.runs_here):
            raise ValueError(
                f"launcher = 'fork' is for scheduler.kind = 'local', without launcher_args: this profile's kind is "
                f"{self.scheduler.kind!r}, its launcher_args are {self.launcher_args}"
            )
        for key in (None, *self.partitions):
            partition = self.partition(key)
            request, node = partition.request, partition.node
            if request.gpus == "gres-typed" and not (node.gres_type or node.device_type):
                place = partition.place("request", "gpus")
                raise ValueError(f"{place} = 'gres-typed' needs node.gres_type or node.device_type")
            if node.ranks_per_device > 1 and not self.scheduler.traits.runs_here:
                raise ValueError(
                    f"{partition.place('node', 'ranks_per_device')} = {node.ranks_per_device} is for scheduler.kind = "
                    f"'local', this profile's is {self.scheduler.kind!r}: give every rank a device"
                )
            if request.gpus_on != "job" and self.launcher in ("mpirun", "ibrun"):
                place = partition.place("request", "gpus_on")
                raise ValueError(f"{place} = {request.gpus_on!r} speaks to srun, but launcher = {self.launcher!r}")
            self._check_amounts(partition)
        longest_min = [one.max_time_min for one in self.partitions.values()]
        limits_min = [minutes for minutes in longest_min if minutes is not None]
        is_bounded = limits_min and len(limits_min) == len(longest_min) and "time_limit_min" in self.model_fields_set
        if is_bounded and self.time_limit_min > max(limits_min):
            raise ValueError(
                f"time_limit_min = {self.time_limit_min:g} is longer than any partition allows: the largest "
                f"max_time_min is {max(limits_min):g}"
            )
        order, devices = self.binding.device_order, self.node.devices
        if order and devices is not None and sorted(order) != list(range(devices)):
            raise ValueError(f"binding.device_order = {order} does not name each of the {devices} devices once")
        return self

    def _check_amounts(self, partition: tables.Partition) -> None:
        """Raise ``ValueError`` for amounts that the partition's nodes do not have."""
        request, node, where = partition.request, partition.node, f" of partition {partition.key}" * bool(partition.key)
        is_used = partition.key is not None or not self.partitions
        if is_used and request.memory == "node" and not (request.memory_bytes or node.memory_bytes):
            raise ValueError(f"{partition.place('request', 'memory')} = 'node'{where} needs node.memory_bytes")
        cores, place = node.cores, partition.place("request", "cpus_per_task")
        if cores is not None and request.cpus_per_task is not None and request.cpus_per_task > cores:
            raise ValueError(f"{place} = {request.cpus_per_task}{where} is above node.cores, {cores}")
        taken = (request.cpus_per_device or 0) * (node.devices or 0)
        if cores is not None and taken > cores:
            place, devices = partition.place("request", "cpus_per_device"), f"{taken} cores for {node.devices} devices"
            raise ValueError(f"{place} = {request.cpus_per_device}{where} takes {devices}, and node.cores is {cores}")
        if node.device_type is not None and self.devices and node.device_type not in self.devices:
            place, devices = partition.place("node", "device_type"), ", ".join(self.devices)
            raise ValueError(f"{place} = {node.device_type!r}{where} is not among the devices: {devices}")
        tables.check_partition(partition, self.scheduler)
        own_min, most_min = partition.own.time_limit_min, partition.max_time_min
        if own_min is not None and most_min is not None and own_min > most_min:
            where = f"partitions.{partition.key}.time_limit_min"
            raise ValueError(f"{where} = {own_min:g} is longer than its max_time_min, {most_min:g}")

    def partition(self, key: str | None) -> tables.Partition:
        """The partition called ``key``, else the default one, with the cluster's values where it has none."""
        chosen = key or self.default_partition
        own = self.partitions[chosen] if chosen else tables.PartitionConfig()
        values = dict(own) | {
            "key": chosen,
            "own": own,
            "name": own.name or chosen,
            "node": _overlay_table(self.node, own.node),
            "request": _overlay_table(self.request, own.request),
            "directives": {**self.directives, **own.directives},
            "time_limit_min": own.time_limit_min or self.time_limit_min,
        }
        return tables.Partition.model_construct(**values)

    def environment(self, key: str | None) -> tables.Environment:
        """The environment called ``key``, the default one, or the submitter's own."""
        chosen = key or self.default_environment
        own = self.environments[chosen] if chosen else tables.EnvironmentConfig()
        python = own.python or (f"{own.venv}/bin/python" if own.venv else None)
        image_python = "python3" if own.container and own.container.kind else None
        values = dict(own) | {
            "key": chosen,
            "python": python or image_python or sys.executable,
            "env": {**self.network.variables, **self.env, **own.env},
            "env_unset": [*self.env_unset, *own.env_unset],
            "cluster_setup": self.setup,
        }
        return tables.Environment.model_construct(**values)


def _overlay_table(base: _T, overlay: _T | None) -> _T:
    if overlay is None:
        return base
    set_values: dict[str, Any] = {name: getattr(overlay, name) for name in overlay.model_fields_set}
    return base.model_copy(update=set_values)


def is_profile(data: Mapping[str, Any], path: Path) -> bool:
    """Whether a TOML file is a profile: it lies in ``clusters`` or has keys that no sweep has, and it has no points."""
    is_there = "clusters" in [folder.name for folder in path.resolve().parents[:2]]
    own_keys = ClusterProfile.model_fields.keys() - {"name", "description", "model_folder"}
    has_points = not data.keys().isdisjoint({"fixed", "grid", "zip", "include", "command"})
    return not has_points and (is_there or not own_keys.isdisjoint(data))


class UserConfig(TomlTable):
    """The file ``~/.config/hpcbench/config.toml``: settings of one person, which no shared profile contains."""

    accounts: dict[str, SingleLineText] = {}
    """A cluster's name and the account that jobs there are charged to."""
    cluster: Annotated[SingleLineText, Field(min_length=1)] | None = None
    """The cluster of commands without ``--cluster``, where the project names none."""


def find_cluster_profiles() -> dict[str, Path]:
    """Every profile that can be named, the one that wins: the project's, the user's, the shipped.

    Profiles may lie in folders one below (``historic``); they are named without it.
    """
    path_by_name: dict[str, Path] = {}
    for path in _profile_candidates():
        path_by_name.setdefault(path.stem, path)
    return path_by_name


def _profile_candidates() -> list[Path]:
    return [
        path
        for folder in search_folders("clusters")
        for pattern in ("*.toml", "*/*.toml")
        for path in sorted(folder.glob(pattern))
    ]


def load_cluster(name: str) -> tuple[ClusterProfile, TomlSource]:
    """Load a cluster profile with the tables of the profile that it extends.

    Args:
        name: The name of a profile of the project, the user or the package; or the path of its file, which contains
            a ``/`` or ends in ``.toml``.

    Returns:
        The profile, and the source that locates its keys in the file for messages.

    Raises:
        ConfigError: There is no such profile (the hint is the nearest name), or the file cannot be read.
        ConfigErrors: Keys or values of the file are wrong; it contains all of them.

    Example:
        >>> profile, source = load_cluster("abci-v100")
        >>> profile.device, source.path.name
        ('cuda', 'abci-v100.toml')
    """
    if is_profile_path(name):
        path = expand_home(name)
        if not path.is_file():
            near = sorted(str(other) for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
            raise ConfigError(f"no cluster profile {name!r}", hint=did_you_mean(name, near))
        return load_cluster_file(path)
    paths = find_cluster_profiles()
    if not re.match(NAME_PATTERN, name) or name not in paths:
        folders = ", ".join(str(folder) for folder in search_folders("clusters"))
        raise ConfigError(f"unknown cluster {name!r}", hint=f"{did_you_mean(name, paths)} (looked in {folders})")
    return load_cluster_file(paths[name])


def is_profile_path(name: str) -> bool:
    """Whether ``name`` is a profile's path instead of its name."""
    return name.endswith(".toml") or os.sep in name


def load_cluster_file(path: Path) -> tuple[ClusterProfile, TomlSource]:
    """The profile in a file, laid over the one that it extends; its name must be the file's.

    Without an account in it, the user's configuration gives one: for this name, or for that of the extended profile.
    """
    data, source, names = read_profile_data(path)
    profile = validate_table(ClusterProfile, data, source)
    if profile.name != path.stem:
        message = f"name = {profile.name!r}, but the file is called {path.name}"
        raise source.error(message, "name", hint="results are stored under the name: give both the same")
    if profile.account is None:
        accounts = load_user_config().accounts
        account = next((accounts[name] for name in names if name in accounts), None)
        profile = profile.model_copy(update={"account": account})
    return profile, source


def read_profile_data(path: Path, above: Sequence[Path] = ()) -> tuple[dict[str, Any], TomlSource, list[str]]:
    """Return the data of a profile over its base's, the source of its messages, and both names, its own first."""
    data, source = read_toml(path)
    folder = data.get("model_folder")
    if isinstance(folder, str) and folder:
        data["model_folder"] = str(resolve_beside(path, folder))
    base = data.get("extends")
    if not isinstance(base, str):
        return data, source, [path.stem]
    chain = (*above, path.resolve())
    inherited, _, names = read_profile_data(_find_base_profile(base, path, chain, source), chain)
    return merge_tables(inherited, data), source, [path.stem, *names]


def _find_base_profile(name: str, path: Path, chain: Sequence[Path], source: TomlSource) -> Path:
    """The file of the profile that ``path`` extends: beside it, or wherever profiles are; never one of ``chain``."""
    candidates = [path.parent / f"{name}.toml", *_profile_candidates()]
    others = [other for other in candidates if other.is_file() and other.resolve() not in chain]
    base = next((other for other in others if other.stem == name), None)
    if base is None:
        stems = [above.stem for above in chain]
        if name in stems:
            circle = " -> ".join([*stems[stems.index(name) :], name])
            raise source.error(f"extends = {name!r}: profiles extend each other in a circle: {circle}", "extends")
        problem = f"extends = {name!r}: there is no such profile"
        raise source.error(problem, "extends", hint=did_you_mean(name, {other.stem for other in others}))
    return base


def merge_tables(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``overlay``; tables are merged key by key, lists are replaced."""
    result = dict(base)
    for key, value in overlay.items():
        below = result.get(key)
        result[key] = merge_tables(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def load_user_config() -> UserConfig:
    """The user's configuration; empty where there is none."""
    path = user_folder() / "config.toml"
    # Path.is_file raises where the folder may not be entered.
    if not os.path.isfile(path):  # noqa: PTH113
        return UserConfig()
    return load_table(UserConfig, path)[0]


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
            return DefaultCluster(_beside(project, name), f"{project} sets it")
    user = user_folder() / "config.toml"
    if name := load_user_config().cluster:
        return DefaultCluster(_beside(user, name), f"{user} sets it")
    if job := os.environ.get("SLURM_JOB_ID"):
        return DefaultCluster(LOCAL_CLUSTER, f"this shell is inside job {job}")
    matches = matching_profiles()
    if len(matches) > 1:
        raise ConfigError(
            f"this machine, {socket.getfqdn()}, is a login node of {len(matches)} clusters: {', '.join(matches)}",
            hint=f'name one: --cluster {matches[0]}, {CLUSTER_VARIABLE}, or cluster = "{matches[0]}" in {project}',
        )
    if matches:
        return DefaultCluster(matches[0], f"this machine, {socket.getfqdn()}, is a login node of it")
    return DefaultCluster(LOCAL_CLUSTER, "--cluster is not given, and this machine is no login node of a known cluster")


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
