"""Counters of energy: of the rank's GPU, else of its whole node. What cannot be read is no value."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from hpcbench.worker.nvml import Gpu

ROOT = Path("/")
_MOST_WATTS = 600
"""More than a processor package draws: decides after how long a counter may have wrapped around unseen."""


class Meter(Protocol):
    """Something that counts energy."""

    source: str

    def begin(self) -> None:
        """Start to count."""

    def end(self, wall_s: float) -> float | None:
        """Joules since ``begin``, ``wall_s`` ago; ``None`` where they cannot be told."""


class _Counter(NamedTuple):
    file: Path
    range_uj: int


class Rapl:
    """Running Average Power Limit: one counter a package, and one for its memory where there is one."""

    def __init__(self, counters: list[_Counter], source: str) -> None:
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
            if wall_s * _MOST_WATTS * 1e6 > counter.range_uj:
                return None
        return total_uj / 1e6


class PmCounters:
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


class OfGpu:
    """NVML's counter of one GPU."""

    source = "nvml"

    def __init__(self, gpu: Gpu) -> None:
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


def node_meter(root: Path = ROOT) -> tuple[Meter | None, str | None]:
    """The counter of this node's processors, or why there is none that this process may read."""
    counters, names = _rapl_counters(root / "sys/class/powercap")
    if counters and all(_readable(counter.file) for counter in counters):
        return Rapl(counters, f"rapl {' + '.join(names)}, whole node"), None
    pm = root / "sys/cray/pm_counters"
    for name, what in (("cpu_energy", "cpu"), ("energy", "node")):
        if _readable(pm / name):
            return PmCounters(pm / name, f"pm_counters {what}, whole node"), None
    return None, "the rapl counters may be read by root only" if counters else None


def _rapl_counters(powercap: Path) -> tuple[list[_Counter], list[str]]:
    """Packages and, below them, their memory. ``psys`` and ``core`` count again what others do."""
    found: dict[str, list[_Counter]] = {"package": [], "dram": []}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            kind = (zone / "name").read_text().partition("-")[0].strip()
            if kind in found:
                found[kind].append(_Counter(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text())))
        except (OSError, ValueError):
            continue
    return [counter for kind in found.values() for counter in kind], [name for name, kind in found.items() if kind]


def _readable(file: Path) -> bool:
    try:
        return bool(file.read_text().strip())
    except OSError:
        return False
