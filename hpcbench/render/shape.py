"""The shape of a run: all that the text of its job script depends on."""

from __future__ import annotations

from dataclasses import dataclass

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.spec import RunSpec

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
    """The shape of a run, its time limit filled in from the partition or the cluster, as far as such a job is allowed.

    A limit that the run itself names stays: resolving the sweep has checked it.
    """
    partition = profile.partition(spec.partition)
    longest_min = partition.longest_min(spec.nodes)
    limit_min = spec.time_limit_min
    if limit_min is None:
        limit_min = partition.time_limit_min or profile.time_limit_min
        limit_min = limit_min if longest_min is None else min(limit_min, longest_min)
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
    """CPUs of one rank: as the profile says, else the node's shared among its ranks, at least one."""
    request = profile.request_of(shape.partition)
    if request.cpus_per_task:
        return request.cpus_per_task
    if request.cpus_per_device:
        return request.cpus_per_device * shape.devices_per_task
    cores = profile.node_of(shape.partition).cores
    return max(1, cores // shape.tasks_per_node) if cores else 1
