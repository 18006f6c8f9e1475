"""NVIDIA's devices through NVML: the module ``pynvml`` of ``nvidia-ml-py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from hpcbench.worker.measure.gpu_device import (
    HostGpus,
    NoSuchDevice,
    SmClock,
    in_root_pid_namespace,
    numa_node,
    query_or_none,
)

_THROTTLE_REASONS = {
    "SwPowerCap": "power cap", "HwSlowdown": "hardware slowdown", "SwThermalSlowdown": "heat (driver)",
    "HwThermalSlowdown": "heat (hardware)", "HwPowerBrakeSlowdown": "power brake",
}  # fmt: skip
_IDLE_REASON_BIT = 0x1
_VIOLATION_POLICIES = {"power": "NVML_PERF_POLICY_POWER", "thermal": "NVML_PERF_POLICY_THERMAL"}
_PCI_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""Abbreviations in nvidia-smi of the nearest common ancestor of two devices, by NVML's number."""
_NVLINK_SWITCH_TYPE = 2
"""``NVML_NVLINK_DEVICE_TYPE_SWITCH``"""


class NvmlDevice:
    """A device, asked through ``library`` (the module ``pynvml``)."""

    energy_source = "nvml"

    def __init__(self, library: Any, handle: Any, is_partition: bool, counter: str = "") -> None:
        self.library = library
        self.handle = handle
        self.counter = counter
        self.is_partition = is_partition
        """A MIG instance: counters of the whole device do not describe it."""
        self.energy_absent = "a MIG instance has no counter of energy of its own" if is_partition else None

    def query(self, name: str, *arguments: Any, convert: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return the value of ``pynvml.<name>`` for this device, converted; ``None`` where there is none."""
        return query_or_none(lambda: convert(getattr(self.library, name)(self.handle, *arguments)))

    def energy_j(self) -> float | None:
        """Return the energy (J) since the driver was loaded; ``None`` for a MIG instance or without a counter."""
        return self._query_thousandths("nvmlDeviceGetTotalEnergyConsumption")

    def power_w(self) -> float | None:
        """Return the power (W): of the last moment, from Ampere on the mean of a second; ``None`` as the energy."""
        return self._query_thousandths("nvmlDeviceGetPowerUsage")

    def power_cap_w(self) -> float | None:
        """Return the limit (W) that the driver enforces; ``None`` for a MIG instance."""
        return self._query_thousandths("nvmlDeviceGetEnforcedPowerLimit")

    def _query_thousandths(self, name: str) -> float | None:
        return None if self.is_partition else cast(float | None, self.query(name, convert=lambda value: value / 1e3))

    def used_bytes(self) -> int | None:
        """Return the memory (bytes) that all processes use on the device; ``None`` for a MIG instance."""
        if self.is_partition:
            return None
        return cast(int | None, self.query("nvmlDeviceGetMemoryInfo", convert=lambda memory: int(memory.used)))

    def other_processes(self, own_pids: set[int]) -> int | None:
        """Return the number of processes that compute on the device beside ``own_pids``.

        In a container NVML's numbers may be the host's: then all but one, this rank's, are others. ``None`` if NVML
        does not report them, and for a MIG instance.
        """
        if self.is_partition:
            return None
        pids = self.query(
            "nvmlDeviceGetComputeRunningProcesses", convert=lambda processes: {each.pid for each in processes}
        )
        if pids is None:
            return None
        return len(pids - own_pids) if in_root_pid_namespace() else max(0, len(pids) - 1)

    def throttle_reasons(self) -> list[str]:
        """Reasons why the clock is reduced now; being idle and a clock that a user set are none."""
        bits, library = self._reason_bits(), self.library
        return [
            text
            for name, text in _THROTTLE_REASONS.items()
            if bits & getattr(library, f"nvmlClocksThrottleReason{name}", 0)
        ]

    def violation_s(self) -> dict[str, float]:
        """Seconds for which power and heat have held the clock down, since ever."""
        violations_s = {}
        for name, policy in _VIOLATION_POLICIES.items():
            status = self.query("nvmlDeviceGetViolationStatus", getattr(self.library, policy, None))
            if status is not None:
                violations_s[name] = status.violationTime / 1e9
        return violations_s

    def sm_clock(self) -> SmClock | None:
        """``None`` while the device is idle: its clock then means nothing."""
        kind = getattr(self.library, "NVML_CLOCK_SM", 1)
        now, most = self.query("nvmlDeviceGetClockInfo", kind), self.query("nvmlDeviceGetMaxClockInfo", kind)
        if now is None or most is None or self._reason_bits() & _IDLE_REASON_BIT:
            return None
        return SmClock(now * 1e6, most * 1e6)

    def _reason_bits(self) -> int:
        return int(self.query("nvmlDeviceGetCurrentClocksThrottleReasons") or 0)


def load_nvml() -> Any:
    """Return the module ``pynvml``, ready; raises its exceptions without a driver."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def open_nvml_device(uuid: str) -> NvmlDevice:
    """The device that torch gives this ``uuid`` (without a prefix).

    Raises:
        NoSuchDevice: NVML does not list it.
    """
    library = load_nvml()
    handle = query_or_none(lambda: library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    if handle is not None:
        mode = query_or_none(lambda: library.nvmlDeviceGetMigMode(handle))
        return NvmlDevice(library, handle, is_partition=bool(mode and mode[0]), counter=uuid)
    part = query_or_none(lambda: library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))
    whole = None if part is None else query_or_none(lambda: library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))
    if whole is None:
        raise NoSuchDevice(f"NVML lists no device {uuid}")
    return NvmlDevice(library, whole, is_partition=True, counter=uuid)


