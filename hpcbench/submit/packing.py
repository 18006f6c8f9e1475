"""How many runs one job carries, and what that means for the queue."""

from __future__ import annotations

from dataclasses import dataclass

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.sweep import SubmitTable
from hpcbench.render.shape import LAUNCH_S, Shape, job_limit_s


@dataclass(frozen=True)
class JobGroup:
    """Runs of one shape: one script, one task file, jobs of ``pack`` runs each."""

    shape: Shape
    run_ids: list[str]
    pack: int

    @property
    def jobs(self) -> int:
        """Places in the queue that they take."""
        return -(-len(self.run_ids) // self.pack)

    @property
    def limit_s(self) -> float:
        """Time limit of one job."""
        return job_limit_s(self.shape, self.pack)

    @property
    def node_hours(self) -> float:
        """The most that the runs can cost: nodes times the time limit of every run."""
        return self.shape.nodes * self.shape.time_limit_s * len(self.run_ids) / 3600


def group_jobs(groups: dict[Shape, list[str]], table: SubmitTable, profile: ClusterProfile) -> list[JobGroup]:
    """``groups`` (``run_id``s by shape) as jobs, packed as the sweep asks and the partition's time limit allows."""
    return [JobGroup(shape, keys, min(pack_size(shape, table, profile), len(keys))) for shape, keys in groups.items()]


def pack_size(shape: Shape, table: SubmitTable, profile: ClusterProfile) -> int:
    """Runs of one job: as many as asked for, as long as the partition has time for all of them; at least one."""
    launch_s = shape.time_limit_s + LAUNCH_S
    wanted = table.pack or 1
    if table.pack_minutes is not None:
        wanted = int(table.pack_minutes * 60 // launch_s)
    longest_min = profile.partition(shape.partition).longest_min(shape.nodes)
    if longest_min is not None:
        wanted = min(wanted, int(longest_min * 60 // launch_s))
    return max(1, wanted)
