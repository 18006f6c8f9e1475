"""The memory control group of this job: how often the kernel killed a process of it, and how much it may have."""

from __future__ import annotations

from pathlib import Path

PROC_CGROUP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 2**60
_V1_FILE = "memory.oom_control"
_V2_FILE = "memory.events"
_LIMITS = {_V1_FILE: "memory.limit_in_bytes", _V2_FILE: "memory.max"}


def oom_kills(proc_cgroup: Path = PROC_CGROUP, mount: Path = MOUNT) -> int | None:
    """Processes killed for memory in this process's control group and in those around it; ``None`` where unknown.

    v1 counts a kill in the group that the killed process was in, v2 in every group above it as well; the limit may
    stand at the job's step, at the job or at the node. The sum over this group and its parents therefore rises with
    every kill that concerns the job under both, though v2's sum counts one kill several times: only that it rose
    between two calls means something. Groups beside this one (other steps of the job) are not seen under v1.
    """
    groups = _memory_groups(proc_cgroup, mount)
    counts = [count for folder, name in groups for count in [_read_count(folder / name)] if count is not None]
    return sum(counts) if counts else None


def memory_limit_bytes(proc_cgroup: Path = PROC_CGROUP, mount: Path = MOUNT) -> int | None:
    """The smallest limit of this process's memory group and those around it; ``None`` where there is none.

    Under v1 a group without a limit shows a number that no machine has.
    """
    limits = []
    for folder, name in _memory_groups(proc_cgroup, mount):
        try:
            limits.append(int((folder / _LIMITS[name]).read_text()))
        except (OSError, ValueError):
            continue
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def _memory_groups(proc_cgroup: Path, mount: Path) -> list[tuple[Path, str]]:
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str]] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            found += [(folder, _V1_FILE) for folder in _upwards(mount / "memory", path)]
        elif not controllers:
            # A hybrid machine mounts the v2 tree one level lower and keeps memory in v1.
            root = mount / "unified" if (mount / "unified").is_dir() else mount
            found += [(folder, _V2_FILE) for folder in _upwards(root, path)]
    return found


def _upwards(root: Path, path: str) -> list[Path]:
    """``root/path`` and its parents down to ``root``. Inside a container the path may not exist: parents still do."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def _read_count(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None
