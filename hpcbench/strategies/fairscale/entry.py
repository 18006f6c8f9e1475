"""fairscale's sharded data parallelism."""

from __future__ import annotations

from hpcbench.config.option import Option
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.data.entry import (
    BUCKET_OPTIONS,
    FP16_COMPRESSION_TOLERANCE,
    NO_MASTER_WEIGHTS,
    RESHARD_OPTION,
    data_parallel_entry,
    fp16_exclusion,
)
from hpcbench.strategies.strategy_entry import Library, refuse_bf16_params


def fairscale_sddp_exclusion(spec: RunSpec) -> str | None:
    """Its buckets ignore reduce_fp16 without a word."""
    buffer_mb = spec.options.get("reduce_buffer_mb", 32.0)
    if spec.options.get("reduce_fp16") and buffer_mb:
        return f"fairscale_sddp reduces in fp16 without buckets only: reduce_buffer_mb {buffer_mb:g}, 0 is right"
    return fp16_exclusion(spec)


def fairscale_fsdp_exclusion(spec: RunSpec) -> str | None:
    """It takes fp32 parameters only, and expects each of its blocks to run forward once per backward pass."""
    if spec.precision == "fp64":
        return "fairscale_fsdp takes fp32 parameters: precision fp64 is beyond it"
    if spec.activation_checkpointing:
        return "fairscale_fsdp cannot compute a sharded block again in the backward pass: use fsdp"
    if spec.compile:
        return "fairscale_fsdp opens CUDA streams that torch.compile cannot trace: use fsdp"
    return fp16_exclusion(spec)


STRATEGIES = {
    "fairscale_oss": data_parallel_entry(
        library=Library("fairscale"),
        exclusion=refuse_bf16_params(NO_MASTER_WEIGHTS),
        description="fairscale OSS over DDP: optimizer state sharded (ZeRO-1)",
        options={
            **BUCKET_OPTIONS,
            "broadcast_fp16": Option(
                False, "updated parameters are sent in fp16: lossy", lossy={True: FP16_COMPRESSION_TOLERANCE}
            ),
        },
    ),
    "fairscale_sddp": data_parallel_entry(
        library=Library("fairscale"),
        description="fairscale ShardedDataParallel: optimizer state and gradients sharded (ZeRO-2)",
        options={
            "reduce_buffer_mb": Option(32.0, "size of a gradient bucket in MiB, 0 for none"),
            "reduce_fp16": Option(
                False, "gradients are reduced in fp16, without buckets: lossy", lossy={True: FP16_COMPRESSION_TOLERANCE}
            ),
        },
        exclusion=refuse_bf16_params(NO_MASTER_WEIGHTS, fairscale_sddp_exclusion),
    ),
    "fairscale_fsdp": data_parallel_entry(
        library=Library("fairscale"),
        description="fairscale FullyShardedDataParallel: everything sharded (ZeRO-3)",
        options={
            "reshard_after_forward": RESHARD_OPTION,
            "flatten_parameters": Option(True, "the parameters of a block are one tensor"),
            "bucket_cap_mb": Option(0, "size of a gradient bucket in MiB; on a cpu only 0, which is none"),
        },
        exclusion=refuse_bf16_params(NO_MASTER_WEIGHTS, fairscale_fsdp_exclusion),
    ),
}
