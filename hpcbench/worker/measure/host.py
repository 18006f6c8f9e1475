"""Facts about a host, its control groups and the memory of a rank, from kernel files. Unreadable facts are omitted."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcbench.units import format_bytes

if TYPE_CHECKING:
    import torch

ROOT = Path("/")
_NO_LIMIT_BYTES = 2**60


def read_text(file: Path) -> str | None:
    """Return the stripped text of ``file``; ``None`` if it is empty or unreadable."""
    try:
        return file.read_text(errors="replace").strip() or None
    except OSError:
        return None


def read_int(file: Path) -> int | None:
    """Return the number in ``file``; ``None`` if it is unreadable or holds something else."""
    try:
        return int(read_text(file) or "")
    except ValueError:
        return None


def read_counter(file: Path, name: str) -> int | None:
    """Return the number after ``name`` in a file with one named number per line; ``None`` if there is none."""
    for line in (read_text(file) or "").splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1]) if words[1:] and words[1].isdecimal() else None
    return None


def oom_kills(root: Path = ROOT) -> int | None:
    """Processes killed for memory in this process's control group and in those around it; ``None`` where unknown.

    Compare two calls: only a rise of the sum has a meaning, since control groups of version 2 count one kill in every
    group above it. Version 1 counts it in the group of the killed process alone. The limit may belong to the job's
    step, to the job or to the node, so the counts of all groups above this one are added. Version 1 does not show
    kills in groups beside this one, such as other steps of the job.
    """
    files = {1: "memory.oom_control", 2: "memory.events"}
    groups = _cgroup_folders("memory", root)
    counts = [read_counter(folder / files[version], "oom_kill") for folder, version in groups]
    kills = [count for count in counts if count is not None]
    return sum(kills) if kills else None


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The smallest limit of this process's memory group and those around it; ``None`` where there is none.

    Under v1 a group without a limit shows a number that no machine has.
    """
    files = {1: "memory.limit_in_bytes", 2: "memory.max"}
    limits = [read_int(folder / files[version]) for folder, version in _cgroup_folders("memory", root)]
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT_BYTES), default=None)


