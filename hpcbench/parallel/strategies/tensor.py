"""Tensor parallelism of transformer blocks: registry entry, limits, and the division of heads and features."""

from __future__ import annotations

from functools import cache
from math import prod

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.layer_table import LayerTable, read_shipped_table
from hpcbench.parallel.mesh import even_ranges
from hpcbench.parallel.strategy_entry import CalibrationRuns, HybridAlias, Option, PlotStyle, StrategyEntry
from hpcbench.parallel.workloads import DATASETS, is_custom_model, sample_shape

TRANSFORMER_BLOCK_KIND = "TransformerBlock.other"
"""Kind of the row that every transformer block has in a table of layers."""


def head_feature_ranges(heads: int, head_width: int, ranks: int) -> list[range]:
    """The features of queries, keys and values that each rank computes: whole heads.

    >>> head_ranges(4, 32, 3)
    [range(0, 64), range(64, 96), range(96, 128)]
    """
    return [range(one.start * head_width, one.stop * head_width) for one in even_ranges(heads, ranks)]


def tensor_exclusion(spec: RunSpec) -> str | None:
    """Why a run cannot be tensor-parallel, or ``None``. A user's own model is looked at when it is built."""
    if spec.precision == "fp16":
        return f"{spec.strategy} with fp16 would need a loss scale that all ranks of a layer agree on: use bf16"
    if spec.compile:
        return f"{spec.strategy} cannot be compiled: its collectives are not traced"
    if is_custom_model(spec.model):
        return None
    found = _transformer_dims(spec.model, spec.dataset)
    if found is None or not found.heads:
        return f"{spec.strategy} splits transformer blocks, and {spec.model} has none: use filter, channel or spatial"
    if spec.tp_degree > found.heads:
        return f"{spec.strategy} splits {spec.model} by its {found.heads} heads: tp_degree {spec.tp_degree}, " + (
            f"at most {found.heads} is right"
        )
    if spec.options.get("sequence_parallel") and spec.tp_degree > (tokens := found.tokens(spec)):
        return (
            f"{spec.strategy} with sequence_parallel gives every rank a token, and a sample has {tokens}: "
            f"tp_degree {spec.tp_degree}, at most {tokens} is right"
        )
    return None


class _TransformerDims:
    """What a table of layers tells of a shipped model; neither options nor the input's size change the heads."""

    def __init__(self, table: LayerTable) -> None:
        by_kind = {layer.kind: layer for layer in table.layers}
        self.heads = min(
            (layer.attributes["heads"] for layer in table.layers if "heads" in layer.attributes), default=0
        )
        self._stride: list[int] = by_kind["Conv2d"].attributes["stride"] if "PatchEmbedding.other" in by_kind else []

    def tokens(self, spec: RunSpec) -> int:
        """Of a sample: words, or patches and the class token."""
        shape = sample_shape(spec.dataset, spec.input_size)
        if DATASETS[spec.dataset].kind == "tokens":
            return shape[-1]
        return prod(extent // stride for extent, stride in zip(shape[1:], self._stride, strict=True)) + 1


@cache
def _transformer_dims(model: str, dataset: str) -> _TransformerDims | None:
    table = read_shipped_table(model, dataset)
    return None if table is None else _TransformerDims(table)


def transformer_table_exclusion(spec: RunSpec, table: LayerTable) -> str | None:
    """The reason why a model without transformer blocks cannot be tensor-parallel, or ``None``."""
    if any(layer.kind == TRANSFORMER_BLOCK_KIND for layer in table.layers):
        return None
    return f"{spec.strategy} splits transformer blocks, and {spec.model} has none"


STRATEGIES = {
    "tensor": StrategyEntry(
        own_degree="tp_degree",
        runtime="hpcbench.worker.strategies.tensor:TensorParallelStrategy",
        description="transformer blocks split by heads and features (Megatron): column layers, then row layers",
        options={
            "sequence_parallel": Option(
                bool, False, "between split layers each rank keeps its own tokens: reduce_scatter and all_gather"
            ),
            "vocabulary_parallel": Option(
                bool, True, "embedding, output layer and loss are split by vocabulary; of language models alone"
            ),
        },
        exclusion=tensor_exclusion,
        hybrid=("dp_degree",),
        cost="hpcbench.oracle.strategies.tensor:TensorCost",
        table_exclusion=transformer_table_exclusion,
        calibration=CalibrationRuns(),
        plot_style=PlotStyle("vermillion", "right", "short"),
    ),
}

ALIASES = {"data_tensor": HybridAlias("tensor")}
