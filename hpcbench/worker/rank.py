"""Which rank is this? Read from what the launcher left in the environment, by a pure function."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hpcbench.config.spec import RunSpec
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
    """``torchrun``, ``srun``, ``mpirun``, ``pmi`` or ``lone``."""
    launch: str


def rank_info(env: Mapping[str, str], pid: int, parent: int) -> RankInfo:
    """The rank that ``env`` describes; a process that no launcher started is the only one of its world.

    torchrun is asked first: its ranks also inherit what srun set for torchrun itself. ``pid`` and ``parent`` are
    this process's and its parent's numbers, for a launch id where the launcher gives none.
    Raises ``WorkerError`` naming the variable that is missing or not a number.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return _torchrun(env, parent)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _openmpi(env)
    if _in_slurm_step(env):
        return _slurm(env)
    if "PMI_RANK" in env and "PMI_SIZE" in env:
        return _pmi(env, parent)
    return RankInfo(0, 0, 1, 1, 0, "lone", f"lone.{socket.gethostname()}.{pid}")


def check_world(info: RankInfo, spec: RunSpec) -> None:
    """Refuse a world of another size than the run's: ``WorkerError`` names both and what was found."""
    if info.world_size != spec.ranks:
        raise WorkerError(
            f"the run wants {spec.ranks} ranks (nodes {spec.nodes} x tasks_per_node {spec.tasks_per_node}), "
            f"but the launcher ({info.launcher}) started {info.world_size}",
            hint="start it through srun, torchrun or mpirun with that many tasks",
        )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        found = f"is {text!r}" if name in env else "is not set"
        raise WorkerError(f"{name} {found}; the launcher should have set it to a number") from None


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    # The batch script's own environment has SLURM_PROCID=0 too, but no numbered step: a python there is alone.
    return "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "").isdecimal()


def _torchrun(env: Mapping[str, str], parent: int) -> RankInfo:
    rank, local_rank = _number(env, "RANK"), _number(env, "LOCAL_RANK")
    world_size, local_world_size = _number(env, "WORLD_SIZE"), _number(env, "LOCAL_WORLD_SIZE")
    node_rank = _number(env, "GROUP_RANK", 0)
    launch = [env["TORCHELASTIC_RUN_ID"], env.get("MASTER_PORT", ""), env.get("TORCHELASTIC_RESTART_COUNT", "0")]
    agents = _number(env, "GROUP_WORLD_SIZE", 1)
    if agents == 1 and _in_slurm_step(env) and _number(env, "SLURM_STEP_NUM_NODES", 1) > 1:
        # One torchrun a node, each believing that it is alone (--standalone): srun knows how many there are.
        agents, node_rank = _number(env, "SLURM_STEP_NUM_NODES"), _number(env, "SLURM_NODEID")
        rank, world_size = node_rank * local_world_size + local_rank, agents * local_world_size
        launch = [_slurm_launch(env)]
    elif agents == 1:
        # The id is "none" by default: the agent's process number tells one launch from the next.
        launch.append(f"{socket.gethostname()}.{parent}")
    return RankInfo(rank, local_rank, world_size, local_world_size, node_rank, "torchrun", ".".join(launch))


def _slurm_launch(env: Mapping[str, str]) -> str:
    restart = env.get("SLURM_RESTART_COUNT", "0")
    return f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}.r{restart}"


def _slurm(env: Mapping[str, str]) -> RankInfo:
    rank = _number(env, "SLURM_PROCID")
    world_size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    node_rank = _number(env, "SLURM_NODEID", 0)
    here = _tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")), node_rank)
    return RankInfo(
        rank, _number(env, "SLURM_LOCALID", 0), world_size, here or world_size, node_rank, "srun", _slurm_launch(env)
    )


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


def _openmpi(env: Mapping[str, str]) -> RankInfo:
    rank, local_rank = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
    local_world_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    # Open MPI names no node; with the mapping "ppr:N:node" ranks fill one node after the other.
    node_rank = rank // local_world_size
    launch = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("SLURM_JOB_ID", "mpirun")
    return RankInfo(
        rank, local_rank, _number(env, "OMPI_COMM_WORLD_SIZE"), local_world_size, node_rank, "mpirun", launch
    )


def _pmi(env: Mapping[str, str], parent: int) -> RankInfo:
    rank, world_size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    local_rank = _number(env, "MPI_LOCALRANKID", _number(env, "PALS_LOCAL_RANKID", rank))
    local_world_size = _number(env, "MPI_LOCALNRANKS", _number(env, "PALS_LOCAL_SIZE", world_size))
    launch = env.get("PMI_JOBID") or env.get("PALS_APID") or env.get("SLURM_JOB_ID") or f"pmi.{parent}"
    return RankInfo(rank, local_rank, world_size, local_world_size, rank // local_world_size, "pmi", launch)
