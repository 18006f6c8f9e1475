"""The rank of this process, read from the launcher's variables, and the environment that is set before torch is
imported.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError


@dataclass(frozen=True)
class RankInfo:
    """This process among the run's, in torch's words; ``launch`` is the same for all ranks of one launch."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    launcher: str
    """``torchrun``, ``srun``, ``mpirun``, ``pmi``, ``fork``, ``pool`` or ``lone``."""
    launch: str


def detect_rank(env: Mapping[str, str], pid: int, parent: int) -> RankInfo:
    """The rank that ``env`` describes; a process that no launcher started is the only one of its world.

    torchrun is asked first: its ranks also inherit what srun set for torchrun itself. ``pid`` and ``parent`` are
    this process's and its parent's numbers, for a launch id where the launcher gives none.
    Raises ``WorkerError`` naming the variable that is missing or not a number.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return _torchrun_rank(env, parent)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _openmpi_rank(env)
    if _in_slurm_step(env):
        return _slurm_rank(env)
    if "PMI_RANK" in env and "PMI_SIZE" in env:
        return _pmi_rank(env, parent)
    return RankInfo(0, 0, 1, 1, 0, "lone", f"lone.{socket.gethostname()}.{pid}")


def check_world_size(info: RankInfo, spec: RunSpec) -> None:
    """Refuse a world of another size than the run's: ``WorkerError`` names both and what was found."""
    if info.world_size != spec.ranks:
        raise WorkerError(
            f"the run wants {spec.ranks} ranks (nodes {spec.nodes} x tasks_per_node {spec.tasks_per_node}), "
            f"but the launcher ({info.launcher}) started {info.world_size}",
            hint="start it through srun, torchrun or mpirun with that many tasks",
        )


def _read_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        problem = f"is {text!r}" if name in env else "is not set"
        raise WorkerError(f"{name} {problem}; the launcher should have set it to a number") from None


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    # The batch script's own environment has SLURM_PROCID=0 too, but no numbered step: a python there is alone.
    return "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "").isdecimal()


def _torchrun_rank(env: Mapping[str, str], parent: int) -> RankInfo:
    rank, local_rank = _read_number(env, "RANK"), _read_number(env, "LOCAL_RANK")
    world_size, local_world_size = _read_number(env, "WORLD_SIZE"), _read_number(env, "LOCAL_WORLD_SIZE")
    node_rank = _read_number(env, "GROUP_RANK", 0)
    launch = [env["TORCHELASTIC_RUN_ID"], env.get("MASTER_PORT", ""), env.get("TORCHELASTIC_RESTART_COUNT", "0")]
    agents = _read_number(env, "GROUP_WORLD_SIZE", 1)
    if agents == 1 and _in_slurm_step(env) and _read_number(env, "SLURM_STEP_NUM_NODES", 1) > 1:
        # One torchrun a node, each believing that it is alone (--standalone): srun knows how many there are.
        agents, node_rank = _read_number(env, "SLURM_STEP_NUM_NODES"), _read_number(env, "SLURM_NODEID")
        rank, world_size = node_rank * local_world_size + local_rank, agents * local_world_size
        launch = [_slurm_launch_id(env)]
    elif agents == 1:
        # The id is "none" by default: the agent's process number tells one launch from the next.
        launch.append(f"{socket.gethostname()}.{parent}")
    return RankInfo(rank, local_rank, world_size, local_world_size, node_rank, "torchrun", ".".join(launch))


def _slurm_launch_id(env: Mapping[str, str]) -> str:
    restart = env.get("SLURM_RESTART_COUNT", "0")
    return f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}.r{restart}"


def _slurm_rank(env: Mapping[str, str]) -> RankInfo:
    rank, local_rank = _read_number(env, "SLURM_PROCID"), _read_number(env, "SLURM_LOCALID", 0)
    world_size = _read_number(env, "SLURM_STEP_NUM_TASKS", _read_number(env, "SLURM_NTASKS", 1))
    node_rank = _read_number(env, "SLURM_NODEID", 0)
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    local_world_size = _tasks_on_node(tasks, node_rank) or world_size
    return RankInfo(rank, local_rank, world_size, local_world_size, node_rank, "srun", _slurm_launch_id(env))


