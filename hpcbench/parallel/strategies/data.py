"""The data-parallel family and the single device that it is compared with: registry entries and limits."""

from __future__ import annotations

from functools import partial

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.gradient_buckets import DEFAULT_BUCKET_CAP_MB
from hpcbench.parallel.strategy_entry import CalibrationRuns, Option, PlotStyle, StrategyEntry

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


def fsdp_exclusion(spec: RunSpec) -> str | None:
    """A mesh needs whole rows."""
    degree = spec.options.get("shard_degree", 0)
    if not isinstance(degree, int) or degree < 0 or (degree and spec.dp_degree % degree):
        return (
            f"fsdp with shard_degree {degree}: {spec.dp_degree} replicas cannot be shared evenly by groups of as many"
        )
    if spec.precision == "bf16_params" and spec.options.get("mixed_precision"):
        return "fsdp with mixed_precision and bf16_params: shards are fp32 and gathered in bf16 with either, choose one"
    return _fp16_exclusion(spec)


def fairscale_sddp_exclusion(spec: RunSpec) -> str | None:
    """Its buckets ignore reduce_fp16 without a word."""
    buffer_mb = spec.options.get("reduce_buffer_mb", 32.0)
    if spec.options.get("reduce_fp16") and buffer_mb:
        return f"fairscale_sddp reduces in fp16 without buckets only: reduce_buffer_mb {buffer_mb:g}, 0 is right"
    return _fp16_exclusion(spec)


def fairscale_fsdp_exclusion(spec: RunSpec) -> str | None:
    """It takes fp32 parameters only, and expects each of its blocks to run forward once per backward pass."""
    if spec.precision == "fp64":
        return "fairscale_fsdp takes fp32 parameters: precision fp64 is beyond it"
    if spec.activation_checkpointing:
        return "fairscale_fsdp cannot compute a sharded block again in the backward pass: use fsdp"
    if spec.compile:
        return "fairscale_fsdp opens CUDA streams that torch.compile cannot trace: use fsdp"
    return _fp16_exclusion(spec)


def _fp16_exclusion(spec: RunSpec) -> str | None:
    if spec.precision == "fp16":
        return f"{spec.strategy} with fp16 would need a loss scale that all shards agree on: use bf16"
    return None


_BUCKET_OPTIONS = {
    "bucket_cap_mb": Option(DEFAULT_BUCKET_CAP_MB, "size of a gradient bucket in MiB"),
    "gradient_as_bucket_view": Option(False, "gradients are views of the buckets"),
}
_RESHARD_OPTION = Option(True, "a block's parameters are let go between forward and backward")

_NO_MASTER_WEIGHTS = "its sharded optimizer has no fp32 master weights of bf16 parameters"

_data_parallel_entry = partial(StrategyEntry, own_degree="dp_degree", calibration=CalibrationRuns(), library="torch")

