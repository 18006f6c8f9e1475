"""The control groups of this job: what memory and processor time they grant, and what the kernel did about it."""

from __future__ import annotations

from pathlib import Path

PROC_CGROUP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 2**60


def oom_kills(proc_cgroup: Path = PROC_CGROUP, mount: Path = MOUNT) -> int | None:
    """Processes killed for memory in this process's control group and in those around it; ``None`` where unknown.

    v1 counts a kill in the group that the killed process was in, v2 in every group above it as well; the limit may
    stand at the job's step, at the job or at the node. The sum over this group and its parents therefore rises with
    every kill that concerns the job under both, though v2's sum counts one kill several times: only that it rose
    between two calls means something. Groups beside this one (other steps of the job) are not seen under v1.
    """
    files = {1: "memory.oom_control", 2: "memory.events"}
    groups = _groups("memory", proc_cgroup, mount)
    counts = [_read_count(folder / files[version], "oom_kill") for folder, version in groups]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def memory_limit_bytes(proc_cgroup: Path = PROC_CGROUP, mount: Path = MOUNT) -> int | None:
    """The smallest limit of this process's memory group and those around it; ``None`` where there is none.

    Under v1 a group without a limit shows a number that no machine has.
    """
    files = {1: "memory.limit_in_bytes", 2: "memory.max"}
    limits = []
    for folder, version in _groups("memory", proc_cgroup, mount):
        try:
            limits.append(int((folder / files[version]).read_text()))
        except (OSError, ValueError):
            continue
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def cpu_quota_cores(proc_cgroup: Path = PROC_CGROUP, mount: Path = MOUNT) -> float | None:
    """The processor time per second that this process's groups grant, in cores; ``None`` where none limits it."""
    quotas = []
    for folder, version in _groups("cpu", proc_cgroup, mount):
        try:
            if version == 1:
                words = [(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
            else:
                words = (folder / "cpu.max").read_text().split()
            quotas.append(int(words[0]) / int(words[1]))
        except (OSError, ValueError, IndexError, ZeroDivisionError):
            continue
    return min((quota for quota in quotas if quota > 0), default=None)


def throttled_s(proc_cgroup: Path = PROC_CGROUP, mount: Path = MOUNT) -> float | None:
    """Seconds for which quotas have held threads of this process's groups back, summed over cores, since ever."""
    keys = {1: ("throttled_time", 1e9), 2: ("throttled_usec", 1e6)}
    found = []
    for folder, version in _groups("cpu", proc_cgroup, mount):
        key, per_s = keys[version]
        count = _read_count(folder / "cpu.stat", key)
        if count is not None:
            found.append(count / per_s)
    return sum(found) if found else None


def _groups(controller: str, proc_cgroup: Path, mount: Path) -> list[tuple[Path, int]]:
    """Folders of this process's group and those around it, with the version (1, 2) of their hierarchy."""
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, int]] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            found += [(folder, 1) for folder in _upwards(mount / controller, path)]
        elif not controllers:
            # A hybrid machine mounts the v2 tree one level lower and keeps its controllers in v1.
            root = mount / "unified" if (mount / "unified").is_dir() else mount
            found += [(folder, 2) for folder in _upwards(root, path)]
    return found


def _upwards(root: Path, path: str) -> list[Path]:
    """``root/path`` and its parents down to ``root``. Inside a container the path may not exist: parents still do."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def _read_count(file: Path, wanted: str) -> int | None:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == wanted:
                return int(value)
    except (OSError, ValueError):
        return None
    return None
