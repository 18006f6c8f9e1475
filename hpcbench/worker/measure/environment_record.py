"""Provenance of a rank: software versions, hardware, job and environment, and the digest of all that can change a
measurement.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import hpcbench
from hpcbench.config.run_spec import RunSpec, TaskFileHeader
from hpcbench.strategies.catalog import load_member
from hpcbench.worker.distributed.rank_environment import (
    RankInfo,
    cpu_mask,
    performance_environment,
    resource_limits,
    user_performance_environment,
)
from hpcbench.worker.measure.gpu import host_gpu_facts, is_hip, open_gpu, rank_gpu_facts
from hpcbench.worker.measure.host import cores_per_numa_node, host_facts, read_text
from hpcbench.workloads.models import custom_model_file, is_custom_model

_TRACKED_PACKAGES = ("numpy", "torchvision", "scikit-learn", "horovod", "fairscale", "pillow", "h5py", "triton",
             "pytorch-triton", "mkl", "intel-openmp", "tbb", "intel-extension-for-pytorch")  # fmt: skip
_NVIDIA_DIST_INFO = re.compile(r"(nvidia_[a-z0-9_]+)-([^-]+)\.dist-info")
"""CUDA's libraries come as one distribution each, by many names."""
_MONITORING_PACKAGE = "nvidia-ml-py"


def package_versions() -> dict[str, str]:
    """Installed distributions that can change a measurement."""
    versions = {}
    for name in _TRACKED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    for folder in reversed(sys.path):
        with contextlib.suppress(OSError):
            for entry in Path(folder or ".").glob("nvidia_*.dist-info"):
                if match := _NVIDIA_DIST_INFO.fullmatch(entry.name):
                    versions[match[1].replace("_", "-")] = match[2]
    versions.pop(_MONITORING_PACKAGE, None)
    return dict(sorted(versions.items()))


_BUILD_PATTERNS = {
    "blas": r"BLAS_INFO=(\w+)",
    "mkl": r"Math Kernel Library Version ([0-9.]+)",
    "onednn": r"MKL-DNN v(\S+)",
    "openmp": r"OpenMP (\d+)",
    "cpu_capability": r"CPU capability usage: (\S+)",
    "parallel_backend": r"parallel backend: (.+)",
}
_ENABLED_LIBRARIES = re.compile(r"USE_(CUDA|ROCM|MPI|NCCL|GLOO|MKLDNN|OPENMP|XPU)=(?:ON|1)\b")


def torch_build_facts() -> dict[str, Any]:
    """Return how torch was built and what it uses of this processor; values that a build does not report are absent."""
    shown = torch.__config__.show()
    text = f"{shown}\n{torch.__config__.parallel_info()}"
    facts = {key: match[1].strip() for key, pattern in _BUILD_PATTERNS.items() if (match := re.search(pattern, text))}
    enabled = " ".join(_ENABLED_LIBRARIES.findall(shown))
    return {**facts, "with": enabled} if enabled else facts


def torch_facts() -> dict[str, Any]:
    """Return versions, devices and back ends of torch; ``no_counters``: why a device's library does not answer."""
    there = dist.is_available()
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "devices": [torch.cuda.get_device_name(number) for number in range(devices)],
        "no_counters": open_gpu(torch.device("cuda", 0))[1] if devices else None,
        "gloo": there and dist.is_gloo_available(),
        "nccl": there and dist.is_nccl_available(),
        "threads": torch.get_num_threads(),
    }


