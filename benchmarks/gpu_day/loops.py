"""Configurations of one device whose training loop the day compares with others (``training_loops.py``)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from benchmarks.gpu_day.parts import Point, Size
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point


class LoopTime(msgspec.Struct, kw_only=True):
    """Seconds of a training step by one loop, the median of blocks of steps that alternated with those of others."""

    loop: str
    """``hpcbench``: the tool's own step; ``plain``: a hand-written one; ``timm``: one in the style of timm's script."""
    model: str
    """The library whose model it trains, with its version."""
    seconds: float
    spread: float
    repeats: int


class LoopFigures(msgspec.Struct, kw_only=True):
    """The loops of one configuration; ``error`` where they could not be timed."""

    spec: RunSpec
    loops: list[LoopTime] = []
    error: str | None = None


def loop_points(size: Size) -> list[Point]:
    """Return the configurations: plain sgd, no losses scaled, a batch as it is, as all loops train."""
    if size == "small":
        return [{"model": "vit", "dataset": "cifar10", "input_size": 16, "batch_size": 4}]
    return [
        {"model": "resnet50", "dataset": "imagenet", "batch_size": 64, "channels_last": True, "precision": "bf16"},
        {"model": "llama_1b", "dataset": "tokens", "input_size": 2048, "batch_size": 1, "precision": "bf16"},
    ]


def loop_budget_s(size: Size) -> float:
    """Return the seconds that the loops of one configuration may take, about."""
    return 1.0 if size == "small" else 10.0


def loop_specs(size: Size) -> Iterator[RunSpec]:
    """Return ``loop_points`` as runs."""
    for point in loop_points(size):
        spec = resolve_point({**point, "strategy": "single"}, PartitionLimits("loops"))
        assert not isinstance(spec, InfeasiblePoint), spec
        yield spec
