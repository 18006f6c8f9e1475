"""The plan of a sweep on a cluster: its runs, which are finished, infeasible or stopped, and the jobs to submit.

Also the limits that the profile sets on them, and the runs that can stop one another.
"""

from __future__ import annotations

import operator
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import DEGREE_NAMES, RunSpec, run_id
from hpcbench.config.sweep_file import TABLE_PARAMETERS, ParameterPath, StopRule, SubmitTable
from hpcbench.config.sweep_loader import (
    ExcludedPoint,
    Sweep,
    count_points,
    expand_sweep,
    find_exclusion,
)
from hpcbench.errors import ConfigError
from hpcbench.paths import data_folder
from hpcbench.render.job_script import LAUNCH_OVERHEAD_S, JobShape, make_job_shape
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_BROKEN, STATUS_OK, ResultSummary
from hpcbench.results.stop_rules import StopGroup, format_stop_reason, is_smaller_run
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.check_sweep import check_names, custom_model_folder, nothing_feasible
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.submit.each_node import with_each_node
from hpcbench.submit.job_software import environment_key
from hpcbench.submit.run_order import MAX_SLICES, interleave, order_seed, shuffle_runs
from hpcbench.submit.scheduler import Notify, ignore_message
from hpcbench.workloads.datasets import sample_shape
from hpcbench.workloads.models import get_model

_IGNORED_PARAMETERS = frozenset({("repeat",), ("seed",), ("time_limit_min",), ("spec_version",)})
_WORLD_SIZE_PARAMETERS = frozenset({("nodes",), ("tasks_per_node",), ("devices_per_task",)})


@dataclass(frozen=True)
class StopGroups:
    """The lines of ``stop.jsonl``, and for each run the numbers of its lines."""

    groups: list[StopGroup]
    of_run: dict[str, list[int]]

    def lines(self) -> bytes:
        """The bytes of ``stop.jsonl``; empty where no run can stop another."""
        encoder = msgspec.json.Encoder()
        return b"".join(encoder.encode(group) + b"\n" for group in self.groups)


def stop_groups(sweep: Sweep, runs: Mapping[str, RunSpec]) -> StopGroups:
    """The groups of runs that differ only in the parameters that a rule compares; groups of one run are left out."""
    groups: list[StopGroup] = []
    of_run: dict[str, list[int]] = {}
    for rule in sweep.stops:
        key_of = _equality_key(sweep, rule)
        members: dict[Any, list[tuple[str, list[float]]]] = {}
        for key, spec in runs.items():
            values = [_compared_value(spec, parameter) for parameter in rule.along]
            if None not in values:
                members.setdefault(key_of(spec), []).append((key, values))  # type: ignore[arg-type]
        for group in members.values():
            if len(group) > 1:
                for key, _ in group:
                    of_run.setdefault(key, []).append(len(groups))
                groups.append(StopGroup(rule.statuses, [".".join(parameter) for parameter in rule.along], group))
    return StopGroups(groups, of_run)


def stopped_runs(stops: StopGroups, statuses: Mapping[str, str]) -> dict[str, str]:
    """``run_id`` to reason, for the runs without a result that a rule excludes.

    ``statuses``: the status of each result, by ``run_id``.
    """
    stopped: dict[str, str] = {}
    for group in stops.groups:
        smallest = list(_smallest_stopped(group, statuses))
        for key, values in group.runs if smallest else ():
            if key not in statuses and key not in stopped:
                below = next((entry for entry in smallest if is_smaller_run(entry[1], values)), None)
                if below is not None:
                    stopped[key] = format_stop_reason(group, *below, statuses[below[0]])
    return stopped


def _smallest_stopped(group: StopGroup, statuses: Mapping[str, str]) -> Iterator[tuple[str, list[float]]]:
    """The runs with one of the rule's statuses, without those that are larger than another of them."""
    kept: list[list[float]] = []
    ended = [(values, key) for key, values in group.runs if statuses.get(key) in group.statuses]
    for values, key in sorted(ended):
        if not any(values == other or is_smaller_run(other, values) for other in kept):
            kept.append(values)
            yield key, values


def _compared_value(spec: RunSpec, parameter: ParameterPath) -> float | None:
    """The value of a compared parameter; ``None`` for an option of another strategy. Defaults are not in the spec."""
    table, name = parameter[0], parameter[-1]
    if table in TABLE_PARAMETERS:
        known = get_strategy(spec.strategy).options if table == "options" else get_model(spec.model).options
        value = getattr(spec, table).get(name, known[name].default if name in known else None)
    elif name == "input_size":
        value = sample_shape(spec.dataset, spec.input_size)[-1]
    else:
        value = getattr(spec, "batch_size" if name == "global_batch_size" else name)
    return value if isinstance(value, (int, float)) else None


