"""Costs of tensor parallelism of transformers (Shoeybi et al. 2019; Korthikanti et al. 2022)."""

from __future__ import annotations

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.peak_memory import (
    MemoryBreakdown,
    PersistentMemory,
    bucket_bytes_in_flight,
    gradient_rows,
    peak_memory,
)
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.oracle.tensor_rank import TensorParallelRank, tensor_step
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.traffic import Traffic, merge_calls


class TensorCost:
    """Exact traffic, and the parts of memory that are largest at different moments of a step."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Collectives of the forward and backward passes, micro-batch by micro-batch, and the gradients' buckets."""
        model = TensorParallelRank(spec, table, rank)
        calls = list(model.activations_sent()) * spec.micro_batches if model.ranks > 1 else []
        return merge_calls([*calls, *model.gradients_sent()])

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Parts of what is split, all of the rest, at the moment at which they are most."""
        model = TensorParallelRank(spec, table, rank)
        sizes = [model.parameter_bytes(name, shape) for name, shape, _ in table.parameter_tensors]
        kept = PersistentMemory(sum(sizes), sizes, gradient_rows(spec, table), sizes)
        underway = [0] * len(table.layers)
        for is_sent in model.sent_gradients():
            for row, size in enumerate(
                bucket_bytes_in_flight(table, [size * sent for size, sent in zip(sizes, is_sent, strict=True)])
            ):
                underway[row] += size
        return peak_memory(spec, table, kept, underway, model.backward_rows())

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """The first rank has most heads, features, words and tokens."""
        return tensor_step(clock, TensorParallelRank(spec, table, 0))


def kept_activation_bytes(spec: RunSpec, table: LayerTable, rank: int) -> int:
    """What is kept from the forward pass of a micro-batch when its backward pass begins, without recomputation."""
    return sum(row.kept for row in TensorParallelRank(spec, table, rank).backward_rows())
