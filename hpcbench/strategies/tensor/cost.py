"""Costs of tensor parallelism of transformers (Shoeybi et al. 2019; Korthikanti et al. 2022)."""

from __future__ import annotations

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.model_parallel import ModelParallelCost, RankCost
from hpcbench.predict.tensor_sizes import buffer_bytes
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.tensor.rank_cost import TensorParallelRank


class TensorCost(ModelParallelCost):
    """Layers of transformer blocks split over the ranks along ``tp``; the first has most heads, words and tokens."""

    def describe(self, spec: RunSpec, table: LayerTable, rank: int) -> RankCost:
        view = TensorParallelRank(spec, table, rank)
        sizes = [view.parameter_bytes(tensor.name, tensor.shape) for tensor in table.parameter_tensors]
        return RankCost(view.describe_rows(), sizes, view.reductions(sizes), sum(buffer_bytes(spec, table)))


COSTS = {
    "tensor": TensorCost,
}
"""The cost of each strategy."""
