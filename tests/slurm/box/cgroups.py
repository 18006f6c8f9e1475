"""One control group per node: a CPU quota and a memory limit, on cgroup v1 and v2 alike.

Layout: hpcbench-slurmbox/n1 (jobs, limited), n1-slurmd (its slurmd, not limited) and services, below the `cpu` and the
`memory` hierarchy of v1 or in the one tree of v2. A job finds its node's group in /proc/self/cgroup, and there the count of processes killed
for memory: `oom_kill` in memory.oom_control (v1) or memory.events (v2).
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from . import paths
from .errors import BoxError
from .shell import wait_for

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "memory")


def version(root: Path = ROOT) -> int:
    """2 where `root` is the v2 tree with both controllers, 1 where both v1 hierarchies are mounted, else 0."""
    controllers = root / "cgroup.controllers"
    if controllers.exists():
        return 2 if set(CONTROLLERS) <= set(controllers.read_text().split()) else 0
    if (root / "cpu" / "cpu.cfs_quota_us").exists() and (root / "memory" / "memory.limit_in_bytes").exists():
        return 1
    # A hierarchy's root has no quota file on some kernels: cgroup.procs is there in any case.
    return 1 if all((root / c / "cgroup.procs").exists() for c in CONTROLLERS) else 0


def cpu_quota(cpus: float) -> tuple[int, int]:
    """Microseconds (quota, period) for that many cores.

    The period is 10 ms, so that a throttled rank waits little; the kernel refuses quotas under 1 ms, hence 100 ms
    for the smallest nodes.
    """
    period = 10_000 if cpus >= 0.1 else 100_000
    return round(cpus * period), period


def limit_files(ver: int, cpus: float, mem: int) -> dict[str, str]:
    """Contents of a node's limit files, in the order in which they must be written."""
    quota, period = cpu_quota(cpus)
    if ver == 2:
        return {"cpu.max": f"{quota} {period}", "memory.max": str(mem), "memory.swap.max": "0"}
    return {
        "cpu.cfs_period_us": str(period),
        "cpu.cfs_quota_us": str(quota),
        "memory.limit_in_bytes": str(mem),
        # Memory plus swap; may not be under the limit above, so it comes after it.
        "memory.memsw.limit_in_bytes": str(mem),
    }


def folders(group: str, ver: int | None = None) -> list[Path]:
    """Folders of a group of the box: two on v1, one on v2. An empty name is the box's own group."""
    ver = version() if ver is None else ver
    tops = [ROOT] if ver == 2 else [ROOT / c for c in CONTROLLERS]
    return [top / paths.CGROUP / group for top in tops]


def check() -> None:
    """Refuse a machine whose control groups cannot be used."""
    ver = version()
    if ver == 0:
        raise BoxError(
            "no usable cgroup controllers `cpu` and `memory` under /sys/fs/cgroup: run the box on a machine or "
            "a privileged container that has them"
        )
    for folder in folders("", ver):
        try:
            folder.mkdir(exist_ok=True)
        except OSError as err:
            raise BoxError(
                f"cannot make the control group {folder} ({err.strerror}): the box needs a machine, or a privileged "
                "container, with writable cgroups"
            ) from None
    if ver == 2:
        for folder in (ROOT, ROOT / paths.CGROUP):
            _enable(folder)


def _enable(folder: Path) -> None:
    """Hand the controllers of a v2 group down to its children."""
    try:
        (folder / "cgroup.subtree_control").write_text("+cpu +memory")
    except OSError as err:
        raise BoxError(
            f"cannot pass the controllers cpu and memory on from {folder} ({err.strerror}): in a container, start it "
            "with --privileged --cgroupns=host"
        ) from None


def create(group: str, cpus: float | None = None, mem: int | None = None) -> None:
    """Make a group; with limits, write them."""
    ver = version()
    for folder in folders(group, ver):
        folder.mkdir(parents=True, exist_ok=True)
    if cpus is None or mem is None:
        return
    for name, value in limit_files(ver, cpus, mem).items():
        controller = name.split(".")[0]
        folder = folders(group, ver)[0] if ver == 2 else ROOT / controller / paths.CGROUP / group
        if (folder / name).exists():  # the two swap files are absent on kernels without swap accounting
            (folder / name).write_text(value)


def join_files(group: str) -> list[str]:
    """Files to which a process writes its id to enter the group."""
    return [str(folder / "cgroup.procs") for folder in folders(group)]


def processes(group: str) -> set[int]:
    """Ids of the living processes in the group."""
    found: set[int] = set()
    for folder in folders(group):
        with contextlib.suppress(OSError, ValueError):
            found |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    found.discard(0)  # processes of another pid namespace
    return found


def groups() -> list[str]:
    """Names of the box's groups that exist."""
    found: set[str] = set()
    for folder in folders(""):
        if folder.is_dir():
            found |= {child.name for child in folder.iterdir() if child.is_dir()}
    return sorted(found)


def kill(group: str, timeout: float = 10) -> None:
    """SIGKILL every process of the group, also those that fork meanwhile."""

    def empty() -> bool:
        left = processes(group)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_for(f"the processes of group {group} to end after SIGKILL", empty, timeout)


def remove_all() -> None:
    """Kill everything in the box's groups and remove them."""
    for group in groups():
        kill(group)
    for folder in folders(""):
        if not folder.is_dir():
            continue

        def gone(folder: Path = folder) -> bool:
            with contextlib.suppress(OSError):
                for child in [c for c in folder.iterdir() if c.is_dir()]:
                    child.rmdir()
                folder.rmdir()
            return not folder.exists()

        wait_for(f"the control group {folder} to be removed", gone, 10)
