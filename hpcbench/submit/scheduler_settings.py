"""The connection to a cluster's scheduler: its settings in the profile, the environment and the calls of its commands.

The settings are read without validating the whole profile, which takes longer than the scheduler takes to answer."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from hpcbench.fileio import printable_text
from hpcbench.paths import search_folders

if TYPE_CHECKING:
    from hpcbench.config.cluster_profile import ClusterProfile

_SCRUBBED_PREFIXES = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "PMI", "PMIX", "OMPI_", "TORCHELASTIC_", "SUBMITIT_")
_KEPT_NAMES = frozenset({"SLURM_CONF"})
_SCRUBBED_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def scrubbed_names() -> list[str]:
    """The environment variables that describe another job than the one being submitted."""
    names = os.environ.keys() - _KEPT_NAMES
    return sorted(name for name in names if name in _SCRUBBED_NAMES or name.startswith(_SCRUBBED_PREFIXES))


def scrubbed_environment() -> dict[str, str]:
    """A copy of the environment for sbatch and for local jobs, without ``scrubbed_names()``."""
    scrubbed = set(scrubbed_names())
    return {name: value for name, value in os.environ.items() if name not in scrubbed}


HasSchedulerSettings: TypeAlias = "ClusterProfile | _ProfileHead"
"""A whole cluster profile, or the part of it that ``read_scheduler_settings`` reads."""


def command_environment(profile: HasSchedulerSettings) -> dict[str, str]:
    """The environment for the scheduler's commands: scrubbed, with the profile's configuration file and folder."""
    environment = scrubbed_environment()
    if profile.scheduler.config_file is not None:
        environment["SLURM_CONF"] = profile.scheduler.config_file
    if profile.scheduler.bin_folder:
        environment["PATH"] = os.pathsep.join((profile.scheduler.bin_folder, environment.get("PATH", os.defpath)))
    return environment


def find_command(command: str, profile: HasSchedulerSettings) -> Path | None:
    path = shutil.which(command, path=command_environment(profile).get("PATH"))
    return Path(path) if path else None


SILENCE_S = 3.0
"""After this long without an answer of the scheduler a message is printed."""
_listeners: list[Callable[[str], None]] = []


@contextlib.contextmanager
def announce_silence(notify: Callable[[str], None]) -> Iterator[None]:
    """Call ``notify`` with a message whenever a command of the scheduler in the body does not answer for a while."""
    _listeners.append(notify)
    try:
        yield
    finally:
        _listeners.remove(notify)


class CommandResult(NamedTuple):
    """The end of a command. ``exit_code`` is ``None`` if it could not be started or did not end in time."""

    name: str
    output: str
    complaint: str
    """Its standard error, or the reason why it has no exit code."""
    exit_code: int | None

    @property
    def error(self) -> str | None:
        """``None`` if the command succeeded."""
        return None if self.exit_code == 0 else f"{self.name}: {printable_text(self.complaint.strip())}"


class RunningCommand:
    """A command of the scheduler that runs while this process does something else."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._name = command[0]
        self._process: subprocess.Popen[str] | OSError
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        except OSError as error:
            self._process = error

    def result(self, timeout_s: float = 60.0) -> CommandResult:
        """Wait for the end. A command that takes longer than ``timeout_s`` is killed."""
        if isinstance(self._process, OSError):
            return CommandResult(self._name, "", str(self._process), None)
        try:
            output, complaint = self._communicate(timeout_s)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            return CommandResult(self._name, "", str(error), None)
        return CommandResult(self._name, output, complaint, self._process.returncode)

    def _communicate(self, timeout_s: float) -> tuple[str, str]:
        assert not isinstance(self._process, OSError)
        if timeout_s > SILENCE_S and _listeners:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.communicate(timeout=SILENCE_S)
            for notify in _listeners:
                notify(f"{self._name} has not answered for {SILENCE_S:g} s; waiting {timeout_s - SILENCE_S:g} s longer")
            timeout_s -= SILENCE_S
        return self._process.communicate(timeout=timeout_s)


def run_command(command: list[str], profile: HasSchedulerSettings, timeout_s: float = 60.0) -> CommandResult:
    """Run a command of the scheduler to its end; it never raises."""
    return RunningCommand(command, command_environment(profile)).result(timeout_s)


class _SchedulerTable(msgspec.Struct, frozen=True):
    config_file: str | None = None
    bin_folder: str | None = None
    poll_s: float | str | None = None


class _ProfileHead(msgspec.Struct, frozen=True):
    scheduler: _SchedulerTable = _SchedulerTable()
    extends: str | None = None


def read_scheduler_settings(cluster: str) -> HasSchedulerSettings:
    """The scheduler settings in the profile ``cluster``, a name or a path.

    Errors elsewhere in the profile do not matter. Raises ``ConfigError`` if there is no such profile or its table
    ``[scheduler]`` is invalid.
    """
    paths = (folder / f"{cluster}.toml" for folder in search_folders("clusters"))
    path = next((path for path in paths if path.is_file()), None)
    if path is not None:
        # After an error here, validating the whole profile gives a better message.
        with contextlib.suppress(OSError, ValueError):
            profile = msgspec.toml.decode(path.read_bytes(), type=_ProfileHead)
            if profile.extends is None:
                return profile
    from hpcbench.config.cluster_profile import load_cluster  # status starts without pydantic

    return load_cluster(cluster)[0]
