"""Variables and threads of a rank, settled before torch is imported."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcbench.worker.rank import RankInfo

GUARD = "HPCBENCH_ENV_OF_RUN"
"""Names the run whose variables this process was started anew with, so that it happens once."""


_MATTERS = ("OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "CUDNN_", "CUBLAS_",
            "MALLOC_", "HOROVOD_", "UCX_", "FI_", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE")  # fmt: skip
_DIFFERS_BY_JOB = frozenset({"CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"})


def as_given(env: Mapping[str, str], launcher_environ: Path) -> dict[str, str]:
    """``env`` without the one thread per rank that torchrun sets where nobody has said how many.

    ``launcher_environ`` is ``/proc/<torchrun>/environ``: what torchrun was started with, which its own changes do not
    touch. Where it cannot be read the variable is taken for the user's.
    """
    kept = dict(env)
    if "TORCHELASTIC_RUN_ID" in env and env.get("OMP_NUM_THREADS") == "1":
        with contextlib.suppress(OSError):
            if b"\0OMP_NUM_THREADS=" not in b"\0" + launcher_environ.read_bytes():
                del kept["OMP_NUM_THREADS"]
    return kept


def missing(env: Mapping[str, str], wanted: Mapping[str, str], run_id: str) -> dict[str, str]:
    """What must still be put into ``env``; empty once the process was started anew for ``run_id``."""
    if env.get(GUARD) == run_id:
        return {}
    return {name: value for name, value in wanted.items() if env.get(name) != value}


def apply(wanted: Mapping[str, str], run_id: str) -> None:
    """Set the run's own variables, and start the interpreter anew where one differs.

    The dynamic loader, malloc and OpenMP read theirs only when a process starts.
    """
    changed = missing(os.environ, wanted, run_id)
    if changed:
        sys.stdout.flush()
        sys.stderr.flush()
        env = {**os.environ, **changed, GUARD: run_id}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)  # noqa: S606 - this very program again


def environment_that_matters(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that can change a measurement."""
    return {name: env[name] for name in sorted(env) if name.startswith(_MATTERS)}


def given_environment(env: Mapping[str, str], of_run: Mapping[str, str]) -> dict[str, str]:
    """Variables that matter and that neither the run itself (its ``env``), the launcher nor the scheduler has set."""
    kept = environment_that_matters(env)
    return {name: kept[name] for name in kept if name not in of_run and name not in _DIFFERS_BY_JOB}


def cpu_mask() -> list[int]:
    """The cores that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def thread_count(env: Mapping[str, str], cores: int, cores_per_task: int | None, info: RankInfo) -> int | None:
    """Threads that torch should use within a rank, ``None`` where the environment already says.

    A mask no larger than ``cores_per_task`` was bound to this rank alone; a larger one is shared by the node's ranks,
    and so is any under torchrun, which binds nothing. No more than the profile grants a rank: others may run beside it.
    """
    if env.get("OMP_NUM_THREADS") or env.get("MKL_NUM_THREADS"):
        return None
    alone = cores_per_task is not None and cores <= cores_per_task and info.launcher != "torchrun"
    share = cores if alone else cores // info.local_world_size
    return max(1, share if cores_per_task is None else min(share, cores_per_task))


def core_warnings(cores: int, cores_per_task: int | None, local_world_size: int, host_cores: int) -> list[str]:
    """What about this rank's cores makes its times less than they could be."""
    found = []
    if cores_per_task is not None and cores < cores_per_task:
        found.append(f"a rank may use {cores} of the {cores_per_task} cores per task that the profile promises")
    if local_world_size > host_cores:
        found.append(f"oversubscribed: {local_world_size} ranks share the {host_cores} cores of their host")
    return found


def limits() -> dict[str, Any]:
    """The resource limits that have stopped jobs before: soft values, -1 is none."""
    import resource

    names = {"open_files": "RLIMIT_NOFILE", "locked_memory_bytes": "RLIMIT_MEMLOCK", "stack_bytes": "RLIMIT_STACK",
             "address_space_bytes": "RLIMIT_AS", "processes": "RLIMIT_NPROC"}  # fmt: skip
    return {key: resource.getrlimit(getattr(resource, name))[0] for key, name in names.items()}


def raise_open_files() -> None:
    """Rank 0 holds three sockets a rank: the soft limit of 1024 files would end a world of a few hundred."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
