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

from hpcbench.config.spec import RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.parallel.own_model import is_own


class Option(NamedTuple):
    """One entry of a strategy's or a model's own ``options``."""

    kind: type
    default: Any
    description: str
    choices: tuple[Any, ...] = ()
    lossy: Mapping[Any, float] = MappingProxyType({})
    """Values with which gradients are not exact, and the largest difference that each may make under ``verify``."""


class Strategy(NamedTuple):
    """``own_degree`` takes what the world leaves when no degree is given; ``None`` is a lone device."""

    own_degree: str | None
    runtime: str
    description: str
    options: Mapping[str, Option] = MappingProxyType({})
    reference: str = "data_parallel"
    """One of ``REFERENCES``: what a run of it must compute."""
    lossy: float | None = None
    """As ``Option.lossy``, where the strategy is inexact whatever its options."""
    widest: str = "fp64"
    """The most exact arithmetic that it can be verified in."""
    limit: str | None = None
    """``module:function``: what excludes a run (a ``RunSpec``) for this strategy in particular, or ``None``."""


REFERENCES = {"data_parallel": "hpcbench.worker.reference:train_reference"}
"""Trainings in one process that strategies are compared with, by name."""

FP16_SENT = 2.0**-8
"""Of gradients or weights rounded to fp16 on their way: eight unit roundoffs, for a sum over replicas."""
BF16_SENT = 2.0**-4
"""As bf16 arithmetic itself, see ``bounds.ONE_STEP``."""
UNCOMPRESSED_YET = 1e-2
"""PowerSGD approximates without a bound, but not before its third step, and one step is compared."""

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
            "compression": Option(
                str,
                "none",
                "of gradients on their way: lossy",
                ("none", "fp16", "bf16", "powersgd"),
                lossy={"fp16": FP16_SENT, "bf16": BF16_SENT, "powersgd": UNCOMPRESSED_YET},
            ),
            "powersgd_rank": Option(int, 2, "rank of PowerSGD's factors"),
        },
        limit="hpcbench.parallel.limits:ddp",
    ),
    "zero1": Strategy(
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.zero1:Zero1",
        description="torch ZeroRedundancyOptimizer over DDP: optimizer state sharded (ZeRO-1)",
        options={
            "bucket_cap_mb": Option(float, 25.0, "size of a gradient bucket in MiB"),
            "gradient_as_bucket_view": Option(bool, False, "gradients are views of the buckets"),
            "parameters_as_bucket_view": Option(bool, False, "parameters are views of the buckets they are sent in"),
        },
    ),
    "fsdp": Strategy(
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.fsdp:Fsdp",
        description="torch fully_shard: parameters, gradients and optimizer state sharded (ZeRO-3)",
        options={
            "reshard_after_forward": Option(bool, True, "a block's parameters are let go between forward and backward"),
            "mixed_precision": Option(
                bool, False, "parameters are used in bf16, gradients reduced in fp32", lossy={True: BF16_SENT}
            ),
            "shard_degree": Option(int, 0, "ranks that hold one copy together, 0 for all: hybrid sharding"),
        },
        limit="hpcbench.parallel.limits:fsdp",
    ),
    "fairscale_oss": Strategy(
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.fairscale:FairscaleOss",
        description="fairscale OSS over DDP: optimizer state sharded (ZeRO-1)",
        options={
            "bucket_cap_mb": Option(float, 25.0, "size of a gradient bucket in MiB"),
            "gradient_as_bucket_view": Option(bool, False, "gradients are views of the buckets"),
            "broadcast_fp16": Option(
                bool, False, "updated parameters are sent in fp16: lossy", lossy={True: FP16_SENT}
            ),
        },
    ),
    "fairscale_sddp": Strategy(
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.fairscale:FairscaleSddp",
        description="fairscale ShardedDataParallel: optimizer state and gradients sharded (ZeRO-2)",
        options={
            "reduce_buffer_mb": Option(float, 32.0, "size of a gradient bucket in MiB, 0 for none"),
            "reduce_fp16": Option(
                bool, False, "gradients are reduced in fp16, without buckets: lossy", lossy={True: FP16_SENT}
            ),
        },
        limit="hpcbench.parallel.limits:fairscale_sddp",
    ),
    "fairscale_fsdp": Strategy(
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.fairscale_fsdp:FairscaleFsdp",
        description="fairscale FullyShardedDataParallel: everything sharded (ZeRO-3)",
        options={
            "reshard_after_forward": Option(bool, True, "a block's parameters are let go between forward and backward"),
            "flatten_parameters": Option(bool, True, "the parameters of a block are one tensor"),
            "bucket_cap_mb": Option(int, 0, "size of a gradient bucket in MiB; on a cpu only 0, which is none"),
        },
        limit="hpcbench.parallel.limits:fairscale_fsdp",
        widest="fp32",
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
    kind: str | None
    """The kind of data set that it takes: ``images``, ``volumes`` or ``tokens``; ``None`` is left to the model."""
    min_size: int
    description: str
    options: dict[str, Option]
    own: bool = False
    """A user's own, which alone knows its options."""


def strategy(key: str) -> Strategy:
    """The entry of ``key``; ``ConfigError`` with the nearest key where there is none."""
    if key not in STRATEGIES:
        raise ConfigError(f"unknown strategy {key!r}", hint=did_you_mean(key, STRATEGIES))
    return STRATEGIES[key]


def excluded_by(spec: RunSpec) -> str | None:
    """Why the run's strategy cannot do what it asks for, as far as integers and names tell."""
    named = strategy(spec.strategy).limit
    if named is None:
        return None
    reason: str | None = _resolve(named)(spec)
    return reason


def resolve_runtime(key: str) -> Any:
    """The runtime class of a strategy. Imports torch: for the worker alone."""
    return _resolve(strategy(key).runtime)


def resolve_reference(key: str) -> Any:
    """The function that trains a strategy's reference (``worker.reference.train_reference``). For the worker alone."""
    return _resolve(REFERENCES[strategy(key).reference])


def _resolve(named: str) -> Any:
    module, _, name = named.partition(":")
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
    """The entry of ``key``, also of a user's own; ``ConfigError`` with the nearest name where there is none."""
    if is_own(key):
        return Model(key, None, 1, "a user's own model", {}, own=True)
    if key not in models():
        raise ConfigError(f"unknown model {key!r}", hint=did_you_mean(key, models()))
    return models()[key]