def _equality_key(sweep: Sweep, rule: StopRule) -> Callable[[RunSpec], Any]:
    """The key that two runs must have in common to be compared."""
    ignored = _free_parameters(sweep, rule)
    names = [name for name in RunSpec.__struct_fields__ if name not in TABLE_PARAMETERS and (name,) not in ignored]
    if sweep.values("global_batch_size") and "batch_size" in names:
        # The batch size of a replica follows from the global one.
        names[names.index("batch_size")] = "global_batch_size"
    plain = operator.attrgetter(*names)
    tables = operator.attrgetter(*TABLE_PARAMETERS)

    def key(spec: RunSpec) -> Any:
        nested = tuple(
            tuple(sorted(item for item in table.items() if (name, item[0]) not in ignored)) if table else ()
            for name, table in zip(TABLE_PARAMETERS, tables(spec), strict=True)
        )
        return plain(spec), nested

    return key


def _free_parameters(sweep: Sweep, rule: StopRule) -> set[ParameterPath]:
    """The parameters that may differ: compared ones, those that change with them or are computed, and free degrees."""
    along = set(rule.along)
    ignored = {*_IGNORED_PARAMETERS, *along, *sweep.derived}
    for axis in sweep.axes:
        for step in axis.steps:
            if along & step.keys():
                ignored.update(step)
    if along & _WORLD_SIZE_PARAMETERS:
        ignored.update((degree,) for degree in DEGREE_NAMES if not sweep.values(degree))
    if ("global_batch_size",) in ignored:
        ignored.add(("batch_size",))
    return ignored


