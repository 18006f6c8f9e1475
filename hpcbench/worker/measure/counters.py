"""CPU, GPU and energy counters of one rank, read at the edges of the timed region."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpcbench.results.schema import HostActivity, RankResult
from hpcbench.worker.distributed.rank_environment import RankInfo, cpu_mask
from hpcbench.worker.measure import gpu, host
from hpcbench.worker.measure.gpu import NvmlDevice

if TYPE_CHECKING:
    import torch

CORES_ROOT = Path("/")


class CoreTimes(NamedTuple):
    """Seconds since the machine started."""

    busy_s: float
    """In processes. Interrupts are left out: those of this run's own messages are among them."""
    stolen_s: float


def read_core_times(cores: Sequence[int], root: Path = CORES_ROOT) -> list[CoreTimes]:
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


def process_tree_cpu_s() -> float:
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


def process_tree_pids() -> set[int]:
    """Numbers of this process and of those that it started."""
    import psutil

    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}


def mean_core_hz(cores: Sequence[int], root: Path = CORES_ROOT) -> float | None:
    """The mean clock of ``cores``; ``None`` where the kernel does not show it."""
    clocks = [_read_int(_cpu_folder(root, core) / "cpufreq/scaling_cur_freq") for core in cores]
    known = [clock * 1000.0 for clock in clocks if clock is not None]
    return sum(known) / len(known) if known else None


def count_thermal_throttles(cores: Sequence[int], root: Path = CORES_ROOT) -> int | None:
    """How often ``cores`` or their packages have lowered their clock for heat; ``None`` where nothing counts it."""
    folders = [_cpu_folder(root, core) / "thermal_throttle" for core in cores]
    of_cores = [count for folder in folders if (count := _read_int(folder / "core_throttle_count")) is not None]
    of_packages = [count for folder in folders if (count := _read_int(folder / "package_throttle_count")) is not None]
    return sum(of_cores) + max(of_packages, default=0) if of_cores or of_packages else None


