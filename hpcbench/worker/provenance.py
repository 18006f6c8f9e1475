"""On what a number was measured: versions, machines, job and variables."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import hpcbench
from hpcbench.config.spec import RunSpec
from hpcbench.config.task import TaskHeader
from hpcbench.parallel.own_model import is_own, module_file
from hpcbench.worker.environ import cpu_mask, environment_that_matters, limits
from hpcbench.worker.gpu import host_gpus, rank_gpu
from hpcbench.worker.host import host_facts, mask_by_numa_node
from hpcbench.worker.rank import RankInfo
from hpcbench.worker.software import git_commit, packages, torch_build

_OF_DIGEST = ("hpcbench", "python", "torch", "torch_git", "torch_build", "cuda", "cudnn", "nccl", "driver", "packages",
              "machine", "device", "cpu_model", "cores", "cpu", "gpu_model", "gpu", "infiniband", "container",
              "container_kind", "model_file_sha256")  # fmt: skip
_JOB_FACTS = {
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
_IMAGES = ("SLURM_CONTAINER", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "SINGULARITY_NAME", "ENROOT_IMAGE",
           "PYXIS_IMAGE", "UDOCKER_CONTAINER", "CONTAINER_IMAGE")  # fmt: skip


def rank_provenance(device: torch.device) -> dict[str, Any]:
    """What may differ between the ranks of one host."""
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_mask": cpu_mask(),
        "numa_nodes": mask_by_numa_node(cpu_mask()),
    }
    return found | (rank_gpu(device) if device.type == "cuda" else {})


def collect(header: TaskHeader, spec: RunSpec, info: RankInfo, device: torch.device) -> dict[str, Any]:
    """Everything that this rank can say about where it runs; parts that cannot be found are absent.

    A host's first rank speaks for all that run there: the others say only what may differ between them.
    """
    found = rank_provenance(device)
    if info.local_rank == 0:
        found |= _of_host(header, spec, info, device)
    return {key: value for key, value in found.items() if value is not None and value not in ({}, [])}


def _of_host(header: TaskHeader, spec: RunSpec, info: RankInfo, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "hpcbench": hpcbench.__version__,
        "hpcbench_commit": git_commit(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "torch_build": torch_build(),
        "cuda": torch.version.cuda,
        "packages": packages(),
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
        "limits": limits(),
        "scrubbed": header.scrubbed,
        "job": {key: os.environ[name] for key, name in _JOB_FACTS.items() if name in os.environ},
        "env": environment_that_matters(os.environ),
        "container": next((os.environ[name] for name in _IMAGES if os.environ.get(name)), None),
        **host_facts(cpu_mask()),
    }
    if header.model_folder and is_own(spec.model):
        file = module_file(spec.model, Path(header.model_folder))
        found["model_file_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest() if file else None
    if spec.strategy == "horovod":
        from hpcbench.worker.horovod_library import facts

        found["horovod"] = facts(str(spec.options.get("controller", "gloo")))
    return found | (_of_cuda() if device.type == "cuda" else {})


def _of_cuda() -> dict[str, Any]:
    found = {**host_gpus(), "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
    with contextlib.suppress(Exception):  # a torch built without NCCL has no version to tell
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(str(part) for part in version)
    return found


def environment_digest(provenance: Mapping[str, Any], header: TaskHeader, given: Mapping[str, str]) -> str | None:
    """12 hex digits of what would change a measurement of the same run: software, hardware, profile and variables.

    ``given`` is ``given_environment`` at the start. Hosts, jobs, paths, the names and places of devices and what
    follows from the run's own shape (threads of a rank) are left out, so that the runs of one sweep on one kind of
    node share a digest. ``None`` from a rank that does not speak for its host.
    """
    if "hpcbench" not in provenance:
        return None
    kept = {key: provenance[key] for key in _OF_DIGEST if key in provenance}
    kept["hugepages"] = provenance.get("hugepages", {}).get("transparent")
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
