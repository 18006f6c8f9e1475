"""The data-parallel family and the single device that it is compared with: registry entries and limits."""

from __future__ import annotations

from functools import partial

from hpcbench.config.option import Option
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.gradient_buckets import DEFAULT_BUCKET_CAP_MB
from hpcbench.strategies.strategy_entry import Library, StrategyEntry

FP16_COMPRESSION_TOLERANCE = 2.0**-8
"""Tolerance of gradients or weights that are sent in fp16: eight unit roundoffs, for a sum over replicas."""
BF16_COMPRESSION_TOLERANCE = 2.0**-4
"""Tolerance of gradients that are sent in bf16: sixteen unit roundoffs."""
POWERSGD_FIRST_STEP_TOLERANCE = 1e-2
"""PowerSGD approximates without a bound, but not before its third step, and one step is compared."""


def ddp_exclusion(spec: RunSpec) -> str | None:
    """torch's reducer fails in the first backward pass without synchronisation."""
    if spec.precision == "bf16_params" and (kind := spec.options.get("compression", "none")) != "none":
        return f"ddp with compression {kind}: gradients of bf16_params are bf16 already, none is right"
    if spec.options.get("static_graph") and spec.micro_batches > 1:
        return f"ddp with static_graph cannot accumulate gradients: micro_batches {spec.micro_batches}, 1 is right"
    return None


def fp16_exclusion(spec: RunSpec) -> str | None:
    if spec.precision == "fp16":
        return f"{spec.strategy} with fp16 would need a loss scale that all shards agree on: use bf16"
    return None


BUCKET_OPTIONS = {
    "bucket_cap_mb": Option(DEFAULT_BUCKET_CAP_MB, "size of a gradient bucket in MiB"),
    "gradient_as_bucket_view": Option(False, "gradients are views of the buckets"),
}
RESHARD_OPTION = Option(True, "a block's parameters are let go between forward and backward")

NO_MASTER_WEIGHTS = "its sharded optimizer has no fp32 master weights of bf16 parameters"

data_parallel_entry = partial(StrategyEntry, own_degree="dp_degree", library=Library("torch"))

STRATEGIES = {
    "single": StrategyEntry(
        own_degree=None,
        description="one device, no parallelism: the reference of every speed-up",
        represents="single_device",
    ),
    "ddp": data_parallel_entry(
        description="torch DistributedDataParallel: replicas, gradients all_reduced in buckets",
        other_names=("dp", "data_parallel"),
        represents="replicas",
        options={
            **BUCKET_OPTIONS,
            "static_graph": Option(False, "the graph is the same in every step"),
            "compression": Option(
                "none",
                "of gradients in messages: lossy",
                ("none", "fp16", "bf16", "powersgd"),
                lossy={
                    "fp16": FP16_COMPRESSION_TOLERANCE,
                    "bf16": BF16_COMPRESSION_TOLERANCE,
                    "powersgd": POWERSGD_FIRST_STEP_TOLERANCE,
                },
            ),
            "powersgd_rank": Option(2, "rank of PowerSGD's factors"),
        },
        exclusion=ddp_exclusion,
    ),
}
