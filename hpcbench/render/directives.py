"""What a job asks the scheduler for: the #SBATCH lines of a shape of run on a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcbench.config.cluster import ClusterProfile, Node, Request
from hpcbench.config.spec import RunSpec
from hpcbench.units import slurm_time

Value = str | int | bool

LAUNCH_S = 30.0
"""What starting and ending one launch of a pack may take beside the run's own limit."""


@dataclass(frozen=True)
class Shape:
    """What the text of a job script depends on. Runs of one shape share one script."""

    partition: str | None
    environment: str | None
    nodes: int
    tasks_per_node: int
    devices_per_task: int
    time_limit_s: float

    @property
    def ranks(self) -> int:
        """Processes of one launch."""
        return self.nodes * self.tasks_per_node


def shape_of(spec: RunSpec, profile: ClusterProfile) -> Shape:
    """The shape of a run, its time limit filled in from the partition or the cluster."""
    limit_min = spec.time_limit_min or profile.partition(spec.partition).time_limit_min or profile.time_limit_min
    return Shape(
        partition=spec.partition or profile.default_partition,
        environment=spec.environment or profile.default_environment,
        nodes=spec.nodes,
        tasks_per_node=spec.tasks_per_node,
        devices_per_task=spec.devices_per_task,
        time_limit_s=limit_min * 60,
    )


def job_limit_s(shape: Shape, pack: int = 1) -> float:
    """The limit of a job that carries ``pack`` runs, one after another."""
    return shape.time_limit_s if pack == 1 else pack * (shape.time_limit_s + LAUNCH_S)


def cpus_per_task(shape: Shape, profile: ClusterProfile) -> int:
    """Cores of one rank: as the profile says, else the node's shared among its ranks, at least one."""
    if profile.request.cpus_per_task:
        return profile.request.cpus_per_task
    cores = profile.node_of(shape.partition).cores
    return max(1, cores // shape.tasks_per_node) if cores else 1


def directives(
    shape: Shape, profile: ClusterProfile, job_name: str, folder: str, number: int, pack: int = 1
) -> list[tuple[str, Value]]:
    """Names and values of the #SBATCH lines; ``True`` is a flag without a value.

    ``folder`` is the submission's: jobs run there, and what the script says goes to ``<number>.<job>.<task>.log``.
    """
    partition = profile.partition(shape.partition)
    node = profile.node_of(shape.partition)
    # SLURM replaces what follows a percent sign in the names of logs.
    log = f"{folder.replace('%', '%%')}/{number}.%A.%a.log"
    lines: dict[str, Value | list[str] | None] = {
        "job-name": job_name,
        "comment": job_name,
        "partition": (partition.name or shape.partition) if shape.partition else None,
        "account": profile.account,
        "qos": partition.qos,
        "constraint": partition.constraint,
        "nodes": shape.nodes,
        "ntasks-per-node": shape.tasks_per_node,
        "cpus-per-task": cpus_per_task(shape, profile),
        **_gpus(shape, profile.request, node),
        "mem": _memory(profile.request, node),
        "exclusive": profile.request.exclusive or None,
        "time": slurm_time(job_limit_s(shape, pack)),
        "signal": f"USR2@{_warning_s(profile, pack)}",
        "open-mode": "append",
        "chdir": folder,
        "output": log,
        "error": log,
    }
    lines.update(profile.directives)
    lines.update(partition.directives)
    for name in profile.request.drop:
        lines.pop(name, None)
    return [
        (name, one)
        for name, value in lines.items()
        if value is not None and value is not False
        for one in (value if isinstance(value, list) else [value])
    ]


def _warning_s(profile: ClusterProfile, pack: int) -> int:
    """How long before its limit a job's ranks are told. In a pack each run has a limit of its own, which it watches."""
    warning_s = profile.scheduler.warning_s
    return math.ceil(warning_s if pack == 1 else min(warning_s, LAUNCH_S))


def _gpus(shape: Shape, request: Request, node: Node) -> dict[str, Value | list[str] | None]:
    per_node = shape.tasks_per_node * shape.devices_per_task
    style = request.gpus
    if style == "gpus-per-node":
        return {"gpus-per-node": per_node}
    if style == "gpus-per-task":
        return {"gpus-per-task": shape.devices_per_task}
    if style == "gres":
        return {"gres": f"gpu:{per_node}"}
    if style == "gres-typed":
        return {"gres": f"gpu:{node.device_type}:{per_node}"}
    return {}


def _memory(request: Request, node: Node) -> Value | None:
    if request.memory == "all":
        return 0
    wanted = request.memory_bytes or (node.memory_bytes if request.memory == "node" else None)
    return f"{int(wanted // 2**20)}M" if wanted else None
