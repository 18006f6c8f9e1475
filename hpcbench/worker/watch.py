"""What happens around a rank during its timed steps, read at their two edges; nothing is asked in between."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcbench.results.schema import Watched
from hpcbench.worker import cgroup, cores, energy, nvml
from hpcbench.worker.cores import CoreTimes
from hpcbench.worker.environ import cpu_mask
from hpcbench.worker.rank import RankInfo

if TYPE_CHECKING:
    import torch


class _OfCores(NamedTuple):
    at_s: float
    times: list[CoreTimes]
    own_s: float
    throttled_s: float | None
    hot_events: int | None
    hz: float | None


class _OfGpu(NamedTuple):
    others: int | None
    reasons: list[str]
    held_s: dict[str, float]
    clock: nvml.Clock | None


class Watch:
    """Of one rank. ``begin`` and ``end`` stand right around the timed steps; afterwards the fields are set."""

    def __init__(self, device: torch.device, info: RankInfo, root: Path = Path("/")) -> None:
        self.watched: Watched | None = None
        self.energy_j: float | None = None
        self.energy_absent: str | None = None
        """Why a counter that is there was not read."""
        self._root = root
        self._mask = cpu_mask()
        self._gpu = _gpu_of(device)
        self._meter: energy.Meter | None = energy.OfGpu(self._gpu) if self._gpu else None
        if device.type == "cpu" and info.local_rank == 0:
            self._meter, self.energy_absent = energy.node_meter(root)
        self._energies_j: list[float | None] = []
        self._began_s = 0.0
        self._before: tuple[_OfCores, _OfGpu | None] | None = None

    @property
    def energy_source(self) -> str | None:
        """What ``energy_j`` was read from."""
        return self._meter.source if self._meter and self.energy_j is not None else None

    def begin(self) -> None:
        """Timed steps are about to begin; after a pause too, which counts as no energy."""
        self._began_s = time.monotonic()
        if self._before is None:
            self._before = (self._read_cores(), self._read_gpu())
        if self._meter:
            nvml.answer(self._meter.begin)

    def end(self) -> None:
        """The last timed step, or the last before a pause, has ended."""
        if self._before is None:
            return
        wall_s = time.monotonic() - self._began_s
        if self._meter:
            self._energies_j.append(nvml.answer(lambda: self._meter and self._meter.end(wall_s)))
            known = [energy_j for energy_j in self._energies_j if energy_j is not None]
            self.energy_j = sum(known) if len(known) == len(self._energies_j) else None
        self.watched = _between(*self._before, self._read_cores(), self._read_gpu())
        self.watched.cpu_quota_cores = cgroup.cpu_quota_cores(*self._groups())

    def _read_cores(self) -> _OfCores:
        mask, root = self._mask, self._root
        return _OfCores(
            time.monotonic(),
            cores.core_times(mask, root),
            cores.own_time_s(),
            cgroup.throttled_s(*self._groups()),
            cores.hot_events(mask, root),
            cores.mean_core_hz(mask, root),
        )

    def _groups(self) -> tuple[Path, Path]:
        return self._root / "proc/self/cgroup", self._root / "sys/fs/cgroup"

    def _read_gpu(self) -> _OfGpu | None:
        gpu = self._gpu
        if gpu is None:
            return None
        return _OfGpu(gpu.other_processes(cores.own_processes()), gpu.reasons(), gpu.held_s(), gpu.sm_clock())


def _gpu_of(device: torch.device) -> nvml.Gpu | None:
    if device.type != "cuda":
        return None
    from hpcbench.worker.gpu import device_uuid

    return nvml.open_gpu(device_uuid(device))


def _between(before: _OfCores, gpu_before: _OfGpu | None, after: _OfCores, gpu_after: _OfGpu | None) -> Watched:
    pairs = list(zip(before.times, after.times, strict=False))
    clocks = [hz for hz in (before.hz, after.hz) if hz is not None]
    watched = Watched(
        wall_s=after.at_s - before.at_s,
        busy_s=[round(later.busy_s - earlier.busy_s, 2) for earlier, later in pairs],
        stolen_s=[round(later.stolen_s - earlier.stolen_s, 2) for earlier, later in pairs],
        own_s=after.own_s - before.own_s,
        throttled_s=_rise(before.throttled_s, after.throttled_s),
        hot_events=int(rise) if (rise := _rise(before.hot_events, after.hot_events)) is not None else None,
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


def _rise(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
