"""The one registry: what each strategy is called, which degrees it takes, who runs it, and which models there are.

Runtimes are named in strings and imported on use, so that a login node reads this without torch.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hpcbench.errors import ConfigError, did_you_mean


class Option(NamedTuple):
    """One entry of a strategy's or a model's own ``options``."""

    kind: type
    default: Any
    description: str
    choices: tuple[Any, ...] = ()


class Strategy(NamedTuple):
    """``own_degree`` takes what the world leaves when no degree is given; ``None`` is a lone device."""

    own_degree: str | None
    runtime: str
    description: str
    options: Mapping[str, Option] = MappingProxyType({})


STRATEGIES = {
    "single": Strategy(
        own_degree=None,
        runtime="hpcbench.worker.strategies.single:Single",
        description="one device, no parallelism: the reference of every speed-up",
    ),
    "ddp": Strategy(
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.ddp:Ddp",
        description="torch DistributedDataParallel: replicas, gradients all_reduced in buckets",
        options={
            "bucket_cap_mb": Option(float, 25.0, "size of a gradient bucket in MiB"),
            "gradient_as_bucket_view": Option(bool, False, "gradients are views of the buckets"),
            "static_graph": Option(bool, False, "the graph is the same in every step"),
        },
    ),
    "horovod": Strategy(
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.horovod:Horovod",
        description="Horovod: replicas, gradients fused and all_reduced by a background thread",
        options={
            "fusion_threshold_mb": Option(float, 128.0, "gradients are fused up to this many MiB; 0 fuses none"),
            "cycle_time_ms": Option(float, 1.0, "how often the background thread looks for gradients"),
            "compression": Option(str, "none", "of gradients on their way; fp16 is lossy", ("none", "fp16")),
            "op": Option(str, "average", "how gradients are combined; adasum is lossy", ("average", "adasum")),
            "controller": Option(str, "gloo", "who coordinates and carries data between CPUs", ("gloo", "mpi")),
            "hierarchical_allreduce": Option(bool, False, "reduce inside each node first; needs NCCL"),
            "lr_scaling": Option(bool, False, "learning_rate times dp_degree"),
            "lr_warmup_epochs": Option(float, 0.0, "epochs in which the scaled rate is reached from learning_rate"),
        },
    ),
}


class Model(NamedTuple):
    """``builder`` is ``module:function``; ``min_size`` is the smallest edge length that it takes."""

    builder: str
    kind: str
    """The kind of data set that it takes: ``images``, ``volumes`` or ``tokens``."""
    min_size: int
    description: str
    options: dict[str, Option]


def strategy(key: str) -> Strategy:
    """The entry of ``key``; ``ConfigError`` with the nearest key where there is none."""
    if key not in STRATEGIES:
        raise ConfigError(f"unknown strategy {key!r}", hint=did_you_mean(key, STRATEGIES))
    return STRATEGIES[key]


def resolve_runtime(key: str) -> Any:
    """The runtime class of a strategy. Imports torch: for the worker alone."""
    module, _, name = strategy(key).runtime.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def models() -> dict[str, Model]:
    """Every shipped model, read from the literal ``MODELS`` tables of the model files without importing them."""
    folder = Path(__file__).resolve().parent.parent / "worker" / "models"
    found: dict[str, Model] = {}
    for path in sorted(folder.glob("*.py")):
        for name, entry in _models_table(path).items():
            options = {
                key: Option(_KINDS[kind], default, description)
                for key, (kind, default, description) in entry.get("options", {}).items()
            }
            builder = f"hpcbench.worker.models.{path.stem}:{entry['builder']}"
            found[name] = Model(builder, entry["kind"], entry["min_size"], entry["description"], options)
    return found


_KINDS = {"bool": bool, "int": int, "float": float, "str": str}


def _models_table(path: Path) -> dict[str, Any]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == ["MODELS"]:
            table: dict[str, Any] = ast.literal_eval(node.value)
            return table
    return {}


def model(key: str) -> Model:
    """The entry of ``key``; ``ConfigError`` with the nearest name where there is none."""
    if key not in models():
        raise ConfigError(f"unknown model {key!r}", hint=did_you_mean(key, models()))
    return models()[key]
