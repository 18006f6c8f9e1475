"""Tensor parallelism: the layers of a transformer block shared by ranks."""

from __future__ import annotations

from hpcbench.parallel.entry import Option, Strategy

STRATEGIES = {
    "tensor": Strategy(
        own_degree="tp_degree",
        runtime="hpcbench.worker.strategies.tensor:TensorParallel",
        description="transformer blocks split by heads and features (Megatron): column layers, then row layers",
        options={
            "sequence_parallel": Option(
                bool, False, "between split layers each rank keeps its own tokens: reduce_scatter and all_gather"
            ),
            "vocabulary_parallel": Option(
                bool, True, "embedding, output layer and loss are split by vocabulary; of language models alone"
            ),
        },
        limit="hpcbench.parallel.tensor:excluded",
        hybrid=("dp_degree",),
        cost="hpcbench.oracle.strategies.tensor:TensorCost",
    ),
}

ALIASES = {"data_tensor": "tensor"}
