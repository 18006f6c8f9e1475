"""Whether this machine is a login node of a cluster, by what the cluster's profile says of its own."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from hpcbench.config.cluster import Match


def is_here(match: Match, host: str | None = None, environment: Mapping[str, str] | None = None) -> bool:
    """Whether any of the host names, variables or files fit. ``host`` is the full name of this machine by default."""
    full = socket.getfqdn() if host is None else host
    short = full.partition(".")[0]
    if any(re.fullmatch(pattern, name) for pattern in match.hosts for name in (full, short)):
        return True
    variables = os.environ if environment is None else environment
    if any(variables.get(name) == value for name, value in match.variables.items()):
        return True
    return any(_holds(Path(name), text) for name, text in match.files.items())


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() == text
    except OSError:
        return False
