"""GPU state, clocks, topology and facts from NVML and torch. A query without an answer returns ``None``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hpcbench.worker.measure.host import ROOT, read_int

if TYPE_CHECKING:
    import torch

_ROOT_PID_NAMESPACE_INODE = 0xEFFFFFFC
"""The number that Linux gives the first namespace of processes."""
_THROTTLE_REASONS = {
    "SwPowerCap": "power cap", "HwSlowdown": "hardware slowdown", "SwThermalSlowdown": "heat (driver)",
    "HwThermalSlowdown": "heat (hardware)", "HwPowerBrakeSlowdown": "power brake",
}  # fmt: skip
_IDLE_REASON_BIT = 0x1
_VIOLATION_POLICIES = {"power": "NVML_PERF_POLICY_POWER", "thermal": "NVML_PERF_POLICY_THERMAL"}


class SmClock(NamedTuple):
    """An SM clock and the most that it can be."""

    hz: float
    max_hz: float


class NvmlDevice:
    """One device, asked through ``library`` (the module ``pynvml``)."""

    def __init__(self, library: Any, handle: Any, is_partition: bool) -> None:
        self.library = library
        self.handle = handle
        self.is_partition = is_partition
        """A MIG instance: counters of the whole device do not describe it."""

    def query(self, name: str, *arguments: Any, convert: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return the value of ``pynvml.<name>`` for this device, converted; ``None`` where there is none."""
        return query_or_none(lambda: convert(getattr(self.library, name)(self.handle, *arguments)))

    def energy_j(self) -> float | None:
        """Return the energy (J) since the driver was loaded; ``None`` for a MIG instance or without a counter."""
        if self.is_partition:
            return None
        return cast(float | None, self.query("nvmlDeviceGetTotalEnergyConsumption", convert=lambda mj: mj / 1e3))

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
        return len(pids - own_pids) if _in_root_pid_namespace() else max(0, len(pids) - 1)

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


def load_nvml() -> Any | None:
    """The module ``pynvml``, ready; ``None`` without it or without a driver."""

    def ready() -> Any:
        import pynvml

        pynvml.nvmlInit()
        return pynvml

    return query_or_none(ready)


def open_nvml_device(uuid: str) -> NvmlDevice | None:
    """The device that torch gives this ``uuid`` (without a prefix), ``None`` where NVML does not list it."""
    library = load_nvml()
    if library is None:
        return None
    handle = query_or_none(lambda: library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    if handle is not None:
        mode = query_or_none(lambda: library.nvmlDeviceGetMigMode(handle))
        return NvmlDevice(library, handle, is_partition=bool(mode and mode[0]))
    part = query_or_none(lambda: library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))
    whole = None if part is None else query_or_none(lambda: library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))
    return None if whole is None else NvmlDevice(library, whole, is_partition=True)


def query_or_none(question: Callable[[], Any]) -> Any:
    """Return the answer of ``question``, or ``None`` if it raises: a broken driver may raise any exception."""
    try:
        return question()
    except Exception:  # noqa: BLE001
        return None


def _in_root_pid_namespace() -> bool:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _ROOT_PID_NAMESPACE_INODE
    except OSError:
        return False


_PCI_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""Abbreviations in nvidia-smi of the nearest common ancestor of two devices, by NVML's number."""
_UNIQUE_PER_GPU = frozenset({"uuid", "pci", "numa_node"})
"""Facts of one GPU, also where a host has but one."""
_NVLINK_SWITCH_TYPE = 2
"""``NVML_NVLINK_DEVICE_TYPE_SWITCH``"""


def device_uuid(device: torch.device) -> str:
    """Return the GPU's own number, the same whatever CUDA_VISIBLE_DEVICES calls it."""
    return str(rank_gpu_facts(device)["gpu_uuid"])


def rank_gpu_facts(device: torch.device) -> dict[str, Any]:
    """Return model, uuid and memory of the rank's own device."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu_model": properties.name,
        "gpu_uuid": str(properties.uuid),
        "gpu_memory_bytes": properties.total_memory,
    }


def host_gpu_facts(root: Path = ROOT) -> dict[str, Any]:
    """``driver``; ``gpu``: what the host's GPUs have in common; ``gpus``: what each has of its own; ``gpu_links``."""
    library = load_nvml()
    if library is None:
        return {}
    count = query_or_none(library.nvmlDeviceGetCount) or 0
    handles = [query_or_none(partial(library.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    gpus = [NvmlDevice(library, handle, is_partition=False) for handle in handles if handle is not None]
    host: dict[str, Any] = {"driver": query_or_none(library.nvmlSystemGetDriverVersion)}
    if facts := [_gpu_facts(gpu, root) for gpu in gpus]:
        shared = {
            key: value
            for key, value in facts[0].items()
            if key not in _UNIQUE_PER_GPU and all(gpu_facts.get(key) == value for gpu_facts in facts)
        }
        host["gpu"] = shared
        host["gpus"] = [{key: gpu_facts[key] for key in gpu_facts if key not in shared} for gpu_facts in facts]
    if len(gpus) > 1:
        host["gpu_links"] = _link_matrix(gpus)
    return host


def _gpu_facts(gpu: NvmlDevice, root: Path) -> dict[str, Any]:
    generation, width = gpu.query("nvmlDeviceGetMaxPcieLinkGeneration"), gpu.query("nvmlDeviceGetMaxPcieLinkWidth")
    address = gpu.query("nvmlDeviceGetPciInfo", convert=lambda pci: _decode_text(pci.busId))
    facts = {
        "model": gpu.query("nvmlDeviceGetName"),
        "uuid": gpu.query("nvmlDeviceGetUUID"),
        "pci": address,
        "numa_node": _gpu_numa_node(address, root),
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


def _gpu_numa_node(address: str | None, root: Path) -> int | None:
    """NVML writes PCI domains with eight digits, the kernel with four."""
    node = read_int(root / "sys/bus/pci/devices" / address[-12:].lower() / "numa_node") if address is not None else None
    return node if node is not None and node >= 0 else None


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