def _cpu_folder(root: Path, core: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{core}"


def _read_int(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


METERS_ROOT = Path("/")
_MAX_PACKAGE_WATTS = 600
"""More than a processor package draws: decides after how long a counter may have wrapped around unseen."""


class EnergyMeter(Protocol):
    """Something that counts energy."""

    source: str

    def begin(self) -> None:
        """Start to count."""

    def end(self, wall_s: float) -> float | None:
        """Joules since ``begin``, ``wall_s`` ago; ``None`` where they cannot be told."""


class _RaplCounter(NamedTuple):
    file: Path
    range_uj: int


class RaplMeter:
    """Running Average Power Limit: one counter a package, and one for its memory where there is one."""

    def __init__(self, counters: list[_RaplCounter], source: str) -> None:
        self.source = source
        self._counters = counters
        self._before: list[int] = []

    def begin(self) -> None:
        """Start to count."""
        self._before = [int(counter.file.read_text()) for counter in self._counters]

    def end(self, wall_s: float) -> float | None:
        """A counter that ended lower has wrapped around once; ``None`` where it could have done so more often."""
        total_uj = 0
        for counter, before in zip(self._counters, self._before, strict=True):
            used = int(counter.file.read_text()) - before
            total_uj += used if used >= 0 else used + counter.range_uj
            if wall_s * _MAX_PACKAGE_WATTS * 1e6 > counter.range_uj:
                return None
        return total_uj / 1e6


class CrayMeter:
    """HPE Cray's counters of a node: a number of joules and its unit."""

    def __init__(self, file: Path, source: str) -> None:
        self.source = source
        self._file = file
        self._before = 0

    def begin(self) -> None:
        """Start to count."""
        self._before = self._read()

    def end(self, wall_s: float) -> float | None:
        """The counter does not wrap around; it starts anew with the node."""
        used = self._read() - self._before
        return float(used) if used >= 0 else None

    def _read(self) -> int:
        return int(self._file.read_text().split()[0])


class GpuEnergyMeter:
    """NVML's counter of one GPU."""

    source = "nvml"

    def __init__(self, gpu: NvmlDevice) -> None:
        self._gpu = gpu
        self._before: float | None = None

    def begin(self) -> None:
        """Start to count."""
        self._before = self._gpu.energy_j()

    def end(self, wall_s: float) -> float | None:
        """The counter starts anew with the driver."""
        after = self._gpu.energy_j()
        if self._before is None or after is None or after < self._before:
            return None
        return after - self._before


def open_node_meter(root: Path = METERS_ROOT) -> tuple[EnergyMeter | None, str | None]:
    """The counter of this node's processors, or why there is none that this process may read."""
    counters, names = _rapl_counters(root / "sys/class/powercap")
    if counters and all(_is_readable(counter.file) for counter in counters):
        return RaplMeter(counters, f"rapl {' + '.join(names)}, whole node"), None
    pm = root / "sys/cray/pm_counters"
    for name, what in (("cpu_energy", "cpu"), ("energy", "node")):
        if _is_readable(pm / name):
            return CrayMeter(pm / name, f"pm_counters {what}, whole node"), None
    return None, "the rapl counters may be read by root only" if counters else None


def _rapl_counters(powercap: Path) -> tuple[list[_RaplCounter], list[str]]:
    """Packages and, below them, their memory. ``psys`` and ``core`` count again what others do."""
    found: dict[str, list[_RaplCounter]] = {"package": [], "dram": []}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            kind = (zone / "name").read_text().partition("-")[0].strip()
            if kind in found:
                found[kind].append(_RaplCounter(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text())))
        except (OSError, ValueError):
            continue
    return [counter for kind in found.values() for counter in kind], [name for name, kind in found.items() if kind]


def _is_readable(file: Path) -> bool:
    try:
        return bool(file.read_text().strip())
    except OSError:
        return False


class _CoreReading(NamedTuple):
    at_s: float
    times: list[CoreTimes]
    own_s: float
    throttled_s: float | None
    hot_events: int | None
    hz: float | None


class _GpuReading(NamedTuple):
    others: int | None
    reasons: list[str]
    held_s: dict[str, float]
    clock: gpu.SmClock | None


class RegionCounters:
    """Of one rank. ``begin`` and ``end`` stand right around timed steps, once or several times; the fields add up."""

    def __init__(self, device: torch.device, info: RankInfo, root: Path = Path("/")) -> None:
        self.watched: HostActivity | None = None
        self.energy_absent: str | None = None
        """Why a counter that is there was not read."""
        self._root = root
        self._mask = cpu_mask()
        self._gpu = _open_rank_gpu(device)
        self._meter: EnergyMeter | None = GpuEnergyMeter(self._gpu) if self._gpu else None
        if device.type == "cpu" and info.local_rank == 0:
            self._meter, self.energy_absent = open_node_meter(root)
        self._before: tuple[_CoreReading, _GpuReading | None] | None = None
        self._joules: list[float | None] = []

    @property
    def energy_j(self) -> float | None:
        """Of the device or the node; ``None`` where it could not be read at every edge."""
        known = [joules for joules in self._joules if joules is not None]
        return sum(known) if known and len(known) == len(self._joules) else None

    @property
    def energy_source(self) -> str | None:
        """What ``energy_j`` was read from."""
        return self._meter.source if self._meter and self.energy_j is not None else None

    def write_into(self, result: RankResult) -> None:
        """Set the fields of ``result`` that come from the counters."""
        result.watched, result.energy_j, result.energy_source = self.watched, self.energy_j, self.energy_source

    def begin(self) -> None:
        """A timed step is about to begin."""
        self._before = (self._read_cores(), self._read_gpu())
        if self._meter:
            gpu.query_or_none(self._meter.begin)

    def end(self) -> None:
        """The last timed step for now has ended."""
        if self._before is None:
            return
        wall_s = time.monotonic() - self._before[0].at_s
        if self._meter:
            self._joules.append(gpu.query_or_none(lambda: self._meter and self._meter.end(wall_s)))
        part = _reading_difference(*self._before, self._read_cores(), self._read_gpu())
        part.cpu_quota_cores = host.cpu_quota_cores(*self._groups())
        self.watched = part if self.watched is None else _add_regions(self.watched, part)
        self._before = None

    def _read_cores(self) -> _CoreReading:
        mask, root = self._mask, self._root
        return _CoreReading(
            time.monotonic(),
            read_core_times(mask, root),
            process_tree_cpu_s(),
            host.throttled_s(*self._groups()),
            count_thermal_throttles(mask, root),
            mean_core_hz(mask, root),
        )

    def _groups(self) -> tuple[Path, Path]:
        return self._root / "proc/self/cgroup", self._root / "sys/fs/cgroup"

    def _read_gpu(self) -> _GpuReading | None:
        gpu = self._gpu
        if gpu is None:
            return None
        return _GpuReading(gpu.other_processes(process_tree_pids()), gpu.reasons(), gpu.held_s(), gpu.sm_clock())


def _open_rank_gpu(device: torch.device) -> gpu.NvmlDevice | None:
    if device.type != "cuda":
        return None
    from hpcbench.worker.measure.gpu import device_uuid

    return gpu.open_nvml_device(device_uuid(device))


def _reading_difference(
    before: _CoreReading, gpu_before: _GpuReading | None, after: _CoreReading, gpu_after: _GpuReading | None
) -> HostActivity:
    pairs = list(zip(before.times, after.times, strict=False))
    clocks = [hz for hz in (before.hz, after.hz) if hz is not None]
    watched = HostActivity(
        wall_s=after.at_s - before.at_s,
        busy_s=[round(later.busy_s - earlier.busy_s, 2) for earlier, later in pairs],
        stolen_s=[round(later.stolen_s - earlier.stolen_s, 2) for earlier, later in pairs],
        own_s=after.own_s - before.own_s,
        throttled_s=_subtract_known(before.throttled_s, after.throttled_s),
        hot_events=_int_or_none(_subtract_known(before.hot_events, after.hot_events)),
        core_hz=clocks if len(clocks) == 2 else [],
    )
    if gpu_before and gpu_after:
        counts = [one.others for one in (gpu_before, gpu_after) if one.others is not None]
        seen = [one.clock for one in (gpu_before, gpu_after) if one.clock is not None]
        watched.gpu_others = max(counts, default=None)
        watched.gpu_reasons = list(dict.fromkeys(gpu_before.reasons + gpu_after.reasons))
        watched.gpu_held_s = {
            name: gpu_after.held_s[name] - held for name, held in gpu_before.held_s.items() if name in gpu_after.held_s
        }
        watched.gpu_sm_hz = list(max(seen)) if seen else []
    return watched


def _add_regions(first: HostActivity, then: HostActivity) -> HostActivity:
    """Both regions as one; what one of them does not know is not known of both."""
    held = {
        name: first.gpu_held_s[name] + then.gpu_held_s[name] for name in first.gpu_held_s if name in then.gpu_held_s
    }
    return HostActivity(
        wall_s=first.wall_s + then.wall_s,
        busy_s=_add_lists(first.busy_s, then.busy_s),
        stolen_s=_add_lists(first.stolen_s, then.stolen_s),
        own_s=_add_known(first.own_s, then.own_s),
        throttled_s=_add_known(first.throttled_s, then.throttled_s),
        cpu_quota_cores=then.cpu_quota_cores,
        hot_events=_int_or_none(_add_known(first.hot_events, then.hot_events)),
        core_hz=[first.core_hz[0], then.core_hz[1]] if first.core_hz and then.core_hz else [],
        gpu_others=max((count for count in (first.gpu_others, then.gpu_others) if count is not None), default=None),
        gpu_reasons=list(dict.fromkeys(first.gpu_reasons + then.gpu_reasons)),
        gpu_held_s=held,
        gpu_sm_hz=max(first.gpu_sm_hz, then.gpu_sm_hz),
    )


def _add_lists(first: list[float], then: list[float]) -> list[float]:
    return [one + other for one, other in zip(first, then, strict=True)] if len(first) == len(then) else []


def _add_known(first: float | None, then: float | None) -> float | None:
    return None if first is None or then is None else first + then


def _int_or_none(count: float | None) -> int | None:
    return None if count is None else int(count)


def _subtract_known(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
