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
    """Of one rank. ``begin`` and ``end`` stand right around timed steps, once or several times; the fields add up."""

    def __init__(self, device: torch.device, info: RankInfo, root: Path = Path("/")) -> None:
        self.watched: Watched | None = None
        self.energy_absent: str | None = None
        """Why a counter that is there was not read."""
        self._root = root
        self._mask = cpu_mask()
        self._gpu = _gpu_of(device)
        self._meter: energy.Meter | None = energy.OfGpu(self._gpu) if self._gpu else None
        if device.type == "cpu" and info.local_rank == 0:
            self._meter, self.energy_absent = energy.node_meter(root)
        self._before: tuple[_OfCores, _OfGpu | None] | None = None
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

    def begin(self) -> None:
        """A timed step is about to begin."""
        self._before = (self._read_cores(), self._read_gpu())
        if self._meter:
            nvml.answer(self._meter.begin)

    def end(self) -> None:
        """The last timed step for now has ended."""
        if self._before is None:
            return
        wall_s = time.monotonic() - self._before[0].at_s
        if self._meter:
            self._joules.append(nvml.answer(lambda: self._meter and self._meter.end(wall_s)))
        part = _between(*self._before, self._read_cores(), self._read_gpu())
        part.cpu_quota_cores = cgroup.cpu_quota_cores(*self._groups())
        self.watched = part if self.watched is None else _joined(self.watched, part)
        self._before = None

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
        hot_events=_whole(_rise(before.hot_events, after.hot_events)),
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


def _joined(first: Watched, then: Watched) -> Watched:
    """Both regions as one; what one of them does not know is not known of both."""
    held = {
        name: first.gpu_held_s[name] + then.gpu_held_s[name] for name in first.gpu_held_s if name in then.gpu_held_s
    }
    return Watched(
        wall_s=first.wall_s + then.wall_s,
        busy_s=_sums(first.busy_s, then.busy_s),
        stolen_s=_sums(first.stolen_s, then.stolen_s),
        own_s=_total(first.own_s, then.own_s),
        throttled_s=_total(first.throttled_s, then.throttled_s),
        cpu_quota_cores=then.cpu_quota_cores,
        hot_events=_whole(_total(first.hot_events, then.hot_events)),
        core_hz=[first.core_hz[0], then.core_hz[1]] if first.core_hz and then.core_hz else [],
        gpu_others=max((count for count in (first.gpu_others, then.gpu_others) if count is not None), default=None),
        gpu_reasons=list(dict.fromkeys(first.gpu_reasons + then.gpu_reasons)),
        gpu_held_s=held,
        gpu_sm_hz=max(first.gpu_sm_hz, then.gpu_sm_hz),
    )


def _sums(first: list[float], then: list[float]) -> list[float]:
    return [one + other for one, other in zip(first, then, strict=True)] if len(first) == len(then) else []


def _total(first: float | None, then: float | None) -> float | None:
    return None if first is None or then is None else first + then


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)


def _rise(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
