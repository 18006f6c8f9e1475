"""CPU, GPU and energy counters of one rank, read at the edges of the timed region."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import psutil

from hpcbench.results.device_records import DevicePower, HostActivity
from hpcbench.results.schema import RankResult
from hpcbench.worker.distributed.rank_environment import RankInfo, cpu_mask
from hpcbench.worker.measure.gpu import open_gpu
from hpcbench.worker.measure.gpu_device import SmClock, query_or_none
from hpcbench.worker.measure.host import ROOT, cpu_quota_cores, read_int, read_text, throttled_s

if TYPE_CHECKING:
    import torch


class CoreTimes(NamedTuple):
    """Seconds since the machine started."""

    busy_s: float
    """Seconds in processes. Interrupts are left out: those of this run's own messages are among them."""
    stolen_s: float


def read_core_times(cores: Sequence[int], root: Path = ROOT) -> list[CoreTimes]:
    """Return the times of each of ``cores``; empty if the kernel lacks one of them."""
    per_s = os.sysconf("SC_CLK_TCK")
    times: dict[str, CoreTimes] = {}
    try:
        for line in (root / "proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and len(fields) >= 8:
                user, nice, system = (int(field) for field in fields[:3])
                times[name] = CoreTimes((user + nice + system) / per_s, int(fields[7]) / per_s)
        return [times[f"cpu{core}"] for core in cores]
    except (OSError, ValueError, KeyError):
        return []


def process_tree_cpu_s() -> float:
    """Return the processor time of this process, all of its threads, and every process that it started."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return float(total)


def process_tree_pids() -> set[int]:
    """Return the process ids of this process and of those that it started."""
    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}


def mean_core_hz(cores: Sequence[int], root: Path = ROOT) -> float | None:
    """Return the mean clock of ``cores``; ``None`` if the kernel does not show it."""
    clocks = [read_int(_cpu_folder(root, core) / "cpufreq/scaling_cur_freq") for core in cores]
    clocks_hz = [clock * 1000.0 for clock in clocks if clock is not None]
    return sum(clocks_hz) / len(clocks_hz) if clocks_hz else None


def count_thermal_throttles(cores: Sequence[int], root: Path = ROOT) -> int | None:
    """Return how often ``cores`` or their packages have lowered their clock for heat; ``None`` if nothing counts it."""
    folders = [_cpu_folder(root, core) / "thermal_throttle" for core in cores]
    of_cores = [count for folder in folders if (count := read_int(folder / "core_throttle_count")) is not None]
    of_packages = [count for folder in folders if (count := read_int(folder / "package_throttle_count")) is not None]
    return sum(of_cores) + max(of_packages, default=0) if of_cores or of_packages else None


def _cpu_folder(root: Path, core: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{core}"


_NODE = "node"
"""The counters of a node's processors, as one."""
_MAX_PACKAGE_WATTS = 600
"""More than a processor package draws: after how long a counter may have wrapped around unseen."""


class EnergyCounter(NamedTuple):
    """A counter of consumed energy that starts anew with its driver, or wraps around at ``wraps_at``."""

    read: Callable[[], float | None]
    per_j: float
    """Counts per joule."""
    wraps_at: int | None = None


class EnergyMeter:
    """Energy that several counters count together."""

    def __init__(self, source: str, counters: Sequence[EnergyCounter]) -> None:
        self.source = source
        self._counters = counters
        self._before: list[float | None] = []

    def begin(self) -> None:
        self._before = [counter.read() for counter in self._counters]

    def advance(self, wall_s: float) -> float | None:
        """Return the joules since ``begin`` or the last call, ``wall_s`` ago; ``None`` if a counter lacks them.

        A counter that is lower than before has wrapped around once; one that may have done so more often has no value.
        """
        joules, readings = 0.0, [counter.read() for counter in self._counters]
        earlier, self._before = self._before, readings
        for (_, per_j, wraps_at), before, after in zip(self._counters, earlier, readings, strict=True):
            may_wrap_twice = wraps_at is not None and wall_s * _MAX_PACKAGE_WATTS * per_j > wraps_at
            if before is None or after is None or may_wrap_twice:
                return None
            used = after - before if after >= before else after - before + (wraps_at or 0)
            if used < 0:
                return None
            joules += used / per_j
        return joules


def open_node_meter(root: Path = ROOT) -> tuple[EnergyMeter | None, str | None]:
    """Return the meter of this node's processors, or the reason why this process may read none.

    Sources are RAPL (one counter per package, and one for its memory) and the counters of HPE Cray nodes.
    """
    # "psys" and "core" count again what packages do.
    by_kind: dict[str, list[EnergyCounter]] = {"package": [], "dram": []}
    is_readable = True
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        kind = (read_text(zone / "name") or "").partition("-")[0]
        wraps_at = read_int(zone / "max_energy_range_uj")
        if kind in by_kind and wraps_at is not None:
            by_kind[kind].append(EnergyCounter(partial(_read_energy, zone / "energy_uj"), 1e6, wraps_at))
            is_readable = is_readable and read_text(zone / "energy_uj") is not None
    counters = [counter for kind in by_kind.values() for counter in kind]
    if counters and is_readable:
        return EnergyMeter(f"rapl {' + '.join(kind for kind in by_kind if by_kind[kind])}, whole node", counters), None
    for name, part in (("cpu_energy", "cpu"), ("energy", "node")):
        file = root / "sys/cray/pm_counters" / name
        if read_text(file) is not None:
            return EnergyMeter(f"pm_counters {part}, whole node", [EnergyCounter(partial(_read_energy, file), 1)]), None
    return None, "the rapl counters may be read by root only" if counters else None


def _read_energy(file: Path) -> int:
    """Return the number at the beginning of ``file``; a unit may follow it."""
    return int(file.read_text().split()[0])


class _Reading(NamedTuple):
    """Counters at one edge of a region; what cannot be read is empty or ``None``."""

    at_s: float
    cores: list[CoreTimes]
    own_s: float
    throttled_s: float | None
    quota_cores: float | None
    hot_events: int | None
    core_hz: float | None
    gpu_others: int | None = None
    gpu_reasons: tuple[str, ...] = ()
    gpu_held_s: dict[str, float] = {}  # noqa: RUF012 - never changed
    gpu_clock: SmClock | None = None


_MAX_ENERGY_READINGS = 4096
_Region = tuple[_Reading, _Reading]
_Number = TypeVar("_Number", int, float)


class RegionCounters:
    """Counters of one rank. ``begin`` and ``end`` stand right around timed steps, once or several times.

    Power is read at once: make these before the rank has work for its device.

    Args:
        device: of the rank.
        info: the rank; a node's first one reads the energy of its processors.
        root: folder of the kernel's files.
        others: further devices that the rank's processes use.
    """

    def __init__(
        self, device: torch.device, info: RankInfo, root: Path = ROOT, others: Sequence[torch.device] = ()
    ) -> None:
        self.energy_absent: str | None = None
        """Reason why a counter that exists was not read."""
        self._root = root
        self._mask = cpu_mask()
        used = [device, *others] if device.type == "cuda" else []
        found = [open_gpu(one) for one in used]
        self._gpus = [one for one, _ in found if one is not None]
        reasons = [one.energy_absent if one else reason for one, reason in found]
        self._meters: dict[str, EnergyMeter] = {}
        """They have the names of their counters: two devices of a package share one."""
        if used:
            self.energy_absent = next(filter(None, reasons), None)
        if used and self.energy_absent is None:
            for one in self._gpus:
                self._meters[one.counter] = EnergyMeter(one.energy_source, [EnergyCounter(one.energy_j, 1)])
        elif device.type == "cpu" and info.local_rank == 0:
            meter, self.energy_absent = open_node_meter(root)
            self._meters = {} if meter is None else {_NODE: meter}
        self._power = {one.counter: (one.power_w(), one.power_cap_w()) for one in self._gpus}
        self._before: _Reading | None = None
        self._regions: list[_Region] = []
        self._joules: list[dict[str, float | None]] = []
        self._region_joules: dict[str, float | None] = {}
        self._read_s = 0.0
        self._energy_series: list[tuple[float, dict[str, float | None]]] = []
        """Time of each reading of the energy counters, and the joules since the region began."""
        self.timed_unix_s: tuple[float, float] | None = None
        """When the timed steps inside the region began and ended, if only some of it were."""

    @property
    def watched(self) -> HostActivity | None:
        """Activity in all regions together; figures that one reading lacks are absent. ``None`` without a region."""
        return _summarize_regions(self._regions) if self._regions else None

    @property
    def counted_j(self) -> dict[str, float]:
        """Energy by counter; empty unless every counter was read at every edge, and one has moved."""
        counted: dict[str, float] = {}
        for name in self._meters:
            joules_read = [joules for part in self._joules if (joules := part[name]) is not None]
            if len(joules_read) < len(self._joules):
                return {}
            counted[name] = math.fsum(joules_read)
        return counted if any(counted.values()) else {}

    @property
    def energy_j(self) -> float | None:
        """Energy of the devices or the node; ``None`` without ``counted_j``."""
        return sum(self.counted_j.values()) or None

    @property
    def energy_source(self) -> str | None:
        sources = dict.fromkeys(meter.source for meter in self._meters.values())
        return "; ".join(sources) if self.energy_j is not None else None

    def used_gpu_bytes(self) -> list[int]:
        """Return the memory in use on each device now; empty if its library does not report it of all."""
        used = [one.used_bytes() for one in self._gpus]
        return [] if None in used else [count for count in used if count is not None]

    def write_into(self, result: RankResult) -> None:
        """Set the fields of ``result`` that come from the counters."""
        result.watched, result.energy_j, result.energy_source = self.watched, self.energy_j, self.energy_source
        counted_j = self.counted_j
        result.device_power = {
            counter: DevicePower(energy_j=counted_j.get(counter), idle_power_w=idle_w, power_cap_w=cap_w)
            for counter, (idle_w, cap_w) in self._power.items()
        }
        for counter, steps_w in self._steps_power_w().items():
            power = result.device_power.setdefault(counter, DevicePower(energy_j=counted_j.get(counter)))
            power.steps_power_w = steps_w
        if self.energy_absent is not None and result.provenance:
            result.provenance["energy_absent"] = self.energy_absent

    def begin(self) -> None:
        self._before = self._read()
        for meter in self._meters.values():
            query_or_none(meter.begin)
        self._read_s = time.monotonic()
        self._region_joules = dict.fromkeys(self._meters, 0.0)
        self._energy_series = [(time.time(), dict(self._region_joules))]

    def read_energy(self) -> None:
        """Read the energy counters inside a region: once a minute at least, so that none wraps around unseen."""
        now_s, joules = time.monotonic(), self._region_joules
        for name, meter in self._meters.items():
            used, before = query_or_none(partial(meter.advance, now_s - self._read_s)), joules[name]
            joules[name] = None if used is None or before is None else before + used
        self._read_s = now_s
        if len(self._energy_series) >= _MAX_ENERGY_READINGS:
            del self._energy_series[1::2]
        self._energy_series.append((time.time(), dict(joules)))

    def end(self) -> None:
        """End the region, if one has begun."""
        if self._before is None:
            return
        self.read_energy()
        self._joules.append(self._region_joules)
        self._regions.append((self._before, self._read()))
        self._before = None

    def _steps_power_w(self) -> dict[str, float]:
        """Mean power by counter while steps were timed, between the readings next to both ends."""
        if self.timed_unix_s is None or self.timed_unix_s[0] >= self.timed_unix_s[1]:
            return {}
        times, powers = [at for at, _ in self._energy_series], dict[str, float]()
        for name in self._meters:
            joules = [reading[name] for _, reading in self._energy_series]
            if None not in joules:
                first_j, last_j = np.interp(self.timed_unix_s, times, np.array(joules, dtype=float))
                powers[name] = float(last_j - first_j) / (self.timed_unix_s[1] - self.timed_unix_s[0])
        return powers

    def _read(self) -> _Reading:
        mask, root, gpus = self._mask, self._root, self._gpus
        own_pids = process_tree_pids() if gpus else set[int]()
        others = [count for one in gpus if (count := one.other_processes(own_pids)) is not None]
        clocks = [clock for one in gpus if (clock := one.sm_clock()) is not None]
        held_s: dict[str, float] = {}
        for one in gpus:
            for name, seconds in one.violation_s().items():
                held_s[name] = held_s.get(name, 0.0) + seconds
        reasons = tuple(dict.fromkeys(reason for one in gpus for reason in one.throttle_reasons()))
        of_gpu = (max(others, default=None), reasons, held_s, min(clocks, default=None)) if gpus else ()
        return _Reading(
            time.monotonic(), read_core_times(mask, root), process_tree_cpu_s(), throttled_s(root),
            cpu_quota_cores(root), count_thermal_throttles(mask, root), mean_core_hz(mask, root),
            *of_gpu,
        )  # fmt: skip


def _summarize_regions(regions: Sequence[_Region]) -> HostActivity:
    readings = [reading for region in regions for reading in region]
    cores = range(min(len(reading.cores) for reading in readings))
    clocks_hz = [reading.core_hz for reading in readings]
    held = [name for name in readings[0].gpu_held_s if all(name in reading.gpu_held_s for reading in readings)]
    sm_clocks = [reading.gpu_clock for reading in readings if reading.gpu_clock is not None]
    return HostActivity(
        wall_s=sum(after.at_s - before.at_s for before, after in regions),
        busy_s=[sum(round(b.cores[core].busy_s - a.cores[core].busy_s, 2) for a, b in regions) for core in cores],
        stolen_s=[sum(round(b.cores[core].stolen_s - a.cores[core].stolen_s, 2) for a, b in regions) for core in cores],
        own_s=sum(after.own_s - before.own_s for before, after in regions),
        throttled_s=_sum_differences([(before.throttled_s, after.throttled_s) for before, after in regions]),
        cpu_quota_cores=readings[-1].quota_cores,
        hot_events=_sum_differences([(before.hot_events, after.hot_events) for before, after in regions]),
        core_hz=[hz for hz in (clocks_hz[0], clocks_hz[-1]) if hz is not None] if None not in clocks_hz else [],
        gpu_others=max((reading.gpu_others for reading in readings if reading.gpu_others is not None), default=None),
        gpu_reasons=list(dict.fromkeys(reason for reading in readings for reason in reading.gpu_reasons)),
        gpu_held_s={name: sum(b.gpu_held_s[name] - a.gpu_held_s[name] for a, b in regions) for name in held},
        gpu_sm_hz=list(max(sm_clocks)) if sm_clocks else [],
    )


def _sum_differences(pairs: Sequence[tuple[_Number | None, _Number | None]]) -> _Number | None:
    differences = [after - before for before, after in pairs if before is not None and after is not None]
    return sum(differences) if len(differences) == len(pairs) else None
