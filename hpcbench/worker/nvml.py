"""NVIDIA's management library, as far as a rank asks it. Every answer may be absent: library, driver, permission."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_INIT_PID_NAMESPACE = 0xEFFFFFFC
"""The number that Linux gives the first namespace of processes."""
_HELD_DOWN = {
    "SwPowerCap": "power cap", "HwSlowdown": "hardware slowdown", "SwThermalSlowdown": "heat (driver)",
    "HwThermalSlowdown": "heat (hardware)", "HwPowerBrakeSlowdown": "power brake",
}  # fmt: skip
_IDLE = 0x1
_POLICIES = {"power": "NVML_PERF_POLICY_POWER", "thermal": "NVML_PERF_POLICY_THERMAL"}


class Clock(NamedTuple):
    """An SM clock and the most that it can be."""

    hz: float
    most_hz: float


class Gpu:
    """One device, asked through ``library`` (the module ``pynvml``)."""

    def __init__(self, library: Any, handle: Any, is_partition: bool) -> None:
        self.library = library
        self.handle = handle
        self.is_partition = is_partition
        """A MIG instance: counters of the whole device say nothing about it."""

    def ask(self, name: str, *arguments: Any) -> Any:
        """What ``pynvml.<name>`` says of this device, ``None`` where it says nothing."""
        return answer(lambda: getattr(self.library, name)(self.handle, *arguments))

    def energy_j(self) -> float | None:
        """Since the driver was loaded."""
        millijoules = None if self.is_partition else self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def other_processes(self, own: set[int]) -> int | None:
        """Processes that compute on the device beside ``own``.

        In a container NVML's numbers may be the host's: then all but one, this rank's, are others.
        """
        found = None if self.is_partition else self.ask("nvmlDeviceGetComputeRunningProcesses")
        if found is None:
            return None
        if _in_first_pid_namespace():
            return len({process.pid for process in found} - own)
        return max(0, len({process.pid for process in found}) - 1)

    def reasons(self) -> list[str]:
        """Why the clock is held down now; being idle and a clock that somebody set are no reasons."""
        bits = self._reason_bits()
        names = {text: getattr(self.library, f"nvmlClocksThrottleReason{name}", 0) for name, text in _HELD_DOWN.items()}
        return [text for text, bit in names.items() if bits & bit]

    def held_s(self) -> dict[str, float]:
        """Seconds for which power and heat have held the clock down, since ever."""
        found = {}
        for name, policy in _POLICIES.items():
            status = self.ask("nvmlDeviceGetViolationStatus", getattr(self.library, policy, None))
            if status is not None:
                found[name] = status.violationTime / 1e9
        return found

    def sm_clock(self) -> Clock | None:
        """``None`` while the device is idle: its clock then means nothing."""
        kind = getattr(self.library, "NVML_CLOCK_SM", 1)
        now, most = self.ask("nvmlDeviceGetClockInfo", kind), self.ask("nvmlDeviceGetMaxClockInfo", kind)
        if now is None or most is None or self._reason_bits() & _IDLE:
            return None
        return Clock(now * 1e6, most * 1e6)

    def _reason_bits(self) -> int:
        return int(self.ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0)


def load() -> Any | None:
    """The module ``pynvml``, ready; ``None`` without it or without a driver."""

    def ready() -> Any:
        import pynvml

        pynvml.nvmlInit()
        return pynvml

    return answer(ready)


def open_gpu(uuid: str) -> Gpu | None:
    """The device that torch gives this ``uuid`` (without a prefix), ``None`` where NVML does not know it."""
    library = load()
    if library is None:
        return None
    handle = answer(lambda: library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    if handle is not None:
        mode = answer(lambda: library.nvmlDeviceGetMigMode(handle))
        return Gpu(library, handle, is_partition=bool(mode and mode[0]))
    part = answer(lambda: library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))
    whole = None if part is None else answer(lambda: library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))
    return None if whole is None else Gpu(library, whole, is_partition=True)


def answer(question: Callable[[], Any]) -> Any:
    """What ``question`` returns; ``None`` where it raises, whatever that is: a broken driver raises anything."""
    try:
        return question()
    except Exception:  # noqa: BLE001
        return None


def _in_first_pid_namespace(namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    try:
        return namespace.stat().st_ino == _INIT_PID_NAMESPACE
    except OSError:
        return False
