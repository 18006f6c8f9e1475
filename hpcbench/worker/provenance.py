"""On what a number was measured: versions, machines, job and variables."""

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
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import hpcbench
from hpcbench.config.spec import RunSpec
from hpcbench.config.task import TaskHeader
from hpcbench.worker.environ import cpu_mask, environment_that_matters, limits
from hpcbench.worker.rank import RankInfo

_OF_DIGEST = ("hpcbench", "python", "torch", "torch_git", "cuda", "cudnn", "nccl", "blas", "packages", "machine",
              "device", "cpu_model", "cores", "gpu_model", "container")  # fmt: skip
_JOB_FACTS = {
    "job_id": "SLURM_JOB_ID", "array_job_id": "SLURM_ARRAY_JOB_ID", "array_task_id": "SLURM_ARRAY_TASK_ID",
    "step_id": "SLURM_STEP_ID", "nodelist": "SLURM_JOB_NODELIST", "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT", "qos": "SLURM_JOB_QOS", "cluster": "SLURM_CLUSTER_NAME",
    "restart_count": "SLURM_RESTART_COUNT", "cpus_per_task": "SLURM_CPUS_PER_TASK",
    "submit_host": "SLURM_SUBMIT_HOST",
}  # fmt: skip
_IMAGES = ("SLURM_CONTAINER", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "SINGULARITY_NAME", "ENROOT_IMAGE",
           "PYXIS_IMAGE", "UDOCKER_CONTAINER", "CONTAINER_IMAGE")  # fmt: skip
_PACKAGES = ("numpy", "torchvision", "scikit-learn", "horovod", "fairscale")


def rank_provenance(device: torch.device) -> dict[str, Any]:
    """What may differ between the ranks of one run."""
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "cpu_model": cpu_model()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu_model": properties.name,
            "gpu_uuid": device_uuid(device),
            "gpu_memory_bytes": properties.total_memory,
        }
    return found


def device_uuid(device: torch.device) -> str:
    """The GPU's own number, the same whatever CUDA_VISIBLE_DEVICES calls it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def collect(header: TaskHeader, spec: RunSpec, info: RankInfo, device: torch.device) -> dict[str, Any]:
    """Everything that one rank can say about where it runs; parts that cannot be found are absent."""
    found: dict[str, Any] = {
        "hpcbench": hpcbench.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "blas": _blas(),
        "packages": _packages(),
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cpu_mask": cpu_mask(),
        "interop_threads": torch.get_num_interop_threads(),
        "device": device.type,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "launcher": info.launcher,
        "seed": spec.seed + spec.repeat,
        "submission": header.submission,
        "limits": limits(),
        "scrubbed": header.scrubbed,
        "job": {key: os.environ[name] for key, name in _JOB_FACTS.items() if name in os.environ},
        "env": environment_that_matters(os.environ),
        **rank_provenance(device),
    }
    commit = git_commit()
    if commit:
        found["hpcbench_commit"] = commit
    if spec.strategy == "horovod":
        from hpcbench.worker.horovod_library import facts

        found["horovod"] = facts(str(spec.options.get("controller", "gloo")))
    image = next((os.environ[name] for name in _IMAGES if os.environ.get(name)), None)
    if image:
        found["container"] = image
    if device.type == "cuda":
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        with contextlib.suppress(Exception):  # a torch built without NCCL has no version to tell
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            found["nccl"] = ".".join(str(part) for part in version)
    return {key: value for key, value in found.items() if value is not None}


def environment_digest(provenance: Mapping[str, Any], header: TaskHeader, given: Mapping[str, str]) -> str:
    """12 hex digits of what would change a measurement of the same run: software, hardware, profile and variables.

    ``given`` is ``given_environment`` at the start. Hosts, jobs, paths and what follows from the run's own shape
    (threads of a rank) are left out, so that the runs of one sweep on one kind of node share a digest.
    """
    kept = {key: provenance[key] for key in _OF_DIGEST if key in provenance}
    kept["cores_per_task"] = header.cores_per_task
    kept["interface"] = header.interface
    kept["env"] = dict(given)
    return hashlib.sha256(msgspec.json.encode(kept, order="deterministic")).hexdigest()[:12]


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model", "cpu\t")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of this package's checkout, with ``-dirty`` where files were changed; ``None`` outside of one."""
    root = Path(hpcbench.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip() or None
    return None


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _blas() -> str | None:
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return found[1] if found else None