def _tasks_on_node(text: str, node_rank: int) -> int | None:
    """SLURM's ``2(x3),1``: three nodes with 2 tasks, then one with 1."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        tasks, _, repeat = part.partition("(x")
        times = repeat.rstrip(")") or "1"
        if not (tasks.isdecimal() and times.isdecimal()):
            return None
        counts += [int(tasks)] * int(times)
    return counts[node_rank] if node_rank < len(counts) else None


def _openmpi_rank(env: Mapping[str, str]) -> RankInfo:
    rank, local_rank = _read_number(env, "OMPI_COMM_WORLD_RANK"), _read_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
    size, local_size = _read_number(env, "OMPI_COMM_WORLD_SIZE"), _read_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    launch = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("SLURM_JOB_ID", "mpirun")
    # Open MPI names no node; with the mapping "ppr:N:node" ranks fill one node after the other.
    return RankInfo(rank, local_rank, size, local_size, rank // local_size, "mpirun", launch)


def _pmi_rank(env: Mapping[str, str], parent: int) -> RankInfo:
    rank, world_size = _read_number(env, "PMI_RANK"), _read_number(env, "PMI_SIZE")
    local_rank = _read_number(env, "MPI_LOCALRANKID", _read_number(env, "PALS_LOCAL_RANKID", rank))
    local_world_size = _read_number(env, "MPI_LOCALNRANKS", _read_number(env, "PALS_LOCAL_SIZE", world_size))
    launch = env.get("PMI_JOBID") or env.get("PALS_APID") or env.get("SLURM_JOB_ID") or f"pmi.{parent}"
    return RankInfo(rank, local_rank, world_size, local_world_size, rank // local_world_size, "pmi", launch)


RESTARTED_FOR_RUN = "HPCBENCH_ENV_OF_RUN"
"""Names the run whose variables this process was started anew with, so that it happens once."""


_PERFORMANCE_PREFIXES = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "CUDNN_", "CUBLAS_", "MALLOC_",
    "HOROVOD_", "UCX_", "FI_", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "HIP_", "HSA_", "ROCR_", "RCCL_", "ROCBLAS_",
    "HIPBLASLT_", "MIOPEN_", "GPU_MAX_HW_QUEUES",
)  # fmt: skip
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that choose a process's devices; torch for ROCm follows all three."""
_SET_PER_JOB = frozenset(
    {*VISIBLE_DEVICES, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"}
)


def describe_visible_devices(env: Mapping[str, str]) -> str:
    """Name the variables that hide devices from this process, and their values."""
    given = [f"{name} {env[name]!r}" for name in VISIBLE_DEVICES if name in env]
    return ", ".join(given) or "no variable hides one"


def user_environment(env: Mapping[str, str], launcher_environ: Path) -> dict[str, str]:
    """``env`` without the one thread per rank that torchrun sets where the number is not given.

    ``launcher_environ`` is ``/proc/<torchrun>/environ``: what torchrun was started with, which its own changes do not
    touch. Where it cannot be read the variable is taken for the user's.
    """
    user_env = dict(env)
    if "TORCHELASTIC_RUN_ID" in env and env.get("OMP_NUM_THREADS") == "1":
        with contextlib.suppress(OSError):
            if b"\0OMP_NUM_THREADS=" not in b"\0" + launcher_environ.read_bytes():
                del user_env["OMP_NUM_THREADS"]
    return user_env


def missing_variables(env: Mapping[str, str], wanted: Mapping[str, str], run_id: str) -> dict[str, str]:
    """Return the variables that ``env`` lacks; none once the process was started anew for ``run_id``."""
    if env.get(RESTARTED_FOR_RUN) == run_id:
        return {}
    return {name: value for name, value in wanted.items() if env.get(name) != value}


def apply_run_environment(wanted: Mapping[str, str], run_id: str) -> None:
    """Set the run's own variables, and start the interpreter anew where one differs.

    The dynamic loader, malloc and OpenMP read theirs only when a process starts.
    """
    changed = missing_variables(os.environ, wanted, run_id)
    if changed:
        sys.stdout.flush()
        sys.stderr.flush()
        env = {**os.environ, **changed, RESTARTED_FOR_RUN: run_id}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)  # noqa: S606 - this very program again


def hide_gpus() -> None:
    """Let libraries find no GPU in a run on CPUs: they ask whether there is one, not for the device of the run."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HIP_VISIBLE_DEVICES"] = "-1"  # HIP takes an empty text for no choice


def performance_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that can change a measurement."""
    return {name: env[name] for name in sorted(env) if name.startswith(_PERFORMANCE_PREFIXES)}


def user_performance_environment(env: Mapping[str, str], of_run: Mapping[str, str]) -> dict[str, str]:
    """Variables that matter and that neither the run itself (its ``env``), the launcher nor the scheduler has set."""
    variables = performance_environment(env)
    return {name: variables[name] for name in variables if name not in of_run and name not in _SET_PER_JOB}


def cpu_mask() -> list[int]:
    """The cores that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def torch_thread_count(env: Mapping[str, str], cores: int, cores_per_task: int | None, info: RankInfo) -> int | None:
    """Threads that torch should use within a rank, ``None`` where the environment already sets them.

    A mask no larger than ``cores_per_task`` was bound to this rank alone; a larger one is shared by the node's ranks,
    and so is any under torchrun, of forked ranks and in a pool, which bind nothing. No more than the profile grants a
    rank: others may run beside it.
    """
    if env.get("OMP_NUM_THREADS") or env.get("MKL_NUM_THREADS"):
        return None
    alone = cores_per_task is not None and cores <= cores_per_task and info.launcher not in ("torchrun", "fork", "pool")
    share = cores if alone else cores // info.local_world_size
    return max(1, share if cores_per_task is None else min(share, cores_per_task))


def core_warnings(cores: int, cores_per_task: int | None, local_world_size: int, host_cores: int) -> list[str]:
    """Return the reasons why this rank's cores make its times longer than necessary."""
    warnings = []
    if cores_per_task is not None and cores < cores_per_task:
        warnings.append(f"a rank may use {cores} of the {cores_per_task} cores per task that the profile promises")
    if local_world_size > host_cores:
        warnings.append(f"oversubscribed: {local_world_size} ranks share the {host_cores} cores of their host")
    return warnings


def resource_limits() -> dict[str, Any]:
    """The resource limits that have stopped jobs before: soft values, -1 is none."""
    names = {"open_files": "RLIMIT_NOFILE", "locked_memory_bytes": "RLIMIT_MEMLOCK", "stack_bytes": "RLIMIT_STACK",
             "address_space_bytes": "RLIMIT_AS", "processes": "RLIMIT_NPROC"}  # fmt: skip
    return {key: resource.getrlimit(getattr(resource, name))[0] for key, name in names.items()}


def raise_open_file_limit() -> None:
    """Rank 0 holds three sockets a rank: the soft limit of 1024 files would end a world of a few hundred."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
