"""The software of the jobs, as far as this machine can see it: its versions as a key, and whether it has torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

import hpcbench
from hpcbench.config.profile_tables import Environment
from hpcbench.errors import INSTALL_WORKER, SubmitError
from hpcbench.paths import is_visible
from hpcbench.submit.scheduler import scrubbed_environment

_VERSIONED_PACKAGES = ("torch", "torchvision", "numpy", "scikit_learn", "horovod", "fairscale")
_DIST_INFO_PATTERN = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[^-]+)\.dist-info")
_SYSTEM_FOLDERS = ("/usr/", "/bin/")
_LOOK_TIMEOUT_S = 60.0
_ABSENT = 3
_LOOK = f"import importlib.util, sys; sys.exit({_ABSENT} if importlib.util.find_spec('torch') is None else 0)"


def environment_key(environment: Environment) -> str:
    """12 hex digits that identify the software of an environment: its definition and the versions installed in it.

    Versions are read from the folder of the interpreter if this machine can see it; inside an image or behind a module
    they cannot be known here, and only the image's or the module's name counts.
    """
    container = environment.container
    known: dict[str, Any] = {
        "hpcbench": hpcbench.__version__,
        "python": environment.python,
        "modules": environment.modules,
        "setup": [*environment.cluster_setup, *environment.setup],
        "container": (container.command or container.model_dump(exclude_defaults=True)) if container else [],
        "env": environment.env,
        "versions": {} if container else installed_versions(Path(environment.python)),
    }
    if environment.env_unset:
        known["env_unset"] = environment.env_unset
    return hashlib.sha256(msgspec.json.encode(known, order="deterministic")).hexdigest()[:12]


def installed_versions(python: Path) -> dict[str, str]:
    """Versions of the packages that a measurement depends on, by package; empty if this machine cannot see them."""
    versions: dict[str, str] = {}
    for folder in _site_packages(python):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            match = _DIST_INFO_PATTERN.fullmatch(name)
            if match and match["name"].lower() in _VERSIONED_PACKAGES:
                versions[match["name"].lower()] = match["version"]
    return versions


def _site_packages(python: Path) -> list[Path]:
    """The package folders of an interpreter; those of this process if it runs in the same one."""
    if str(python) == sys.executable:
        prefix = Path(sys.prefix)
    elif python.is_absolute():
        prefix = python.parent.parent
    else:
        return []
    return sorted(prefix.glob("lib*/python3*/*-packages"))


def check_job_packages(environments: Iterable[Environment], *, runs_here: bool) -> None:
    """Check that the jobs' interpreters have torch, as far as this machine can see them.

    Raises ``SubmitError`` with the command that installs it: without torch, every run would end as ``unsupported``.
    """
    for python in dict.fromkeys(_visible_python(environment, runs_here) for environment in environments):
        if python is not None and not _has_torch(python):
            raise SubmitError(
                f"the jobs' interpreter {python} has no torch: nothing is submitted",
                hint=f"{python} -m {INSTALL_WORKER}",
            )


def _visible_python(environment: Environment, runs_here: bool) -> str | None:
    """The interpreter of an environment; ``None`` where a job makes its software itself."""
    if environment.is_made_in_job or environment.cluster_setup or "PYTHONPATH" in environment.env:
        return None
    # The system's interpreter of a login node is not the nodes'.
    is_elsewhere = not runs_here and environment.python.startswith(_SYSTEM_FOLDERS)
    return None if is_elsewhere or not is_visible(environment.python) else environment.python


def _has_torch(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("torch") is not None
    nowhere = subprocess.DEVNULL
    try:
        code = subprocess.call(
            [python, "-c", _LOOK], env=scrubbed_environment(), stdout=nowhere, stderr=nowhere, timeout=_LOOK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return code != _ABSENT
