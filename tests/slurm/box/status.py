"""The state of the box."""

from __future__ import annotations

import contextlib
import dataclasses

from . import cgroups, daemons, network, paths
from .options import Options
from .shell import run

# States of a node that can take jobs or has some; a trailing mark such as * (not responding) is no part of these.
_GOOD = {"idle", "mixed", "allocated", "completing"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One daemon or node."""

    name: str
    healthy: bool
    state: str


def saved_options() -> Options | None:
    """Options of the box that is, or was, up."""
    with contextlib.suppress(OSError):
        return Options.from_json(paths.OPTIONS_FILE.read_text())
    return None


def node_states() -> dict[str, str]:
    """State of each node as slurmctld sees it; empty when it does not answer."""
    status, text = run(["sinfo", "-h", "-N", "-p", "normal", "-o", "%N %T"], timeout=15, check=False)
    return dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) == 2) if status == 0 else {}


def is_good(state: str) -> bool:
    """Whether a node in this state of sinfo takes part."""
    return state in _GOOD


def report() -> list[Line]:
    """One line per daemon and node; empty when no box is up."""
    options = saved_options()
    if options is None:
        return []
    lines = [_service(name) for name in daemons.SERVICES]
    states = node_states() if lines[-1].healthy else {}
    return lines + [_node(name, states.get(name, "unknown")) for name in options.names]


def _service(name: str) -> Line:
    ready = daemons.is_ready(name)
    state = f"up, process {daemons.pid_of(name)}" if ready else "silent" if daemons.is_alive(name) else "dead"
    return Line(name, ready, state)


def _node(name: str, state: str) -> Line:
    if not daemons.is_alive(name):
        return Line(name, False, f"{state}, slurmd is dead")
    if paths.netns(name) not in network.namespaces():
        return Line(name, False, f"{state}, network namespace is missing")
    return Line(name, is_good(state), f"{state}, slurmd is process {daemons.pid_of(name)}")


def is_healthy(lines: list[Line]) -> bool:
    """Whether there is a box, and every part of it works."""
    return bool(lines) and all(line.healthy for line in lines)


def traces() -> list[str]:
    """Return the traces of a box on this machine as text; empty after `down`."""
    found = [str(path) for path in (paths.STATE, paths.DATA) if path.exists()]
    found += [f"cgroup {paths.CGROUP}"] if any(folder.exists() for folder in cgroups.folders("")) else []
    found += [f"network namespace {name}" for name in network.namespaces()]
    return found
