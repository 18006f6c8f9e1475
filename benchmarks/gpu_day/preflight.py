"""What the machine of the day has, found out within seconds and without importing torch.

A missing part is reported and takes its own runs with it; only a day without a device ends here.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.gpu_day.install_kit import kit_problems
from benchmarks.gpu_day.parts import Device, Size

PACKAGES = (
    "torch", "torchvision", "triton", "timm", "fairscale", "numpy", "msgspec", "pydantic", "submitit", "psutil",
    "nvidia-ml-py", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-cupti",
)  # fmt: skip
REQUIRED_BYTES = 70 * 2**30
"""Memory of the device that the largest configurations need."""


class Gpu(NamedTuple):
    """The device, by NVML."""

    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    driver_cuda: tuple[int, int]
    """Newest version of CUDA that the driver runs."""


class Machine(msgspec.Struct, kw_only=True):
    """The facts of ``machine.json``."""

    size: Size
    """Of the day's models."""
    python: str
    cores: int
    packages: dict[str, str]
    torch_cuda: str | None
    """CUDA of the torch build; ``None`` for a build without."""
    gpu: Gpu | None = None
    compiler: str | None = None
    has_python_headers: bool
    cupti: str
    """``found``, or why it will not count kernels."""
    problems: list[str]
    """What is missing, each with its consequence."""

    def lacks(self) -> set[str]:
        """Return the parts of ``Part.needs`` that the machine lacks."""
        return set() if self.compiler and self.has_python_headers else {"compiler"}


def inspect_machine(device: Device, size: Size, wheels: Path | None) -> Machine:
    """Look at the machine; ``device`` and ``size`` are the day's, ``wheels`` is the kit's folder."""
    packages = {name: version for name in PACKAGES if (version := _version(name))}
    torch_cuda = read_torch_cuda() if "torch" in packages else None
    gpu, gpu_problem = find_gpu() if device == "cuda" else (None, None)
    machine = Machine(
        size=size, python=platform.python_version(), cores=len(os.sched_getaffinity(0)), packages=packages,
        torch_cuda=torch_cuda, gpu=gpu, compiler=shutil.which("gcc") or shutil.which("cc"),
        has_python_headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        cupti=find_cupti() if device == "cuda" else "not needed", problems=[],
    )  # fmt: skip
    machine.problems = [*_problems(machine, device, gpu_problem), *kit_problems(wheels)]
    return machine


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_torch_cuda() -> str | None:
    """Return the version of CUDA that the installed torch was built with, from its file: importing takes longer."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = re.search(r"^cuda[^=\n]*=\s*'([\d.]+)'", (Path(folder) / "version.py").read_text(), re.MULTILINE)
        return found[1] if found else None
    return None


def find_gpu() -> tuple[Gpu | None, str | None]:
    """Return the first GPU that a process would see, or the reason why there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return None, f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU"
    try:
        import pynvml as nvml
    except ImportError:
        return _gpu_by_nvidia_smi()
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        memory, newest = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlSystemGetCudaDriverVersion()
        name = nvml.nvmlDeviceGetName(handle)
        return Gpu(
            name.decode() if isinstance(name, bytes) else name, int(memory.total), int(memory.free),
            str(nvml.nvmlSystemGetDriverVersion()), (newest // 1000, newest % 1000 // 10),
        ), None  # fmt: skip
    except nvml.NVMLError as error:
        found, problem = _gpu_by_nvidia_smi()
        return found, problem and f"NVML finds no GPU: {error}; {problem}"


def _gpu_by_nvidia_smi() -> tuple[Gpu | None, str | None]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, timeout=4, check=True).stdout.splitlines()[0]
        name, total, free, driver = (part.strip() for part in line.split(","))
        return Gpu(name, int(total) * 2**20, int(free) * 2**20, driver, (0, 0)), None
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        return None, f"nvidia-smi finds no GPU: {error}"


def find_cupti() -> str:
    """Return ``found`` if the profiler can count kernels here, else the reason why not."""
    folders = [Path(folder) for folder in sys.path if (Path(folder) / "nvidia").is_dir()]
    libraries = [str(path) for folder in folders for path in folder.glob("nvidia/*/lib/libcupti.so.*")]
    for name in [*libraries, "libcupti.so"]:
        try:
            ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        return "libcupti does not load: kernels are not counted"
    params = Path("/proc/driver/nvidia/params")
    try:
        is_restricted = "RmProfilingAdminOnly: 1" in params.read_text()
    except OSError:
        is_restricted = False
    if is_restricted and os.geteuid() != 0:
        return "the driver lets root alone profile (RmProfilingAdminOnly: 1): kernels are not counted"
    return "found"


def _problems(machine: Machine, device: Device, gpu_problem: str | None) -> Iterator[str]:
    if "torch" not in machine.packages:
        yield f"no torch in {sys.executable}: nothing can run; python -m pip install torch"
    if device != "cuda":
        return
    gpu = machine.gpu
    if gpu is None:
        yield f"no GPU: {gpu_problem}; HPCBENCH_GPU_DAY=cpu rehearses the day"
    elif "torch" in machine.packages:
        yield from _gpu_problems(gpu, machine.torch_cuda, machine.size)
    if machine.cupti != "found":
        yield machine.cupti
    if lacking := machine.lacks():
        missing = "C compiler" if machine.compiler is None else "Python.h"
        yield f"no {missing}: runs that need a {', '.join(sorted(lacking))} are left out"


def _gpu_problems(gpu: Gpu, torch_cuda: str | None, size: Size) -> Iterator[str]:
    if torch_cuda is None:
        yield "this torch was built without CUDA: nothing can run; install the build for CUDA"
    else:
        major, minor = (int(part) for part in torch_cuda.split(".")[:2])
        # Within a major version newer toolkits run on older drivers.
        if gpu.driver_cuda != (0, 0) and gpu.driver_cuda[0] < major:
            yield (
                f"the driver {gpu.driver} runs CUDA {gpu.driver_cuda[0]}.{gpu.driver_cuda[1]}, torch was built with "
                f"{major}.{minor}: nothing can run; a newer driver, or a torch for CUDA {gpu.driver_cuda[0]}"
            )
    if size == "full" and gpu.memory_bytes < REQUIRED_BYTES:
        yield (
            f"{gpu.name} has {gpu.memory_bytes / 2**30:.0f} GiB, the largest configurations need "
            f"{REQUIRED_BYTES / 2**30:.0f}: they will end as oom"
        )
    elif gpu.free_bytes < 0.9 * gpu.memory_bytes:
        yield (
            f"{gpu.free_bytes / 2**30:.0f} of {gpu.memory_bytes / 2**30:.0f} GiB are free: other processes use the "
            "device, so that times are disturbed and large configurations end as oom"
        )


def is_hopeless(machine: Machine, device: Device) -> bool:
    """Return whether no run can start here."""
    return any("nothing can run" in text or text.startswith("no GPU") for text in machine.problems) or (
        device == "cuda" and machine.gpu is None
    )


def machine_lines(machine: Machine) -> list[str]:
    """Return the facts for the log."""
    gpu = machine.gpu
    device = f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, driver {gpu.driver}" if gpu else "no GPU"
    versions: Mapping[str, Any] = machine.packages
    return [
        f"{device}; Python {machine.python}, {machine.cores} cores, torch {versions.get('torch', 'absent')} "
        f"(CUDA {machine.torch_cuda}), CUPTI {machine.cupti}",
        *(f"PROBLEM: {text}" for text in machine.problems),
    ]
