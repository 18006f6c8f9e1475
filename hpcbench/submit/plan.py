"""What a sweep means on a cluster: its runs, those that are done, those that are dropped, and the jobs to submit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.expand import Excluded, excluded_by, expand
from hpcbench.config.load import Sweep
from hpcbench.config.spec import RunSpec, run_id
from hpcbench.errors import ConfigError
from hpcbench.parallel.check import check_names
from hpcbench.parallel.resolve import Dropped, Limits, resolve
from hpcbench.render.shape import Shape, shape_of
from hpcbench.results.schema import BROKEN, OK, ResultHead
from hpcbench.results.store import ClusterTree
from hpcbench.submit.packing import JobGroup, group_jobs
from hpcbench.submit.software import environment_key
from hpcbench.submit.stop import StopGroups, stop_groups, stopped_runs

RERUN_ON_SUBMIT = frozenset({"failed", "cancelled", "preempted"})
"""Statuses that submit runs again; the others wait for `retry`."""


@dataclass
class Plan:
    """The runs of a sweep on one cluster, in the order of the sweep."""

    sweep: Sweep
    profile: ClusterProfile
    runs: dict[str, RunSpec]
    dropped: list[Dropped]
    heads: dict[str, ResultHead] = field(default_factory=dict)
    """``run_id`` to what is known of its result, of the runs that have one."""
    _keys: dict[str | None, str] = field(default_factory=dict, init=False, repr=False)
    _shapes: dict[tuple[Any, ...], Shape] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def stops(self) -> StopGroups:
        """The runs that can stop one another."""
        return stop_groups(self.sweep, self.runs)

    @cached_property
    def stopped(self) -> dict[str, str]:
        """``run_id`` to reason, of the runs without a result that a smaller one's result makes pointless."""
        return stopped_runs(self.stops, self._statuses) if self.sweep.stops else {}

    @cached_property
    def _statuses(self) -> dict[str, str]:
        return {key: head.status for key, head in self.heads.items() if head.status != BROKEN}

    @cached_property
    def finished(self) -> dict[str, str]:
        """``run_id`` to status, of the runs that submit leaves alone because they have a result."""
        return {key: status for key, status in self._statuses.items() if status not in RERUN_ON_SUBMIT}

    @cached_property
    def elsewhere(self) -> dict[str, str]:
        """``run_id`` to environment key, of the runs that were measured well in an environment that is not today's."""
        return {
            key: head.environment_key
            for key, head in self.heads.items()
            if head.status == OK
            and head.environment_key is not None
            and head.environment_key != self.environment_key(self.runs[key].environment)
        }

    def environment_key(self, environment: str | None) -> str:
        """What is known here of the software of an environment of the profile."""
        name = environment or self.profile.default_environment
        if name not in self._keys:
            self._keys[name] = environment_key(self.profile, name)
        return self._keys[name]

    @property
    def missing(self) -> dict[str, RunSpec]:
        """The runs that submit would start, if nobody else has."""
        left_alone = self.finished.keys() | self.stopped.keys()
        return {key: spec for key, spec in self.runs.items() if key not in left_alone}

    def shape(self, spec: RunSpec) -> Shape:
        """What the job script of a run depends on; runs of one shape share the object."""
        asked = (
            spec.nodes, spec.tasks_per_node, spec.devices_per_task, spec.partition, spec.environment,
            spec.time_limit_min,
        )  # fmt: skip
        if asked not in self._shapes:
            self._shapes[asked] = shape_of(spec, self.profile)
        return self._shapes[asked]

    def groups(self, runs: dict[str, RunSpec]) -> dict[Shape, list[str]]:
        """``run_id``s by shape: each group is one script and one array."""
        found: dict[Shape, list[str]] = {}
        for key, spec in runs.items():
            found.setdefault(self.shape(spec), []).append(key)
        return found

    def jobs(self, runs: dict[str, RunSpec]) -> list[JobGroup]:
        """``runs`` as submit would send them: one array for each group, packed as the sweep asks."""
        return group_jobs(self.groups(runs), self.sweep.submit, self.profile)

    @property
    def budget(self) -> tuple[float, str] | None:
        """The most node-hours that one submit may cost, and whose limit that is."""
        budgets = [
            (self.sweep.submit.budget_node_hours, f"sweep {self.sweep.name}"),
            (self.profile.budget_node_hours, f"cluster {self.profile.name}"),
        ]
        return min(((budget, owner) for budget, owner in budgets if budget is not None), default=None)

    def node_hours(self, runs: dict[str, RunSpec]) -> float:
        """The most that ``runs`` can cost: nodes times time limit."""
        return sum(shape.nodes * shape.time_limit_s * len(keys) for shape, keys in self.groups(runs).items()) / 3600


def make_plan(sweep: Sweep, profile: ClusterProfile, tree: ClusterTree) -> Plan:
    """Expand and resolve ``sweep`` for ``profile`` and look up which of its runs have results.

    Raises ``ConfigErrors`` for names that do not exist and ``ConfigError`` where every point is dropped.
    """
    check_names(sweep, profile)
    runs: dict[str, RunSpec] = {}
    dropped: list[Dropped] = []
    known_limits: dict[str | None, Limits] = {}
    for point in expand(sweep):
        if isinstance(point, Excluded):
            dropped.append(Dropped(point.point, point.rule))
            continue
        partition = point.get("partition") or profile.default_partition
        if partition not in known_limits:
            known_limits[partition] = limits_of(profile, partition)
        resolved = resolve(point, known_limits[partition])
        if isinstance(resolved, Dropped):
            dropped.append(resolved)
        elif sweep.excludes and (rule := excluded_by(sweep, msgspec.structs.asdict(resolved))):
            dropped.append(Dropped(point, rule))
        else:
            runs.setdefault(run_id(resolved), resolved)
    if not runs:
        reasons = sorted({point.reason for point in dropped})
        all_of = "the only point" if len(dropped) == 1 else f"every one of the {len(dropped)} points"
        raise ConfigError(
            f"{all_of} of sweep {sweep.name!r} is dropped on {profile.name}",
            where=str(sweep.source.path),
            hint="\n  ".join(reasons[:10]),
        )
    return Plan(sweep, profile, runs, dropped, tree.heads(runs))


def limits_of(profile: ClusterProfile, partition: str | None) -> Limits:
    """What a partition of ``profile`` allows. A local machine takes more ranks than cores, but is one node."""
    is_local = profile.scheduler.kind == "local"
    queue = profile.partition(partition)
    node, request = profile.node_of(partition), profile.request_of(partition)
    return Limits(
        partition=partition or profile.name,
        max_nodes=1 if is_local else queue.max_nodes,
        cores_per_node=None if is_local else node.cores,
        cpus_per_task=request.cpus_per_task or request.cpus_per_device,
        devices_per_node=node.devices if profile.device != "cpu" else None,
        max_time_min=queue.max_time_min,
        min_nodes=queue.min_nodes,
        time_steps=tuple((step.nodes, step.max_time_min) for step in queue.max_time_by_nodes),
        max_node_hours=queue.max_node_hours,
        all_devices_across_nodes=queue.all_devices_across_nodes,
    )


def local_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
