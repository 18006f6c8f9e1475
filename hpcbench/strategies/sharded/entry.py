"""Sharded data parallelism by torch: ZeroRedundancyOptimizer and fully_shard."""

from __future__ import annotations

from hpcbench.config.option import Option
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.data.entry import (
    BF16_COMPRESSION_TOLERANCE,
    BUCKET_OPTIONS,
    NO_MASTER_WEIGHTS,
    RESHARD_OPTION,
    data_parallel_entry,
    fp16_exclusion,
)
from hpcbench.strategies.strategy_entry import refuse_bf16_params


def fsdp_exclusion(spec: RunSpec) -> str | None:
    """A mesh needs whole rows."""
    degree = spec.options.get("shard_degree", 0)
    if not isinstance(degree, int) or degree < 0 or (degree and spec.dp_degree % degree):
        return (
            f"fsdp with shard_degree {degree}: {spec.dp_degree} replicas cannot be shared evenly by groups of as many"
        )
    if spec.precision == "bf16_params" and spec.options.get("mixed_precision"):
        return "fsdp with mixed_precision and bf16_params: shards are fp32 and gathered in bf16 with either, choose one"
    return fp16_exclusion(spec)


STRATEGIES = {
    "zero1": data_parallel_entry(
        exclusion=refuse_bf16_params(NO_MASTER_WEIGHTS),
        description="torch ZeroRedundancyOptimizer over DDP: optimizer state sharded (ZeRO-1)",
        represents="sharded_optimizer",
        options={
            **BUCKET_OPTIONS,
            "parameters_as_bucket_view": Option(False, "parameters are views of the buckets they are sent in"),
        },
    ),
    "fsdp": data_parallel_entry(
        description="torch fully_shard: parameters, gradients and optimizer state sharded (ZeRO-3)",
        other_names=("zero2", "zero3", "deepspeed", "fsdp2"),
        represents="sharded_parameters",
        options={
            "reshard_after_forward": RESHARD_OPTION,
            "mixed_precision": Option(
                False,
                "parameters are used in bf16, gradients reduced in fp32",
                lossy={True: BF16_COMPRESSION_TOLERANCE},
            ),
            "shard_degree": Option(0, "ranks that hold one copy together, 0 for all: hybrid sharding"),
        },
        exclusion=fsdp_exclusion,
    ),
}
