"""Counters of the kernel for the cores of a rank: who used them, how fast they ran. Read at the edges of a region."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class CoreTimes(NamedTuple):
    """Seconds since the machine started."""

    busy_s: float
    """In processes. Interrupts are left out: those of this run's own messages are among them."""
    stolen_s: float


def core_times(cores: Sequence[int], root: Path = ROOT) -> list[CoreTimes]:
    """Of each of ``cores``; empty where the kernel does not show one of them."""
    per_s = os.sysconf("SC_CLK_TCK")
    found: dict[str, CoreTimes] = {}
    try:
        for line in (root / "proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and len(fields) >= 8:
                user, nice, system = (int(field) for field in fields[:3])
                found[name] = CoreTimes((user + nice + system) / per_s, int(fields[7]) / per_s)
        return [found[f"cpu{core}"] for core in cores]
    except (OSError, ValueError, KeyError):
        return []


def own_time_s() -> float:
    """Processor time of this process, all of its threads, and of every process that it started."""
    import psutil

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return float(total)


def own_processes() -> set[int]:
    """Numbers of this process and of those that it started."""
    import psutil

    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}


def mean_core_hz(cores: Sequence[int], root: Path = ROOT) -> float | None:
    """The mean clock of ``cores``; ``None`` where the kernel does not show it."""
    clocks = [_number(_cpu(root, core) / "cpufreq/scaling_cur_freq") for core in cores]
    known = [clock * 1000.0 for clock in clocks if clock is not None]
    return sum(known) / len(known) if known else None


def hot_events(cores: Sequence[int], root: Path = ROOT) -> int | None:
    """How often ``cores`` or their packages have lowered their clock for heat; ``None`` where nothing counts it."""
    folders = [_cpu(root, core) / "thermal_throttle" for core in cores]
    of_cores = [count for folder in folders if (count := _number(folder / "core_throttle_count")) is not None]
    of_packages = [count for folder in folders if (count := _number(folder / "package_throttle_count")) is not None]
    return sum(of_cores) + max(of_packages, default=0) if of_cores or of_packages else None


def _cpu(root: Path, core: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{core}"


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
