"""What the submitter can know of the jobs' software, so that results of another one can be told from today's."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

import hpcbench
from hpcbench.config.cluster import ClusterProfile, Container
from hpcbench.render.script import python_of

_PACKAGES = ("torch", "torchvision", "numpy", "scikit_learn", "horovod", "fairscale")
_METADATA = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[^-]+)\.dist-info")


def environment_key(profile: ClusterProfile, name: str | None) -> str:
    """12 hex digits of an environment of the profile: what it loads, sets and wraps, and the versions installed there.

    Versions are read from the folder of the interpreter where this machine can see it; inside an image or behind a
    module they cannot be known here, and only the image's or the module's name counts.
    """
    environment = profile.environment(name)
    python = python_of(environment)
    known = {
        "hpcbench": hpcbench.__version__,
        "python": python,
        "modules": environment.modules,
        "setup": [*profile.setup, *environment.setup],
        "container": _container(environment.container),
        "env": profile.variables(name),
        "versions": {} if environment.container else installed_versions(Path(python)),
    }
    unset = [*profile.env_unset, *environment.env_unset]
    if unset:
        known["env_unset"] = unset
    return hashlib.sha256(msgspec.json.encode(known, order="deterministic")).hexdigest()[:12]


def _container(container: Container | None) -> Any:
    if container is None:
        return []
    return container.command or container.model_dump(exclude_defaults=True)


def installed_versions(python: Path) -> dict[str, str]:
    """Versions of the packages that a measurement depends on, for the interpreter ``python``; empty if out of sight."""
    found: dict[str, str] = {}
    for folder in _site_packages(python):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            match = _METADATA.fullmatch(name)
            if match and match["name"].lower() in _PACKAGES:
                found[match["name"].lower()] = match["version"]
    return found


def _site_packages(python: Path) -> list[Path]:
    """The folders below the interpreter's prefix; its own, for the one that runs this."""
    if str(python) == sys.executable:
        prefix = Path(sys.prefix)
    elif python.is_absolute():
        prefix = python.parent.parent
    else:
        return []
    return sorted(prefix.glob("lib*/python3*/*-packages"))