STRATEGIES = {
    "single": StrategyEntry(
        own_degree=None,
        eager_steps_before_graph=3,
        runtime="hpcbench.worker.strategies.base:SingleStrategy",
        cost="hpcbench.oracle.strategies.data:SingleCost",
        description="one device, no parallelism: the reference of every speed-up",
        represents="single_device",
        plot_style=PlotStyle("black", "star", "solid"),
    ),
    "ddp": _data_parallel_entry(
        alike_replicas=True,
        eager_steps_before_graph=11,
        runtime="hpcbench.worker.strategies.data:DdpStrategy",
        cost="hpcbench.oracle.strategies.data:DdpCost",
        description="torch DistributedDataParallel: replicas, gradients all_reduced in buckets",
        other_names=("dp", "data_parallel"),
        represents="replicas",
        options={
            **_BUCKET_OPTIONS,
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
        plot_style=PlotStyle("blue", "circle", "solid"),
    ),
    "zero1": _data_parallel_entry(
        runtime="hpcbench.worker.strategies.data:Zero1Strategy",
        cost="hpcbench.oracle.strategies.data:Zero1Cost",
        without_bf16_params=_NO_MASTER_WEIGHTS,
        description="torch ZeroRedundancyOptimizer over DDP: optimizer state sharded (ZeRO-1)",
        represents="sharded_optimizer",
        options={
            **_BUCKET_OPTIONS,
            "parameters_as_bucket_view": Option(False, "parameters are views of the buckets they are sent in"),
        },
        owners_largest_first=True,
        plot_style=PlotStyle("green", "up", "long"),
    ),
    "fsdp": _data_parallel_entry(
        runtime="hpcbench.worker.strategies.fsdp:FsdpStrategy",
        cost="hpcbench.oracle.strategies.sharded:FsdpCost",
        description="torch fully_shard: parameters, gradients and optimizer state sharded (ZeRO-3)",
        other_names=("zero2", "zero3", "deepspeed", "fsdp2"),
        represents="sharded_parameters",
        options={
            "reshard_after_forward": _RESHARD_OPTION,
            "mixed_precision": Option(
                False,
                "parameters are used in bf16, gradients reduced in fp32",
                lossy={True: BF16_COMPRESSION_TOLERANCE},
            ),
            "shard_degree": Option(0, "ranks that hold one copy together, 0 for all: hybrid sharding"),
        },
        exclusion=fsdp_exclusion,
        plot_style=PlotStyle("purple", "diamond", "dash-dot"),
    ),
    "fairscale_oss": _data_parallel_entry(
        library="fairscale",
        runtime="hpcbench.worker.strategies.data:FairscaleOssStrategy",
        cost="hpcbench.oracle.strategies.data:FairscaleOssCost",
        without_bf16_params=_NO_MASTER_WEIGHTS,
        description="fairscale OSS over DDP: optimizer state sharded (ZeRO-1)",
        options={
            **_BUCKET_OPTIONS,
            "broadcast_fp16": Option(
                False, "updated parameters are sent in fp16: lossy", lossy={True: FP16_COMPRESSION_TOLERANCE}
            ),
        },
        plot_style=PlotStyle("orange", "down", "dots"),
    ),
    "fairscale_sddp": _data_parallel_entry(
        library="fairscale",
        runtime="hpcbench.worker.strategies.data:FairscaleSddpStrategy",
        cost="hpcbench.oracle.strategies.data:FairscaleSddpCost",
        without_bf16_params=_NO_MASTER_WEIGHTS,
        description="fairscale ShardedDataParallel: optimizer state and gradients sharded (ZeRO-2)",
        options={
            "reduce_buffer_mb": Option(32.0, "size of a gradient bucket in MiB, 0 for none"),
            "reduce_fp16": Option(
                False, "gradients are reduced in fp16, without buckets: lossy", lossy={True: FP16_COMPRESSION_TOLERANCE}
            ),
        },
        exclusion=fairscale_sddp_exclusion,
        plot_style=PlotStyle("sky", "left", "short"),
    ),
    "fairscale_fsdp": _data_parallel_entry(
        library="fairscale",
        runtime="hpcbench.worker.strategies.data:FairscaleFsdpStrategy",
        cost="hpcbench.oracle.strategies.sharded:FairscaleFsdpCost",
        without_bf16_params=_NO_MASTER_WEIGHTS,
        description="fairscale FullyShardedDataParallel: everything sharded (ZeRO-3)",
        options={
            "reshard_after_forward": _RESHARD_OPTION,
            "flatten_parameters": Option(True, "the parameters of a block are one tensor"),
            "bucket_cap_mb": Option(0, "size of a gradient bucket in MiB; on a cpu only 0, which is none"),
        },
        exclusion=fairscale_fsdp_exclusion,
        widest="fp32",
        plot_style=PlotStyle("black", "diamond", "short"),
    ),
    "horovod": _data_parallel_entry(
        library="horovod",
        alike_replicas=True,
        runtime="hpcbench.worker.strategies.horovod:HorovodStrategy",
        cost="hpcbench.oracle.strategies.data:HorovodCost",
        without_bf16_params="Horovod's optimizer reduces the gradients of the tensors that it updates: fp32 masters",
        description="Horovod: replicas, gradients fused and all_reduced by a background thread",
        options={
            "fusion_threshold_mb": Option(128.0, "gradients are fused up to this many MiB; 0 fuses none"),
            "cycle_time_ms": Option(1.0, "how often the background thread looks for gradients"),
            "compression": Option("none", "of gradients in messages; fp16 is lossy", ("none", "fp16")),
            "op": Option("average", "how gradients are combined; adasum is lossy", ("average", "adasum")),
            "controller": Option("gloo", "who coordinates and carries data between CPUs", ("gloo", "mpi")),
            "hierarchical_allreduce": Option(False, "reduce inside each node first; needs NCCL"),
            "lr_scaling": Option(False, "learning_rate times dp_degree"),
            "lr_warmup_epochs": Option(0.0, "epochs in which the scaled rate is reached from learning_rate"),
        },
        calibration=CalibrationRuns(cpu_options={"cycle_time_ms": 10}),
        exact_traffic=False,
        library_facts="hpcbench.worker.strategies.horovod:horovod_facts",
        plot_style=PlotStyle("vermillion", "square", "short"),
    ),
}
