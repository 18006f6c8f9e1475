"""The sweep points that ``recommend`` examines: the ways to spread a model over a number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcbench.predict.strategy_cost import find_cost
from hpcbench.strategies.catalog import STRATEGIES, representative

SweepPoint = dict[str, Any]

PIPELINES = [key for key, entry in STRATEGIES.items() if entry.pipeline.schedule and not entry.drives_several_devices]
"""Pipelines whose stages each have a rank of their own."""

LEADING_SCHEDULE = representative("stages")
"""The pipeline whose degrees and micro-batches are looked at first; those that are best for it are tried with the
other schedules, which cut the model and send the same."""
MAX_MODEL_PARALLEL_DEVICES = 16
"""The largest model-parallel group that is tried beyond one node."""
MAX_STAGES = 64
"""The longest pipeline that is tried."""


class DeviceAllocation(NamedTuple):
    """The devices, and how the batch is given: per replica, or of all replicas."""

    nodes: int
    tasks_per_node: int
    batch: SweepPoint
    """``batch_size`` or ``global_batch_size``."""

    @property
    def devices(self) -> int:
        """Number of devices: each task has one."""
        return self.nodes * self.tasks_per_node

    @property
    def point(self) -> SweepPoint:
        """The part of a sweep point that all candidates share."""
        return {**self.batch, "nodes": self.nodes, "tasks_per_node": self.tasks_per_node}

    def samples(self, group: int) -> int:
        """Return the samples of a replica of ``group`` devices; 0 if they cannot be divided evenly."""
        if "batch_size" in self.batch:
            return int(self.batch["batch_size"])
        replicas = self.devices // group
        total = int(self.batch["global_batch_size"])
        return total // replicas if total % replicas == 0 else 0


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [factor for factor in range(1, int(number**0.5) + 1) if number % factor == 0]
    return small + [number // factor for factor in reversed(small) if factor * factor != number]


def model_parallel_sizes(world: DeviceAllocation, most: int = MAX_MODEL_PARALLEL_DEVICES) -> list[int]:
    """Sizes of model-parallel groups: parts of a node, then whole nodes up to ``most`` devices.

    >>> model_parallel_sizes(DeviceAllocation(4, 4, {}), 8)
    [2, 4, 8]
    """
    inside = [size for size in divisors(world.tasks_per_node) if size > 1]
    beyond = [nodes * world.tasks_per_node for nodes in divisors(world.nodes) if nodes > 1]
    return inside + [size for size in beyond if size <= most]


def non_pipeline_points(base: SweepPoint, world: DeviceAllocation) -> Iterator[SweepPoint]:
    """Every strategy but the pipelines, at every degree that is tried. ``base`` has model, data set and precision."""
    placed = base | world.point
    for key, entry in STRATEGIES.items():
        if key in PIPELINES or find_cost(key) is None:
            continue
        if entry.own_degree is None:
            if world.devices == 1:
                yield {**placed, "strategy": key}
        elif entry.own_degree == "dp_degree":
            yield {**placed, "strategy": key}
            if "shard_degree" in entry.options and world.nodes > 1 and world.tasks_per_node > 1:
                yield {**placed, "strategy": key, "options": {"shard_degree": world.tasks_per_node}}
        elif entry.own_degree != "pp_degree":
            for degree in model_parallel_sizes(world):
                yield {**placed, "strategy": key, entry.own_degree: degree, "dp_degree": world.devices // degree}


def leading_pipeline_points(base: SweepPoint, world: DeviceAllocation, shared: bool = True) -> Iterator[SweepPoint]:
    """The pipeline ``LEADING_SCHEDULE`` at every length, in micro-batches; ``shared``: also with layers that ranks
    share.
    """
    shares = [degree for degree in divisors(world.tasks_per_node) if degree & (degree - 1) == 0] if shared else [1]
    for stages in [count for count in divisors(world.devices) if 1 < count <= MAX_STAGES]:
        for share in [degree for degree in shares if (world.devices // stages) % degree == 0]:
            replicas = world.devices // (stages * share)
            degrees = {"strategy": LEADING_SCHEDULE, "pp_degree": stages, "tp_degree": share, "dp_degree": replicas}
            for micro_batches in micro_batch_choices(world.samples(stages * share), stages):
                yield base | world.point | degrees | {"micro_batches": micro_batches}


def other_schedule_points(leader: SweepPoint) -> Iterator[SweepPoint]:
    """The other schedules where ``leader`` was good; one micro-batch at a time is what ``model`` means."""
    yield from ({**leader, "strategy": key} for key in PIPELINES if key != LEADING_SCHEDULE)


def micro_batch_choices(samples: int, stages: int) -> list[int]:
    """Two numbers of micro-batches that cut ``samples`` evenly: about twice and about eight times the stages.

    >>> micro_batch_choices(64, 4), micro_batch_choices(6, 4), micro_batch_choices(0, 4)
    ([8, 32], [6], [])
    """
    parts = divisors(samples) if samples else []
    return sorted({max(count for count in parts if count <= times * stages) for times in (2, 8) if parts})


def reduced_memory_points(point: SweepPoint, samples: int) -> Iterator[SweepPoint]:
    """Yield ``point`` with less memory, the fastest first: recomputation, then smaller micro-batches too."""
    if point["strategy"] in PIPELINES:
        yield {**point, "options": {**point.get("options", {}), "recompute": "always"}}
        return
    yield {**point, "activation_checkpointing": True}
    for parts in divisors(samples)[1:] if samples else []:
        yield {**point, "micro_batches": parts}
        yield {**point, "micro_batches": parts, "activation_checkpointing": True}
