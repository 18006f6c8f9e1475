"""How a cluster's scheduler is reached: all of a profile that questions about jobs need.

It is read on its own, because checking a whole profile takes longer than the scheduler takes to answer.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from hpcbench.config.tomlfile import read_toml
from hpcbench.paths import search_folders


class SchedulerAddress(Protocol):
    """The scheduler's commands and their configuration."""

    @property
    def config_file(self) -> str | None:
        """SLURM_CONF."""

    @property
    def bin_folder(self) -> str | None:
        """Where the commands are, if not on PATH."""


class Reachable(Protocol):
    """A whole profile, or what ``read_address`` finds in one."""

    @property
    def scheduler(self) -> SchedulerAddress:
        """Of the cluster."""


class _Scheduler(msgspec.Struct, frozen=True):
    config_file: str | None = None
    bin_folder: str | None = None


class _Profile(msgspec.Struct, frozen=True):
    scheduler: _Scheduler = _Scheduler()
    extends: str | None = None


def read_address(cluster: str) -> Reachable:
    """The address in the profile of ``cluster``; mistakes elsewhere in the profile do not matter.

    Raises ``ConfigError`` where there is no such profile or its address is wrong.
    """
    paths = (folder / f"{cluster}.toml" for folder in search_folders("clusters"))
    path = next((path for path in paths if path.is_file()), None)
    if path is not None:
        try:
            profile = msgspec.convert(read_toml(path)[0], _Profile)
            if profile.extends is None:
                return profile
        except msgspec.ValidationError:
            pass  # The whole check finds better words for it.
    from hpcbench.config.load import load_cluster

    return load_cluster(cluster)[0]