def nvml_host(root: Path) -> HostGpus:
    """Facts of all devices of the host."""
    library = load_nvml()
    count = query_or_none(library.nvmlDeviceGetCount) or 0
    handles = [query_or_none(partial(library.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    gpus = [NvmlDevice(library, handle, is_partition=False) for handle in handles if handle is not None]
    return HostGpus(
        query_or_none(library.nvmlSystemGetDriverVersion), [_gpu_facts(gpu, root) for gpu in gpus], _link_matrix(gpus)
    )


def _gpu_facts(gpu: NvmlDevice, root: Path) -> dict[str, Any]:
    generation, width = gpu.query("nvmlDeviceGetMaxPcieLinkGeneration"), gpu.query("nvmlDeviceGetMaxPcieLinkWidth")
    address = gpu.query("nvmlDeviceGetPciInfo", convert=lambda pci: _decode_text(pci.busId))
    facts = {
        "model": gpu.query("nvmlDeviceGetName"),
        "uuid": gpu.query("nvmlDeviceGetUUID"),
        "pci": address,
        "numa_node": numa_node(address, root),
        "memory_bytes": gpu.query("nvmlDeviceGetMemoryInfo", convert=lambda memory: memory.total),
        "power_limit_w": gpu.query("nvmlDeviceGetPowerManagementLimit", convert=lambda milliwatts: milliwatts / 1e3),
        "pcie": None if generation is None or width is None else f"gen {generation} x{width}",
        "ecc": gpu.query("nvmlDeviceGetEccMode", convert=_on_or_off),
        "mig": gpu.query("nvmlDeviceGetMigMode", convert=_on_or_off),
    }
    for name, kind in (("max_sm_hz", "NVML_CLOCK_SM"), ("max_memory_hz", "NVML_CLOCK_MEM")):
        clock = getattr(gpu.library, kind, None)
        facts[name] = gpu.query("nvmlDeviceGetMaxClockInfo", clock, convert=lambda mhz: mhz * 10**6)
    return {key: value for key, value in facts.items() if value is not None}


def _on_or_off(modes: Any) -> str:
    return "on" if modes[0] else "off"


def _link_matrix(gpus: list[NvmlDevice]) -> list[str]:
    """A row a GPU: ``X`` is itself, ``NV4`` four links of NVLink, else the level at which the PCI tree joins them."""
    links = [_nvlink_counts(gpu) for gpu in gpus]
    addresses = [gpu.query("nvmlDeviceGetPciInfo", convert=_pci_address) for gpu in gpus]

    def joint(first: int, second: int) -> str:
        if first == second:
            return "X"
        direct = links[first].get(addresses[second] or "", 0)
        count = direct or min(links[first].get(_SWITCH_KEY, 0), links[second].get(_SWITCH_KEY, 0))
        if count:
            return f"NV{count}"
        return _PCI_LEVELS.get(gpus[first].query("nvmlDeviceGetTopologyCommonAncestor", gpus[second].handle), "?")

    return [" ".join(joint(first, second) for second in range(len(gpus))) for first in range(len(gpus))]


_SWITCH_KEY = "switch"


def _nvlink_counts(gpu: NvmlDevice) -> Mapping[str, int]:
    """Active links of NVLink by the PCI address at their other end, those that end at a switch together."""
    counts: Counter[str] = Counter()
    for link in range(getattr(gpu.library, "NVML_NVLINK_MAX_LINKS", 0)):
        state = gpu.query("nvmlDeviceGetNvLinkState", link)
        if state is None:
            break
        if state:
            is_switch = gpu.query("nvmlDeviceGetNvLinkRemoteDeviceType", link) == _NVLINK_SWITCH_TYPE
            address = gpu.query("nvmlDeviceGetNvLinkRemotePciInfo", link, convert=_pci_address)
            counts[_SWITCH_KEY if is_switch else address or "?"] += 1
    return counts


def _pci_address(pci: Any) -> str:
    return _decode_text(pci.busId)[-12:].lower()


def _decode_text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
