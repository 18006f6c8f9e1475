"""Facts about a machine, from files of the kernel alone. What cannot be read is absent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcbench.worker import cgroup

ROOT = Path("/")
_CPU = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_CONTAINERS = {".singularity.d": "apptainer", "run/.containerenv": "podman", ".dockerenv": "docker"}
_NAMES_OF_FABRICS = ("ib", "hsn", "bond")
_MOST_INTERFACES = 16


def host_facts(mask: Sequence[int], root: Path = ROOT) -> dict[str, Any]:
    """Everything below, under one key each."""
    return {
        "os": os_release(root),
        "cpu": cpu_facts(mask, root),
        "memory_bytes": memory_bytes(root),
        "hugepages": hugepages(root),
        "cgroup": cgroup_limits(root),
        "interfaces": interfaces(root),
        "infiniband": infiniband(root),
        "container_kind": container_kind(root),
    }


def os_release(root: Path = ROOT) -> str | None:
    """The distribution's name and version."""
    for line in (_read(root / "etc/os-release") or "").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip().strip('"') or None
    return None


def cpu_facts(mask: Sequence[int], root: Path = ROOT) -> dict[str, Any]:
    """Sockets, cores and threads of the machine, its caches, and how its clock is governed."""
    places = [
        tuple(_read(folder / "topology" / name) for name in ("physical_package_id", "core_id"))
        for folder in (root / _CPU).glob("cpu[0-9]*")
    ]
    first = root / _CPU / f"cpu{mask[0] if mask else 0}"
    max_khz = _read(first / "cpufreq/cpuinfo_max_freq")
    return _known({
        "sockets": len({socket for socket, _ in places if socket is not None}) or None,
        "cores": len({place for place in places if None not in place}) or None,
        "threads": len(places) or None,
        "smt": _read(root / _CPU / "smt/control"),
        "numa_nodes": len(list((root / _NODES).glob("node[0-9]*"))) or None,
        "caches": _caches(first / "cache"),
        "governor": _read(first / "cpufreq/scaling_governor"),
        "frequency_driver": _read(first / "cpufreq/scaling_driver"),
        "max_hz": int(max_khz) * 1000 if max_khz and max_khz.isdecimal() else None,
    })  # fmt: skip


def mask_by_numa_node(mask: Sequence[int], root: Path = ROOT) -> dict[str, int]:
    """How many of the cores in ``mask`` each NUMA node has."""
    found = {}
    for node in sorted((root / _NODES).glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        count = len(set(mask) & numbers(_read(node / "cpulist") or ""))
        if count:
            found[node.name[4:]] = count
    return found


def memory_bytes(root: Path = ROOT) -> int | None:
    """What the machine has."""
    kib = _meminfo(root, "MemTotal")
    return None if kib is None else kib * 1024


def hugepages(root: Path = ROOT) -> dict[str, Any]:
    """The setting of transparent huge pages, and how many were reserved."""
    chosen = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return _known({"transparent": chosen[1] if chosen else None, "reserved": _meminfo(root, "HugePages_Total")})


def cgroup_limits(root: Path = ROOT) -> dict[str, Any]:
    """What the control groups of this process grant it."""
    where = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    return _known({
        "cpu_quota_cores": cgroup.cpu_quota_cores(*where),
        "memory_limit_bytes": cgroup.memory_limit_bytes(*where),
    })  # fmt: skip


def interfaces(root: Path = ROOT) -> list[dict[str, Any]]:
    """Network interfaces that are hardware or named like a fabric's, in the kernel's words; speed where it is told."""
    found = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        if not ((folder / "device").exists() or folder.name.startswith(_NAMES_OF_FABRICS)):
            continue
        speed, mtu = _read(folder / "speed"), _read(folder / "mtu")
        entry = {
            "name": folder.name,
            "state": _read(folder / "operstate"),
            "speed_bit_per_s": int(speed) * 10**6 if speed and speed.isdecimal() else None,
            "mtu_bytes": int(mtu) if mtu and mtu.isdecimal() else None,
        }
        found.append(_known(entry))
    return found[:_MOST_INTERFACES]


def infiniband(root: Path = ROOT) -> list[str]:
    """One line a port: device and port, link layer, rate, state."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        facts = [_read(port / name) for name in ("link_layer", "rate", "state")]
        words = [fact.partition(": ")[2] or fact for fact in facts if fact]
        found.append(f"{port.parent.parent.name}/{port.name} {', '.join(words)}")
    return found


def container_kind(root: Path = ROOT) -> str | None:
    """What has made the container that this process runs in, by the file that it leaves there."""
    return next((kind for mark, kind in _CONTAINERS.items() if (root / mark).exists()), None)


def numbers(text: str) -> set[int]:
    """The kernel's lists of cores: ``0-3,8``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _caches(folder: Path) -> dict[str, str]:
    found = {}
    for index in sorted(folder.glob("index[0-9]*")):
        level, kind, size = (_read(index / name) for name in ("level", "type", "size"))
        if level and kind and size and kind != "Instruction":
            found[f"L{level}"] = size
    return found


def _meminfo(root: Path, key: str) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == key and value.split()[:1] and value.split()[0].isdecimal():
            return int(value.split()[0])
    return None


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, {})}


def _read(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace").strip() or None
    except OSError:
        return None
