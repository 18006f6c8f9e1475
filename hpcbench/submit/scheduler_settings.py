"""The connection to a cluster's scheduler: its settings in the profile, and the environment of its commands.

The settings are read without validating the whole profile, which takes longer than the scheduler takes to answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

import msgspec

from hpcbench.config.toml_tables import read_toml
from hpcbench.paths import search_folders

_SCRUBBED_PREFIXES = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PMI", "PMIX", "OMPI_", "TORCHELASTIC_", "SUBMITIT_")
_KEPT_NAMES = frozenset({"SLURM_CONF"})
_SCRUBBED_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def is_job_variable(name: str) -> bool:
    """Whether a variable describes a job that is not the one being submitted."""
    return name not in _KEPT_NAMES and (name in _SCRUBBED_NAMES or name.startswith(_SCRUBBED_PREFIXES))


def scrubbed_names(environment: Mapping[str, str] | None = None) -> list[str]:
    """The names that ``scrubbed_environment`` takes out."""
    return sorted(name for name in (os.environ if environment is None else environment) if is_job_variable(name))


def scrubbed_environment(
    config_file: str | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """A copy of the environment for sbatch and for local jobs. ``config_file`` becomes SLURM_CONF."""
    source = os.environ if environment is None else environment
    kept = {name: value for name, value in source.items() if not is_job_variable(name)}
    if config_file is not None:
        kept["SLURM_CONF"] = config_file
    return kept


class SchedulerSettings(Protocol):
    """The scheduler's commands and their configuration."""

    @property
    def config_file(self) -> str | None:
        """SLURM_CONF."""

    @property
    def bin_folder(self) -> str | None:
        """Where the commands are, if not on PATH."""


class HasSchedulerSettings(Protocol):
    """A whole profile, or what ``read_scheduler_settings`` finds in one."""

    @property
    def scheduler(self) -> SchedulerSettings:
        """Of the cluster."""


class _SchedulerTable(msgspec.Struct, frozen=True):
    config_file: str | None = None
    bin_folder: str | None = None


class _ProfileHead(msgspec.Struct, frozen=True):
    scheduler: _SchedulerTable = _SchedulerTable()
    extends: str | None = None


def read_scheduler_settings(cluster: str) -> HasSchedulerSettings:
    """The address in the profile of ``cluster``; mistakes elsewhere in the profile do not matter.

    Raises ``ConfigError`` where there is no such profile or its address is wrong.
    """
    paths = (folder / f"{cluster}.toml" for folder in search_folders("clusters"))
    path = next((path for path in paths if path.is_file()), None)
    if path is not None:
        try:
            profile = msgspec.convert(read_toml(path)[0], _ProfileHead)
            if profile.extends is None:
                return profile
        except msgspec.ValidationError:
            pass  # The whole check finds better words for it.
    from hpcbench.config.cluster_profile import load_cluster

    return load_cluster(cluster)[0]
