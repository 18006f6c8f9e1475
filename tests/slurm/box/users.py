"""The ordinary users of the box, made only where they are missing."""

from __future__ import annotations

import os
import pwd

from . import paths
from .shell import run


def create() -> None:
    """Make the missing test users, marked in /etc/passwd as the box's own."""
    for name in paths.USERS:
        if not _exists(name):
            paths.HOMES.mkdir(parents=True, exist_ok=True)
            home = str(paths.HOMES / name)
            run(["useradd", "-m", "-d", home, "-s", "/bin/sh", "-c", paths.USER_MARK, name])


def remove() -> None:
    """Delete those test users that the box made; a user of that name who was there before stays."""
    for name in paths.USERS:
        if _exists(name) and pwd.getpwnam(name).pw_gecos == paths.USER_MARK:
            run(["userdel", "--force", name], check=False)


def _exists(name: str) -> bool:
    return any(entry.pw_name == name for entry in pwd.getpwall())


def accounted() -> list[str]:
    """Users who may submit: root, the test users, and who called `up` through sudo."""
    caller = os.environ.get("SUDO_USER", "root")
    return list(dict.fromkeys(["root", *paths.USERS, *([caller] if _exists(caller) else [])]))