@dataclass(frozen=True)
class JobGroup:
    """Runs of one shape: one script, one task file, jobs of ``pack`` runs each."""

    shape: JobShape
    run_ids: list[str]
    pack: int

    @property
    def jobs(self) -> int:
        return -(-len(self.run_ids) // self.pack)

    @property
    def limit_s(self) -> float:
        """Time limit of one job."""
        return self.shape.job_limit_s(self.pack)

    @property
    def node_hours(self) -> float:
        """The maximum cost of the runs: nodes times the time limit of every run."""
        return self.shape.nodes * self.shape.time_limit_s * len(self.run_ids) / 3600


def group_jobs(groups: Iterable[tuple[JobShape, list[str]]], table: SubmitTable) -> list[JobGroup]:
    """``groups`` (``run_id``s by shape) as jobs, packed by the sweep's table and the partition's time limit."""
    return [JobGroup(shape, keys, min(runs_per_job(shape, table), len(keys))) for shape, keys in groups]


def runs_per_job(shape: JobShape, table: SubmitTable) -> int:
    """Runs of one job: as many as the sweep asks for and the partition's time limit allows; at least one."""
    launch_s = shape.time_limit_s + LAUNCH_OVERHEAD_S
    pack = table.pack or 1
    if table.pack_minutes is not None:
        pack = int(table.pack_minutes * 60 // launch_s)
    longest_min = shape.partition.longest_min(shape.nodes)
    if longest_min is not None:
        pack = min(pack, int(longest_min * 60 // launch_s))
    return max(1, pack)


RERUN_ON_SUBMIT = frozenset({"failed", "cancelled", "preempted"})
"""Statuses that submit runs again; the others wait for `retry`."""


@dataclass
class SweepPlan:
    """The runs of a sweep on one cluster, in the order of the sweep."""

    sweep: Sweep
    profile: ClusterProfile
    runs: dict[str, RunSpec]
    dropped: list[InfeasiblePoint]
    tree: ClusterTree
    """The cluster's results."""
    heads: dict[str, ResultSummary] = field(default_factory=dict)
    """``run_id`` to the summary of its result, for the runs that have one."""
    model_folder: Path | None = None
    """The folder of custom models."""
    data_folder: str | None = None
    """The folder of data sets."""
    profile_file: Path | None = None
    """The profile, if it is not found by its name."""
    _keys: dict[str | None, str] = field(default_factory=dict, init=False, repr=False)
    _shapes: dict[tuple[Any, ...], JobShape] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def stops(self) -> StopGroups:
        """The runs that can stop one another."""
        return stop_groups(self.sweep, self.runs)

    @cached_property
    def stopped(self) -> dict[str, str]:
        """``run_id`` to reason, for the runs without a result that a stop rule excludes."""
        return stopped_runs(self.stops, self._statuses) if self.sweep.stops else {}

    @cached_property
    def _statuses(self) -> dict[str, str]:
        return {
            key: head.status
            for key, head in self.heads.items()
            if head.status != STATUS_BROKEN and key not in self.may_be_supported
        }

    @cached_property
    def may_be_supported(self) -> set[str]:
        """The ``unsupported`` runs that lacked a package or module in another environment than the current one."""
        return {
            key
            for key, head in self.heads.items()
            if head.lacks_software
            and head.environment_key is not None
            and head.environment_key != self.environment_key(self.runs[key].environment)
        }

    @cached_property
    def finished(self) -> dict[str, str]:
        """``run_id`` to status, for the runs that submit skips because they have a result."""
        return {key: status for key, status in self._statuses.items() if status not in RERUN_ON_SUBMIT}

    @cached_property
    def elsewhere(self) -> dict[str, str]:
        """``run_id`` to environment key, for the ok runs that were measured in another environment."""
        return {
            key: head.environment_key
            for key, head in self.heads.items()
            if head.status == STATUS_OK
            and head.environment_key is not None
            and head.environment_key != self.environment_key(self.runs[key].environment)
        }

    @property
    def profile_name(self) -> str:
        """Return the value of ``--cluster`` for the profile: its name, or its path if the name does not lead to it."""
        return str(self.profile_file or self.profile.name)

    def environment_key(self, environment: str | None) -> str:
        if environment not in self._keys:
            self._keys[environment] = environment_key(self.profile.environment(environment))
        return self._keys[environment]

    @property
    def missing(self) -> dict[str, RunSpec]:
        """The runs that submit would start if none of them is active."""
        return {key: spec for key, spec in self.runs.items() if key not in self.finished and key not in self.stopped}

    def shape(self, spec: RunSpec) -> JobShape:
        """The resources that the job script of a run depends on; runs of one shape share the object."""
        entry = get_strategy(spec.strategy)
        # A pipeline on CUDA devices communicates over NCCL, unless one process drives all of them.
        is_pipeline = entry.pipeline.schedule is not None and not entry.drives_several_devices
        resources = (
            spec.nodes, spec.tasks_per_node, spec.devices_per_task, spec.partition, spec.environment,
            spec.time_limit_min, spec.node, self.profile.device == "cuda" and is_pipeline,
        )  # fmt: skip
        if resources not in self._shapes:
            limit_s = None if spec.time_limit_min is None else 60 * spec.time_limit_min
            shape = make_job_shape(
                self.profile, spec.nodes, spec.tasks_per_node, spec.devices_per_task, limit_s,
                partition=spec.partition, environment=spec.environment, has_nccl_pipeline=resources[-1],
            )  # fmt: skip
            self._shapes[resources] = replace(shape, node=spec.node)
        return self._shapes[resources]

    def groups(self, runs: dict[str, RunSpec]) -> dict[JobShape, list[str]]:
        """``run_id``s by shape: each group is one script and one array."""
        groups: dict[JobShape, list[str]] = {}
        for key, spec in runs.items():
            groups.setdefault(self.shape(spec), []).append(key)
        return groups

    def jobs(self, runs: dict[str, RunSpec]) -> list[JobGroup]:
        """``runs`` by shape, packed as the sweep asks; ``arrays`` has them in the order in which submit sends them."""
        return group_jobs(self.groups(runs).items(), self.sweep.submit)

    def node_warnings(self) -> list[str]:
        """The missing runs on more nodes than their partition has, by partition and number of nodes."""
        counts: Counter[tuple[str, int, int]] = Counter()
        for shape, keys in self.groups(self.missing).items():
            available = shape.partition.nodes
            if available is not None and shape.nodes > available:
                counts[shape.partition.key or self.profile.name, shape.nodes, available] += len(keys)
        return [
            f"{count} run{'s' if count > 1 else ''} on {nodes} nodes, but {name} has {available}: the scheduler "
            "refuses such jobs, or keeps them pending"
            for (name, nodes, available), count in sorted(counts.items())
        ]

    @cached_property
    def order_seed(self) -> int | None:
        """The seed of the order of runs; ``None`` if they are not shuffled."""
        if self.sweep.order == "grid":
            return None
        return order_seed(self.runs) if self.sweep.submit.seed is None else self.sweep.submit.seed

    def arrays(self, runs: dict[str, RunSpec]) -> list[JobGroup]:
        """``runs`` in the arrays and in the order in which submit sends them."""
        groups = self.groups(runs)
        table, seed = self.sweep.submit, self.order_seed
        if seed is not None:
            stops = self.stops.groups
            groups = {shape: shuffle_runs(keys, runs, stops, seed) for shape, keys in groups.items()}
        slices = 1 if seed is None else MAX_SLICES
        ordered = interleave(groups, lambda shape: runs_per_job(shape, table), slices=slices)
        return group_jobs(ordered, table)

    @property
    def budget(self) -> tuple[float, str] | None:
        """The maximum cost of one submit in node-hours, and the owner of that limit."""
        budgets = [
            (self.sweep.submit.budget_node_hours, f"sweep {self.sweep.name}"),
            (self.profile.budget_node_hours, f"cluster {self.profile.name}"),
        ]
        return min(((budget, owner) for budget, owner in budgets if budget is not None), default=None)

    def node_hours(self, runs: dict[str, RunSpec]) -> float:
        """The maximum cost of ``runs``: nodes times time limit."""
        return sum(shape.nodes * shape.time_limit_s * len(keys) for shape, keys in self.groups(runs).items()) / 3600

    def check_budget(self, runs: dict[str, RunSpec]) -> None:
        """Raise ``ConfigError`` if ``runs`` may cost more node-hours than the sweep or the profile allows at once, or
        are more jobs than anybody submits by intention."""
        jobs = sum(group.jobs for group in self.jobs(runs))
        if jobs > MAX_JOBS:
            raise ConfigError(
                f"{len(runs):,} runs are {jobs:,} jobs, more than {MAX_JOBS:,}",
                where=str(self.sweep.source.path),
                hint="set pack or pack_minutes in [submit], split the sweep, or add --yes",
            )
        cost = self.node_hours(runs)
        if self.budget is not None and cost > self.budget[0]:
            budget, owner = self.budget
            raise ConfigError(
                f"{len(runs)} runs may cost {cost:.2f} node-hours at their time limits, "
                f"the budget of {owner} is {budget:g}",
                where=str(self.sweep.source.path),
                hint="lower time_limit_min, submit fewer runs, raise budget_node_hours, or add --yes",
            )


_POINTS_PER_MESSAGE = 25_000
MAX_JOBS = 20_000
"""The most jobs that one submit sends without --yes."""


def make_plan(
    sweep: Sweep,
    profile: ClusterProfile,
    tree: ClusterTree,
    refuse: Callable[[RunSpec], str | None] | None = None,
    notify: Notify = ignore_message,
) -> SweepPlan:
    """Expand and resolve ``sweep`` for ``profile`` and look up which of its runs have results.

    ``refuse`` returns a further reason why a run is infeasible. ``notify`` gets the progress of a large sweep.

    Raises ``ConfigErrors`` for unknown names, ``ConfigError`` if every point is infeasible, and ``SubmitError`` if the
    scheduler does not list the nodes that the sweep is for.
    """
    check_names(sweep, profile)
    sweep = with_each_node(sweep, profile)
    runs: dict[str, RunSpec] = {}
    dropped: list[InfeasiblePoint] = []
    known_limits: dict[str | None, PartitionLimits] = {}
    points = count_points(sweep)
    for number, point in enumerate(expand_sweep(sweep)):
        if number and number % _POINTS_PER_MESSAGE == 0:
            notify(f"sweep {sweep.name}: {number:,} of {points:,} points expanded")
        if isinstance(point, ExcludedPoint):
            dropped.append(InfeasiblePoint(point.point, point.rule))
            continue
        partition = point.get("partition") or profile.default_partition
        if partition not in known_limits:
            known_limits[partition] = partition_limits(profile, partition)
        resolved = resolve_point(point, known_limits[partition])
        if isinstance(resolved, InfeasiblePoint):
            dropped.append(resolved)
        elif sweep.excludes and (rule := find_exclusion(sweep, msgspec.structs.asdict(resolved))):
            dropped.append(InfeasiblePoint(point, rule))
        elif refuse is not None and (reason := refuse(resolved)):
            dropped.append(InfeasiblePoint(point, reason))
        else:
            runs.setdefault(run_id(resolved), resolved)
    if not runs:
        raise nothing_feasible(sweep, dropped, profile.name)
    models, datasets = custom_model_folder(sweep, profile), data_folder(None, profile.data_folder)
    return SweepPlan(sweep, profile, runs, dropped, tree, tree.summaries(runs), models, datasets)


def partition_limits(profile: ClusterProfile, partition: str | None) -> PartitionLimits:
    """The limits of a partition. The local machine accepts more ranks than cores, but is one node."""
    is_local = profile.scheduler.traits.runs_here
    queue = profile.partition(partition)
    node, request = queue.node, queue.request
    return PartitionLimits(
        partition=partition or profile.name,
        max_nodes=1 if is_local else queue.max_nodes,
        only_node=socket.gethostname() if is_local else None,
        cores_per_node=None if is_local else node.cores,
        cpus_per_task=request.cpus_per_task or request.cpus_per_device,
        devices_per_node=node.device_places if profile.device != "cpu" else None,
        max_time_min=queue.max_time_min,
        min_nodes=queue.min_nodes,
        time_steps=tuple((step.nodes, step.max_time_min) for step in queue.max_time_by_nodes),
        max_node_hours=queue.max_node_hours,
        all_devices_across_nodes=queue.all_devices_across_nodes,
    )


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
