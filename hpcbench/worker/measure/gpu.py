"""The GPUs of this rank and host: the vendor whose library answers, and facts from it and from torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpcbench.worker.measure.amd_smi import amd_smi_host, open_amd_device
from hpcbench.worker.measure.gpu_device import GpuDevice, query_or_none
from hpcbench.worker.measure.host import ROOT
from hpcbench.worker.measure.nvml import nvml_host, open_nvml_device

_UNIQUE_PER_GPU = frozenset({"uuid", "pci", "numa_node"})
"""Facts of one GPU, also where a host has but one."""


def is_hip() -> bool:
    """Whether torch is built for ROCm: it calls AMD's devices cuda, too."""
    return torch.version.hip is not None


def open_gpu(device: torch.device) -> tuple[GpuDevice | None, str | None]:
    """Return the device as its vendor's library shows it, or the reason why it does not."""
    try:
        uuid = device_uuid(device)
        return (open_amd_device(uuid) if is_hip() else open_nvml_device(uuid)), None
    except Exception as error:  # noqa: BLE001 - a broken driver may raise any exception, and none may end a run
        library = "amdsmi" if is_hip() else "nvml"
        return None, f"no answer from {library}: " + " ".join(f"{type(error).__name__}: {error}".split())


def device_uuid(device: torch.device) -> str:
    """Return the GPU's own number, the same whatever CUDA_VISIBLE_DEVICES calls it."""
    return str(rank_gpu_facts(device)["gpu_uuid"])


def rank_gpu_facts(device: torch.device) -> dict[str, Any]:
    """Return model, uuid and memory of the rank's own device."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu_model": properties.name,
        "gpu_uuid": str(properties.uuid),
        "gpu_memory_bytes": properties.total_memory,
    }


def host_gpu_facts(root: Path = ROOT) -> dict[str, Any]:
    """``driver``; ``gpu``: the facts that all GPUs of the host share; ``gpus``: the others of each; ``gpu_links``."""
    found = query_or_none(lambda: amd_smi_host(root) if is_hip() else nvml_host(root))
    if found is None:
        return {}
    host: dict[str, Any] = {"driver": found.driver}
    if facts := found.gpus:
        shared = {
            key: value
            for key, value in facts[0].items()
            if key not in _UNIQUE_PER_GPU and all(gpu_facts.get(key) == value for gpu_facts in facts)
        }
        host["gpu"] = shared
        host["gpus"] = [{key: gpu_facts[key] for key in gpu_facts if key not in shared} for gpu_facts in facts]
    if len(found.links) > 1:
        host["gpu_links"] = found.links
    return host
