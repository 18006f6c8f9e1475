"""Horovod."""

from __future__ import annotations

from hpcbench.config.option import Option
from hpcbench.strategies.data.entry import (
    data_parallel_entry,
)
from hpcbench.strategies.strategy_entry import Library, refuse_bf16_params

STRATEGIES = {
    "horovod": data_parallel_entry(
        library=Library("horovod", cpu_options={"cycle_time_ms": 10}),
        exclusion=refuse_bf16_params(
            "Horovod's optimizer reduces the gradients of the tensors that it updates: fp32 masters"
        ),
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
    ),
}
