"""The questions that hpcbench has for a GPU of any vendor. A query without an answer returns ``None``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hpcbench.worker.measure.host import read_int

_ROOT_PID_NAMESPACE_INODE = 0xEFFFFFFC
"""The number that Linux gives the first namespace of processes."""


class NoSuchDevice(Exception):
    """A vendor's library does not show the device; the text is the reason."""


class HostGpus(NamedTuple):
    """The facts of a host that a vendor's library reports; ``links`` has a row for each device."""

    driver: str | None
    gpus: list[dict[str, Any]]
    links: list[str]


class SmClock(NamedTuple):
    """The clock of the multiprocessors and the most that it can be."""

    hz: float
    max_hz: float


class GpuDevice(Protocol):
    """A device, asked through the library of its vendor."""

    energy_source: str
    """The library, and the part of the machine whose power and energy its counter has."""
    counter: str
    """Name of the counter of energy: devices of one package share one."""
    energy_absent: str | None
    """Reason why no counter of energy describes this device."""

    def energy_j(self) -> float | None:
        """Return the energy (J) since the driver was loaded."""

    def power_w(self) -> float | None:
        """Return the power (W) that the device draws now, or on average over the last moments."""

    def power_cap_w(self) -> float | None:
        """Return the limit of its power (W)."""

    def used_bytes(self) -> int | None:
        """Return the memory (bytes) that all processes use on the device."""

    def other_processes(self, own_pids: set[int]) -> int | None:
        """Return the number of processes that compute on the device beside ``own_pids``."""

    def throttle_reasons(self) -> list[str]:
        """Reasons why the clock is reduced now; being idle and a clock that a user set are none."""

    def violation_s(self) -> dict[str, float]:
        """Seconds for which power and heat have held the clock down, since some moment before."""

    def sm_clock(self) -> SmClock | None:
        """``None`` while the device is idle: its clock then means nothing."""


def query_or_none(question: Callable[[], Any]) -> Any:
    """Return the answer of ``question``, or ``None`` if it raises: a broken driver may raise any exception."""
    try:
        return question()
    except Exception:  # noqa: BLE001
        return None


def numa_node(pci_address: str | None, root: Path) -> int | None:
    """The NUMA node of a device; the kernel writes PCI domains with four digits, NVML with eight."""
    folder = root / "sys/bus/pci/devices"
    node = read_int(folder / pci_address[-12:].lower() / "numa_node") if pci_address is not None else None
    return node if node is not None and node >= 0 else None


def in_root_pid_namespace() -> bool:
    """Whether the numbers of processes here are the host's."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _ROOT_PID_NAMESPACE_INODE
    except OSError:
        return False