def git_commit() -> str | None:
    """The commit of this package's checkout, with ``-dirty`` where files were changed; ``None`` outside of one."""
    root = Path(hpcbench.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip() or None
    return None


_DIGEST_KEYS = (
    "hpcbench", "python", "torch", "torch_git", "torch_build", "cuda", "cudnn", "nccl", "hip", "miopen", "rccl",
    "driver", "packages", "machine", "device", "cpu_model", "cores", "cpu", "gpu_model", "gpu", "infiniband",
    "container", "container_kind", "model_file_sha256", "program_files_sha256",
)  # fmt: skip
_JOB_VARIABLES = {
    "job_id": "SLURM_JOB_ID", "array_job_id": "SLURM_ARRAY_JOB_ID", "array_task_id": "SLURM_ARRAY_TASK_ID",
    "step_id": "SLURM_STEP_ID", "nodelist": "SLURM_JOB_NODELIST", "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT", "qos": "SLURM_JOB_QOS", "reservation": "SLURM_JOB_RESERVATION",
    "cluster": "SLURM_CLUSTER_NAME", "restart_count": "SLURM_RESTART_COUNT", "submit_host": "SLURM_SUBMIT_HOST",
    "nodes": "SLURM_JOB_NUM_NODES", "tasks": "SLURM_NTASKS", "tasks_per_node": "SLURM_TASKS_PER_NODE",
    "cpus_per_task": "SLURM_CPUS_PER_TASK", "threads_per_core": "SLURM_THREADS_PER_CORE", "hint": "SLURM_HINT",
    "memory_per_node_mib": "SLURM_MEM_PER_NODE", "memory_per_cpu_mib": "SLURM_MEM_PER_CPU",
    "constraint": "SLURM_CONSTRAINT", "begin_unix_s": "SLURM_JOB_START_TIME", "end_unix_s": "SLURM_JOB_END_TIME",
    "step_tasks": "SLURM_STEP_NUM_TASKS", "step_tasks_per_node": "SLURM_STEP_TASKS_PER_NODE",
    "step_nodelist": "SLURM_STEP_NODELIST", "distribution": "SLURM_DISTRIBUTION", "cpu_bind": "SLURM_CPU_BIND",
    "gpus": "SLURM_STEP_GPUS",
}  # fmt: skip
_IMAGE_VARIABLES = (
    "SLURM_CONTAINER", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "SINGULARITY_NAME", "ENROOT_IMAGE",
    "PYXIS_IMAGE", "UDOCKER_CONTAINER", "CONTAINER_IMAGE",
)  # fmt: skip


def record_provenance(
    header: TaskFileHeader, spec: RunSpec, info: RankInfo, device: torch.device, user_env: Mapping[str, str],
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Return ``collect_provenance`` and ``facts`` with the digest of the environment, where this rank makes one."""
    provenance = {**collect_provenance(header, spec, info, device), **facts}
    digest = environment_digest(provenance, header, user_performance_environment(user_env, spec.env))
    return provenance if digest is None else {**provenance, "environment_digest": digest}


def collect_provenance(header: TaskFileHeader, spec: RunSpec, info: RankInfo, device: torch.device) -> dict[str, Any]:
    """Return everything that this rank can read about its environment; unknown parts are absent.

    A host's first rank records for all ranks there: the others record only what may differ between them.
    """
    facts: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_mask": cpu_mask(),
        "numa_nodes": cores_per_numa_node(cpu_mask()),
    }
    if device.type == "cuda":
        facts |= rank_gpu_facts(device)
    if info.local_rank == 0:
        facts |= _host_provenance(header, spec, info, device)
    return {key: value for key, value in facts.items() if value is not None and value not in ({}, [])}


def _host_provenance(header: TaskFileHeader, spec: RunSpec, info: RankInfo, device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "hpcbench": hpcbench.__version__,
        "hpcbench_commit": git_commit(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "torch_build": torch_build_facts(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "packages": package_versions(),
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "device": device.type,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "launcher": info.launcher,
        "seed": spec.seed + spec.repeat,
        "submission": header.submission,
        "modules": [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name],
        "limits": resource_limits(),
        "scrubbed": header.scrubbed,
        "job": {key: os.environ[name] for key, name in _JOB_VARIABLES.items() if name in os.environ},
        "env": performance_environment(os.environ),
        "container": next((os.environ[name] for name in _IMAGE_VARIABLES if os.environ.get(name)), None),
        **host_facts(cpu_mask()),
    }
    if header.model_folder and is_custom_model(spec.model):
        file = custom_model_file(spec.model, Path(header.model_folder))
        facts["model_file_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest() if file else None
    training = load_member(spec.strategy, "train", "TRAININGS")
    if training is not None:
        facts[spec.strategy] = training.library_facts(spec)
    if device.type == "cuda":
        facts |= {**host_gpu_facts(), **gpu_library_versions()}
    return facts


def gpu_library_versions() -> dict[str, Any]:
    """Versions of the vendor's libraries: torch for ROCm gives those of MIOpen and RCCL by the names of NVIDIA's."""
    names = ("miopen", "rccl") if is_hip() else ("cudnn", "nccl")
    facts = {names[0]: torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
    with contextlib.suppress(Exception):  # a torch built without NCCL has no version
        facts[names[1]] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return facts


def environment_digest(
    provenance: Mapping[str, Any], header: TaskFileHeader, user_env: Mapping[str, str]
) -> str | None:
    """12 hex digits of what would change a measurement of the same run: software, hardware, profile and variables.

    ``user_env`` is ``user_performance_environment`` at the start. Hosts, jobs, paths, the names and places of devices
    and what
    follows from the run's own shape (threads of a rank) are left out, so that the runs of one sweep on one kind of
    node share a digest. ``None`` from a rank that does not speak for its host.
    """
    if "hpcbench" not in provenance:
        return None
    digested = {key: provenance[key] for key in _DIGEST_KEYS if key in provenance}
    digested["hugepages"] = provenance.get("hugepages", {}).get("transparent")
    digested["cores_per_task"] = header.cores_per_task
    digested["interface"] = header.interface
    digested["env"] = dict(user_env)
    return hashlib.sha256(msgspec.json.encode(digested, order="deterministic")).hexdigest()[:12]


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    for line in (read_text(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith(("model name", "Model", "cpu\t")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
