"""The sweeps of the day, ordered by value: a day that is cut keeps the parts before the cut.

    launcher  the real launcher, NCCL with one rank        beside the next two, which are not timed
    kernels   every model family in every precision, verified against fp64; compiled models
    shared    every strategy on 2 and 4 ranks of the one device, verified; over gloo, without times
    singles   ten configurations whose step time and memory were predicted before
    probes    blocks of models, for a calibration that is made afterwards

Between ``singles`` and ``probes`` come two parts without a sweep: ``loops.py`` times hpcbench's training loop in turns
with other loops, and ``shards.py`` steps one real rank among ranks that do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcbench.config.sweep_file import settings_lines
from hpcbench.config.sweep_loader import Sweep, parse_sweep
from hpcbench.config.toml_tables import TomlSource
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.strategies.probes.entry import PROBE_BLOCKS
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point

Device = Literal["cuda", "cpu"]
Size = Literal["full", "small"]
Point = dict[str, Any]

SHARED_RANKS = 4
"""Most ranks that share the device."""


class Part(NamedTuple):
    """A sweep of the day."""

    name: str
    title: str
    points: list[Point]
    fixed: Point
    needs: tuple[str, ...] = ()
    """Parts of the machine without which its runs are left out: ``compiler``."""
    is_shared: bool = False
    """Whether ranks share the device."""

    @property
    def sweep_name(self) -> str:
        return f"gpu-day-{self.name}"


_HANGS_AFTER_MIN: dict[Size, float] = {"full": 0.75, "small": 5.0}
"""Time limit of a verified run: a GPU takes seconds, and one that hangs must leave the day to the others."""
_FAMILIES: dict[Size, list[Point]] = {
    "full": [
        {"model": "resnet18", "dataset": "cifar10"},
        {"model": "gpt", "dataset": "tokens"},
        {"model": "llama", "dataset": "tokens", "input_size": 128},
        {"model": "vit", "dataset": "cifar10"},
        {"model": "vgg11", "dataset": "cifar10"},
        {"model": "mobilenetv2", "dataset": "cifar10"},
        {"model": "cosmoflow", "dataset": "cosmoflow", "input_size": 32},
    ],
    "small": [
        {"model": "vit", "dataset": "cifar10", "input_size": 16},
        {"model": "gpt", "dataset": "tokens", "input_size": 8},
        {"model": "llama", "dataset": "tokens", "input_size": 8},
    ],
}
_PRECISIONS: dict[Size, list[str]] = {
    "full": ["fp32", "bf16", "tf32", "fp16", "bf16_params"],
    "small": ["fp32", "bf16_params"],
}
_BATCH: dict[Size, int] = {"full": 32, "small": 4}


def day_parts(size: Size, *, large_memory: bool) -> list[Part]:
    """Return the parts in their order.

    Args:
        size: ``small`` rehearses the day.
        large_memory: Whether the device has more memory than an H100.
    """
    return [
        Part("launcher", "the real launcher, one rank in a process group", _launcher_points(size), _verified(size)),
        Part("kernels", "model families and precisions", [*_kernel_points(size)], _verified(size)),
        Part(
            "shared", "strategies, ranks sharing the device", [*_shared_points(size)], _verified(size), is_shared=True
        ),
        Part("singles", "configurations with predictions", single_points(size, large_memory), _timed(size)),
        Part("probes", "blocks of models", _probe_points(size), _timed(size)),
        Part(
            "compiled",
            "torch.compile",
            [*_compiled_points(size)],
            {**_verified(size), "time_limit_min": 5},
            ("compiler",),
        ),
    ]


def part_sweep(part: Part) -> Sweep:
    """Return the sweep of a part, each point an ``[[include]]`` of its text."""
    data: dict[str, Any] = {"name": part.sweep_name, "description": part.title, "fixed": part.fixed}
    lines = [*settings_lines(data)]
    for point in part.points:
        lines += ["", "[[include]]", *settings_lines(point)]
    data["include"] = part.points
    return parse_sweep(data, TomlSource(Path(part.sweep_name), "\n".join([*lines, ""])))


def _verified(size: Size) -> Point:
    limit = {"time_limit_min": _HANGS_AFTER_MIN[size]}
    return {"warmup_steps": 2, "steps": 3, "profile_steps": 0, "verify": True, **limit}


def _timed(size: Size) -> Point:
    steps = {"warmup_steps": 3, "steps": 10} if size == "full" else {"warmup_steps": 1, "steps": 2}
    return {**steps, "profile_steps": 2, "time_limit_min": 3}


def _launcher_points(size: Size) -> list[Point]:
    return [{**_FAMILIES[size][0], "strategy": key, "batch_size": _BATCH[size]} for key in ("ddp", "fsdp", "zero1")]


def _kernel_points(size: Size) -> Iterator[Point]:
    batch = {"strategy": "single", "batch_size": _BATCH[size]}
    for precision in _PRECISIONS[size]:
        for family in _FAMILIES[size]:
            yield {**family, **batch, "precision": precision}
    yield {**_FAMILIES[size][0], **batch, "data": "host"}
    if size == "full":
        for family in _FAMILIES["full"]:
            if family["dataset"] != "tokens":
                yield {**family, **batch, "precision": "bf16", "channels_last": True}


def _compiled_points(size: Size) -> Iterator[Point]:
    # torch 2.11 compiles a wrong backward pass of attention in fp64 for a cpu, where ``verify`` would end.
    for family in _FAMILIES["full"] if size == "full" else _SHARED_MODELS["small"][1:]:
        yield {**family, "strategy": "single", "batch_size": _BATCH[size], "precision": "bf16", "compile": True}


_SHARED_MODELS: dict[Size, list[Point]] = {
    "full": [{"model": "resnet18", "dataset": "cifar10"}, {"model": "vit", "dataset": "cifar10"}],
    "small": [
        {"model": "vit", "dataset": "cifar10", "input_size": 16},
        {"model": "resnet18", "dataset": "cifar10", "input_size": 16},
    ],
}
"""The first that a strategy can split."""
_HYBRIDS: list[Point] = [
    {"strategy": "tensor", "tp_degree": 2, "dp_degree": 2},
    {"strategy": "1f1b", "pp_degree": 2, "dp_degree": 2, "micro_batches": 4},
    {"strategy": "interleaved_1f1b", "pp_degree": 2, "dp_degree": 2, "micro_batches": 4},
    {"strategy": "zero_bubble", "pp_degree": 2, "tp_degree": 2, "micro_batches": 4},
    {"strategy": "spatial", "sp_degree": 2, "dp_degree": 2},
    {"strategy": "filter", "tp_degree": 2, "dp_degree": 2},
    {"strategy": "channel", "tp_degree": 2, "dp_degree": 2},
    {"strategy": "fsdp", "options": {"shard_degree": 2}},
    {"strategy": "gpipe", "pp_degree": 4, "micro_batches": 4},
]


def _shared_points(size: Size) -> Iterator[Point]:
    """Every strategy that divides something on two ranks, then combinations and more ranks.

    A rehearsal has one strategy for each degree: tests run all of them on CPUs.
    """
    rehearsed = {entry.own_degree: key for key, entry in reversed(STRATEGIES.items())}
    for key, entry in STRATEGIES.items():
        if entry.own_degree is not None and (size == "full" or rehearsed[entry.own_degree] == key):
            ranks = {"devices_per_task" if entry.drives_several_devices else "tasks_per_node": 2}
            micro_batches = {"micro_batches": 4} if entry.pipeline.schedule is not None else {}
            yield _first_feasible(size, {"strategy": key, **ranks, **micro_batches})
    for point in _HYBRIDS if size == "full" else _HYBRIDS[:2]:
        yield _first_feasible(size, {**point, "tasks_per_node": SHARED_RANKS})


def _first_feasible(size: Size, point: Point) -> Point:
    limits = PartitionLimits("shared", devices_per_node=SHARED_RANKS)
    models = _SHARED_MODELS[size]
    if STRATEGIES[point["strategy"]].own_degree == "sp_degree":
        # Its limits are in the model's layers, not in the point: only a CNN has maps to cut.
        models = [model for model in models if model["model"] == "resnet18"]
    points = [{**model, **point, "batch_size": 2 * _BATCH["small"]} for model in models]
    feasible = (each for each in points if not isinstance(resolve_point(dict(each), limits), InfeasiblePoint))
    return next(feasible, points[0])


def single_points(size: Size, large_memory: bool) -> list[Point]:
    """Return the ten configurations of one device, from small to as large as its memory."""
    if size == "small":
        sizes: list[Point] = [
            {"model": "vit", "dataset": "cifar10"},
            {"model": "gpt", "dataset": "tokens", "input_size": 16},
        ]
        return [{"strategy": "single", "batch_size": 4, **point} for point in sizes]
    images: Point = {"dataset": "imagenet", "precision": "bf16", "strategy": "single"}
    tokens: Point = {"dataset": "tokens", "precision": "bf16", "strategy": "single", "optimizer": "adamw"}
    largest: Point = {"model": "llama_3b", "batch_size": 1}
    if not large_memory:
        largest |= {"activation_checkpointing": True, "precision": "bf16_params"}
    return [
        {"model": "resnet50", "batch_size": 64, "channels_last": True, **images},
        {"model": "gpt_125m", "batch_size": 8, **tokens},
        {"model": "llama_1b", "batch_size": 1, **tokens},
        {"model": "vit_b16", "batch_size": 64, **images},
        {"model": "resnet50", "batch_size": 256, "channels_last": True, **images},
        {"model": "gpt_350m", "batch_size": 8, **tokens},
        {"model": "vgg16", "batch_size": 64, **images},
        {"model": "gpt_1_3b", "batch_size": 4, **tokens},
        {"model": "llama_1b", "batch_size": 4, "activation_checkpointing": True, **tokens},
        {**tokens, **largest},
    ]


def _probe_points(size: Size) -> list[Point]:
    budget: Point = {"strategy": PROBE_BLOCKS, "options": {"budget_s": 5.0 if size == "full" else 1.0}}
    if size == "small":
        return [{**_FAMILIES["small"][0], "batch_size": 4, **budget}]
    return [
        {"model": "resnet50", "dataset": "imagenet", "batch_size": 64, "precision": "bf16", **budget},
        {"model": "vit_b16", "dataset": "imagenet", "batch_size": 64, "precision": "bf16", **budget},
        {
            "model": "gpt_350m",
            "dataset": "tokens",
            "batch_size": 8,
            "precision": "bf16",
            "optimizer": "adamw",
            **budget,
        },
    ]