def cpu_quota_cores(root: Path = ROOT) -> float | None:
    """The smallest processor time per second that this process's groups grant, in cores; ``None`` without a limit."""
    quotas = []
    for folder, version in _cgroup_folders("cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        words = " ".join(read_text(folder / name) or "" for name in names).split()
        # Without a quota it is -1 or "max".
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min((quota for quota in quotas if quota > 0), default=None)


def throttled_s(root: Path = ROOT) -> float | None:
    """Return the seconds since their creation for which quotas have stopped threads of this process's groups.

    They are summed over cores; ``None`` if the system does not count them.
    """
    keys = {1: ("throttled_time", 1e9), 2: ("throttled_usec", 1e6)}
    seconds = []
    for folder, version in _cgroup_folders("cpu", root):
        key, per_s = keys[version]
        count = read_counter(folder / "cpu.stat", key)
        if count is not None:
            seconds.append(count / per_s)
    return sum(seconds) if seconds else None


def _cgroup_folders(controller: str, root: Path) -> list[tuple[Path, int]]:
    """Return the folders of this process's group and those around it, with the version (1, 2) of their hierarchy."""
    mount = root / "sys/fs/cgroup"
    folders: list[tuple[Path, int]] = []
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            folders += [(folder, 1) for folder in _ancestor_folders(mount / controller, path)]
        elif not controllers:
            # A hybrid machine mounts the v2 tree one level lower and keeps its controllers in v1.
            top = mount / "unified" if (mount / "unified").is_dir() else mount
            folders += [(folder, 2) for folder in _ancestor_folders(top, path)]
    return folders


def _ancestor_folders(root: Path, path: str) -> list[Path]:
    """``root/path`` and its parents down to ``root``. Inside a container the path may not exist: parents still do."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


_CPU_FOLDER = "sys/devices/system/cpu"
_NUMA_FOLDER = "sys/devices/system/node"
_CONTAINER_MARKERS = {".singularity.d": "apptainer", "run/.containerenv": "podman", ".dockerenv": "docker"}
_FABRIC_PREFIXES = ("ib", "hsn", "bond")
_MAX_INTERFACES = 16


def host_facts(mask: Sequence[int], root: Path = ROOT) -> dict[str, Any]:
    """Return the facts of the host by key. ``cgroup`` is what the control groups of this process grant it."""
    memory_kib = read_counter(root / "proc/meminfo", "MemTotal:")
    release = re.search(r'^PRETTY_NAME="?([^"\n]+)', read_text(root / "etc/os-release") or "", re.MULTILINE)
    huge = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    reserved = read_counter(root / "proc/meminfo", "HugePages_Total:")
    return {
        "os": release[1].strip() if release else None,
        "cpu": cpu_facts(mask, root),
        "memory_bytes": None if memory_kib is None else memory_kib * 1024,
        "hugepages": _without_none({"transparent": huge[1] if huge else None, "reserved": reserved}),
        "cgroup": _without_none(
            {"cpu_quota_cores": cpu_quota_cores(root), "memory_limit_bytes": memory_limit_bytes(root)}
        ),
        "interfaces": interface_facts(root),
        "infiniband": infiniband_ports(root),
        # Made by whatever leaves the file.
        "container_kind": next((kind for mark, kind in _CONTAINER_MARKERS.items() if (root / mark).exists()), None),
    }


def cpu_facts(mask: Sequence[int], root: Path = ROOT) -> dict[str, Any]:
    """Sockets, cores and threads of the machine, its caches, and how its clock is governed."""
    places = [
        tuple(read_text(folder / "topology" / name) for name in ("physical_package_id", "core_id"))
        for folder in (root / _CPU_FOLDER).glob("cpu[0-9]*")
    ]
    first = root / _CPU_FOLDER / f"cpu{mask[0] if mask else 0}"
    max_khz = read_int(first / "cpufreq/cpuinfo_max_freq")
    return _without_none({
        "sockets": len({socket for socket, _ in places if socket is not None}) or None,
        "cores": len({place for place in places if None not in place}) or None,
        "threads": len(places) or None,
        "smt": read_text(root / _CPU_FOLDER / "smt/control"),
        "numa_nodes": len(list((root / _NUMA_FOLDER).glob("node[0-9]*"))) or None,
        "caches": _cache_sizes(first / "cache"),
        "governor": read_text(first / "cpufreq/scaling_governor"),
        "frequency_driver": read_text(first / "cpufreq/scaling_driver"),
        "max_hz": max_khz * 1000 if max_khz is not None else None,
    })  # fmt: skip


def cores_per_numa_node(mask: Sequence[int], root: Path = ROOT) -> dict[str, int]:
    """Return the number of cores in ``mask`` of each NUMA node."""
    nodes = sorted((root / _NUMA_FOLDER).glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    counts = {node.name[4:]: len(set(mask) & parse_core_list(read_text(node / "cpulist") or "")) for node in nodes}
    return {number: count for number, count in counts.items() if count}


def interface_facts(root: Path = ROOT) -> list[dict[str, Any]]:
    """Network interfaces that are hardware or named like a fabric's, by the kernel's names; speed where reported."""
    facts = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        if not ((folder / "device").exists() or folder.name.startswith(_FABRIC_PREFIXES)):
            continue
        # The speed of an interface that is down is -1.
        speed = read_int(folder / "speed")
        facts.append(_without_none({
            "name": folder.name,
            "state": read_text(folder / "operstate"),
            "speed_bit_per_s": speed * 10**6 if speed is not None and speed >= 0 else None,
            "mtu_bytes": read_int(folder / "mtu"),
        }))  # fmt: skip
    return facts[:_MAX_INTERFACES]


def infiniband_ports(root: Path = ROOT) -> list[str]:
    """One line a port: device and port, link layer, rate, state."""
    lines = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        facts = [read_text(port / name) for name in ("link_layer", "rate", "state")]
        words = [fact.partition(": ")[2] or fact for fact in facts if fact]
        lines.append(f"{port.parent.parent.name}/{port.name} {', '.join(words)}")
    return lines


def parse_core_list(text: str) -> set[int]:
    """The kernel's lists of cores: ``0-3,8``."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _cache_sizes(folder: Path) -> dict[str, str]:
    sizes = {}
    for index in sorted(folder.glob("index[0-9]*")):
        level, kind, size = (read_text(index / name) for name in ("level", "type", "size"))
        if level and kind and size and kind != "Instruction":
            sizes[f"L{level}"] = size
    return sizes


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, {})}


