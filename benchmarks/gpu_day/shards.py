"""Shards whose memory the day measures: one rank of a larger world (``real_rank.py``)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from benchmarks.gpu_day.parts import Point, Size
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point


class ShardFigures(msgspec.Struct, kw_only=True):
    """A rank's memory in bytes and its launches in a step; ``error`` where it could not step."""

    spec: RunSpec
    rank: int
    seconds: float
    setup_peak_bytes: int | None = None
    peak_bytes: int | None = None
    """Of the allocator, over the steps after the first."""
    reserved_bytes: int | None = None
    launches: int | None = None
    """Kernels and copies of a step; ``None`` where the profiler records none."""
    host_syncs: int | None = None
    error: str | None = None


def shard_points(size: Size) -> list[tuple[Point, int]]:
    """Return the runs with the rank of each, the cheapest last."""
    if size == "small":
        small: Point = {"model": "gpt", "dataset": "tokens", "input_size": 8, "batch_size": 4, "optimizer": "adamw"}
        large, middle = small, small
    else:
        tokens: Point = {"dataset": "tokens", "precision": "bf16", "optimizer": "adamw"}
        large = {"model": "llama_1b", "batch_size": 1, **tokens}
        middle = {"model": "gpt_1_3b", "batch_size": 8, **tokens}
    return [
        ({**large, "strategy": "fsdp", "tasks_per_node": 8}, 0),
        ({**middle, "strategy": "1f1b", "tasks_per_node": 4, "micro_batches": 4}, 0),
        ({**middle, "strategy": "tensor", "tasks_per_node": 4}, 0),
        ({**middle, "strategy": "zero1", "tasks_per_node": 8}, 0),
    ]


def shard_specs(size: Size) -> Iterator[tuple[RunSpec, int]]:
    """Return ``shard_points`` as runs."""
    for point, rank in shard_points(size):
        spec = resolve_point(point, PartitionLimits("shards"))
        assert not isinstance(spec, InfeasiblePoint), spec
        yield spec, rank
