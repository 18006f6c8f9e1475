"""What a job asks the scheduler for: the #SBATCH lines of a shape of run on a cluster."""

from __future__ import annotations

import math

from hpcbench.config.cluster import ClusterProfile, Node, Request
from hpcbench.render.container import job_options
from hpcbench.render.shape import LAUNCH_S, Shape, cpus_per_task, job_limit_s
from hpcbench.render.steps import gpu_option
from hpcbench.units import slurm_time

Value = str | int | bool


def directives(
    shape: Shape, profile: ClusterProfile, job_name: str, folder: str, number: int, pack: int = 1
) -> list[tuple[str, Value]]:
    """Names and values of the #SBATCH lines; ``True`` is a flag without a value.

    ``folder`` is the submission's: jobs run there, and what the script says goes to ``<number>.<job>.<task>.log``.
    """
    partition = profile.partition(shape.partition)
    node, request = profile.node_of(shape.partition), profile.request_of(shape.partition)
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
        **(gpu_option(shape, request, profile) if request.gpus_on != "step" else {}),
        "mem": _memory(request, node),
        "exclusive": request.exclusive or None,
        "exclude": ",".join(request.exclude_nodes) or None,
        "time": slurm_time(job_limit_s(shape, pack)),
        "signal": f"USR2@{_warning_s(profile, pack)}",
        "open-mode": "append",
        "chdir": folder,
        "output": log,
        "error": log,
    }
    lines.update(job_options(profile.environment(shape.environment).container))
    lines.update(profile.directives)
    lines.update(partition.directives)
    for name in request.drop:
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


def _memory(request: Request, node: Node) -> Value | None:
    if request.memory == "all":
        return 0
    wanted = request.memory_bytes or (node.memory_bytes if request.memory == "node" else None)
    return f"{int(wanted // 2**20)}M" if wanted else None