def read_peak_memory(device: torch.device | None, *, restarts: bool = False) -> tuple[int, int | None]:
    """Return the peak bytes, on cuda since its peak was reset, and there the bytes that the allocator reserved.

    On a cpu it is the resident set of the process, interpreter and libraries included; on cuda the allocator's peak.
    With ``restarts`` the peaks begin anew; raises ``OSError`` where the system does not allow that.
    """
    if device is not None and device.type == "cuda":
        import torch

        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        if restarts:
            torch.cuda.reset_peak_memory_stats(device)
        return peaks
    peak = peak_resident_bytes()
    if restarts:
        (ROOT / "proc/self/clear_refs").write_text("5")  # of proc(5): the peak becomes the present resident set
    return peak, None


def peak_resident_bytes(root: Path = ROOT) -> int:
    """Return the peak resident set of this process.

    The kernel's ``VmHWM`` begins anew when a program starts. ``ru_maxrss`` does not: it begins with what the parent
    held when it started this process, so under a large launcher it is the launcher's.
    """
    peak_kib = read_counter(root / "proc/self/status", "VmHWM:")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak_kib is None else peak_kib) * 1024


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's ``malloc.h``."""
_MAX_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""The most that ``mallopt`` takes for the second: what is larger goes back to the system at once."""
_NEVER_TRIM_BYTES = 2**31 - 1
_USER_MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(env: Mapping[str, str]) -> bool:
    """Have the process keep what is freed, for the tensors to come, as CUDA's caching allocator does; whether it will.

    By default glibc gives large blocks back, and every step takes its activations and gradients anew, page by page
    from the system: 18 to 30 % of a step of a small convolutional network, more or less by the layout of the heap.
    What ``env`` sets of this stays. Other C libraries have no such call, or ignore it.
    """
    if any(name in env for name in _USER_MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    is_accepted = mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)
    return bool(is_accepted and mallopt(_TRIM_THRESHOLD, _NEVER_TRIM_BYTES))


_MIB = 2**20


def describe_job_memory(env: Mapping[str, str], limit_bytes: int | None, machine_bytes: int | None) -> str:
    """``asked for 1.4 GiB a node; the job's limit is 1.4 GiB; the machine has 377 GiB``, as far as it is known.

    ``env`` is the job's: SLURM gives what was asked for in MiB, per node or per core.
    """
    parts = []
    for name, of in (("SLURM_MEM_PER_NODE", "a node"), ("SLURM_MEM_PER_CPU", "a core"), ("SLURM_MEM_PER_GPU", "a GPU")):
        if env.get(name, "").isdecimal():
            size = int(env[name]) * _MIB
            parts.append(f"asked for {format_bytes(size)} {of}" if size else "asked for all memory of the node")
    if limit_bytes is not None:
        parts.append(f"the limit of its memory group is {format_bytes(limit_bytes)}")
    if machine_bytes is not None:
        parts.append(f"the machine has {format_bytes(machine_bytes)}")
    return "; ".join(parts)


def describe_own_job_memory() -> str:
    """The words for this process on this machine."""
    try:
        machine_bytes: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        machine_bytes = None
    return describe_job_memory(os.environ, memory_limit_bytes(), machine_bytes)
