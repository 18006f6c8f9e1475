"""Facts about GPUs: a rank's own from torch, all of a host's and how they are joined from NVML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcbench.worker.nvml import Gpu, answer, load

if TYPE_CHECKING:
    import torch

ROOT = Path("/")
_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""What two devices have in common, as nvidia-smi abbreviates it."""
_OF_ONE_PLACE = frozenset({"uuid", "pci", "numa_node"})
"""Facts of one GPU, also where a host has but one."""
_SWITCH = 2
"""``NVML_NVLINK_DEVICE_TYPE_SWITCH``"""


def device_uuid(device: torch.device) -> str:
    """The GPU's own number, the same whatever CUDA_VISIBLE_DEVICES calls it."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def rank_gpu(device: torch.device) -> dict[str, Any]:
    """The rank's own device."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu_model": properties.name,
        "gpu_uuid": device_uuid(device),
        "gpu_memory_bytes": properties.total_memory,
    }


def host_gpus(root: Path = ROOT) -> dict[str, Any]:
    """``driver``; ``gpu``: what the host's GPUs have in common; ``gpus``: what each has of its own; ``gpu_links``."""
    library = load()
    if library is None:
        return {}
    count = answer(library.nvmlDeviceGetCount) or 0
    handles = [answer(partial(library.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    gpus = [Gpu(library, handle, is_partition=False) for handle in handles if handle is not None]
    found: dict[str, Any] = {"driver": answer(library.nvmlSystemGetDriverVersion)}
    facts = [_facts(gpu, root) for gpu in gpus]
    if facts:
        shared = {
            key: value
            for key, value in facts[0].items()
            if key not in _OF_ONE_PLACE and all(one.get(key) == value for one in facts)
        }
        found["gpu"] = shared
        found["gpus"] = [{key: one[key] for key in one if key not in shared} for one in facts]
    if len(gpus) > 1:
        found["gpu_links"] = _matrix(gpus)
    return found


def _facts(gpu: Gpu, root: Path) -> dict[str, Any]:
    library = gpu.library
    memory, pci = gpu.ask("nvmlDeviceGetMemoryInfo"), gpu.ask("nvmlDeviceGetPciInfo")
    limit_mw, clocks = gpu.ask("nvmlDeviceGetPowerManagementLimit"), {}
    for name, kind in (("max_sm_hz", "NVML_CLOCK_SM"), ("max_memory_hz", "NVML_CLOCK_MEM")):
        mhz = gpu.ask("nvmlDeviceGetMaxClockInfo", getattr(library, kind, None))
        clocks[name] = None if mhz is None else mhz * 10**6
    modes = {
        name: None if pair is None else ("on" if pair[0] else "off")
        for name, pair in (("ecc", gpu.ask("nvmlDeviceGetEccMode")), ("mig", gpu.ask("nvmlDeviceGetMigMode")))
    }
    generation, width = gpu.ask("nvmlDeviceGetMaxPcieLinkGeneration"), gpu.ask("nvmlDeviceGetMaxPcieLinkWidth")
    address = _text(pci.busId) if pci is not None else None
    found = {
        "model": gpu.ask("nvmlDeviceGetName"),
        "uuid": gpu.ask("nvmlDeviceGetUUID"),
        "pci": address,
        "numa_node": _numa_node(address, root),
        "memory_bytes": None if memory is None else memory.total,
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
        "pcie": None if generation is None or width is None else f"gen {generation} x{width}",
        **clocks,
        **modes,
    }
    return {key: value for key, value in found.items() if value is not None}


def _numa_node(address: str | None, root: Path) -> int | None:
    """NVML writes PCI domains with eight digits, the kernel with four."""
    if address is None:
        return None
    try:
        node = int((root / "sys/bus/pci/devices" / address[-12:].lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _matrix(gpus: list[Gpu]) -> list[str]:
    """A row a GPU: ``X`` is itself, ``NV4`` four links of NVLink, else the level at which the PCI tree joins them."""
    links = [_links(gpu) for gpu in gpus]
    addresses = [_address(gpu.ask("nvmlDeviceGetPciInfo")) for gpu in gpus]

    def joint(one: int, other: int) -> str:
        if one == other:
            return "X"
        direct = links[one].get(addresses[other] or "", 0)
        count = direct or min(links[one].get(_VIA_SWITCH, 0), links[other].get(_VIA_SWITCH, 0))
        if count:
            return f"NV{count}"
        return _LEVELS.get(gpus[one].ask("nvmlDeviceGetTopologyCommonAncestor", gpus[other].handle), "?")

    return [" ".join(joint(one, other) for other in range(len(gpus))) for one in range(len(gpus))]


_VIA_SWITCH = "switch"


def _links(gpu: Gpu) -> Mapping[str, int]:
    """Active links of NVLink by the PCI address at their other end, those that end at a switch together."""
    found: Counter[str] = Counter()
    for link in range(getattr(gpu.library, "NVML_NVLINK_MAX_LINKS", 0)):
        state = gpu.ask("nvmlDeviceGetNvLinkState", link)
        if state is None:
            break
        if state:
            is_switch = gpu.ask("nvmlDeviceGetNvLinkRemoteDeviceType", link) == _SWITCH
            found[_VIA_SWITCH if is_switch else _address(gpu.ask("nvmlDeviceGetNvLinkRemotePciInfo", link)) or "?"] += 1
    return found


def _address(pci: Any) -> str | None:
    return None if pci is None else _text(pci.busId)[-12:].lower()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
