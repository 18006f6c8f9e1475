"""The data-parallel family, and the lone device that it is measured against."""

from __future__ import annotations

from hpcbench.parallel.entry import Option, Strategy

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
        cost="hpcbench.oracle.strategies.data:Single",
        description="one device, no parallelism: the reference of every speed-up",
    ),
    "ddp": Strategy(
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.ddp:Ddp",
        cost="hpcbench.oracle.strategies.data:Ddp",
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
        cost="hpcbench.oracle.strategies.data:Zero1",
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
        cost="hpcbench.oracle.strategies.sharded:Fsdp",
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
        cost="hpcbench.oracle.strategies.data:FairscaleOss",
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
        cost="hpcbench.oracle.strategies.data:FairscaleSddp",
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
        cost="hpcbench.oracle.strategies.sharded:FairscaleFsdp",
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
        rehearsable=False,
        own_degree="dp_degree",
        runtime="hpcbench.worker.strategies.horovod:Horovod",
        cost="hpcbench.oracle.strategies.data:Horovod",
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
