"""Tensor parallelism of transformer blocks: registry entry, limits, and the division of heads and features."""

from __future__ import annotations

from functools import cache
from math import prod

from hpcbench.config.option import Option
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.layer_table import LayerTable, read_shipped_table
from hpcbench.strategies.mesh import even_ranges
from hpcbench.strategies.strategy_entry import HybridAlias, StrategyEntry
from hpcbench.workloads.datasets import DATASETS, sample_shape
from hpcbench.workloads.models import is_custom_model

TRANSFORMER_BLOCK_KIND = "TransformerBlock.other"
"""Kind of the row that every transformer block has in a table of layers."""


def head_feature_ranges(heads: int, head_width: int, ranks: int) -> list[range]:
    """The features of queries, keys and values that each rank computes: whole heads.

    >>> head_feature_ranges(4, 32, 3)
    [range(0, 64), range(64, 96), range(96, 128)]
    """
    return [range(part.start * head_width, part.stop * head_width) for part in even_ranges(heads, ranks)]


def tensor_exclusion(spec: RunSpec) -> str | None:
    """Return the reason why a run cannot be tensor-parallel. A user's own model is examined when it is built."""
    if spec.precision == "fp16":
        return f"{spec.strategy} with fp16 would need a loss scale that all ranks of a layer agree on: use bf16"
    if is_custom_model(spec.model):
        return None
    heads, kind, strides = _transformer_dims(spec.model, spec.dataset)
    if not heads:
        return f"{spec.strategy} splits transformer blocks, and {spec.model} has none: use filter, channel or spatial"
    if spec.tp_degree > heads:
        wrong = f"{spec.strategy} splits {spec.model} by its {heads} {kind}: tp_degree {spec.tp_degree}"
        return f"{wrong}, at most {heads} is right"
    if spec.options.get("sequence_parallel"):
        *_, tokens = shape = sample_shape(spec.dataset, spec.input_size)
        if DATASETS[spec.dataset].kind != "tokens":
            # Patches and the class token.
            tokens = prod(extent // stride for extent, stride in zip(shape[1:], strides, strict=True)) + 1
        if spec.tp_degree > tokens:
            return (
                f"{spec.strategy} with sequence_parallel gives every rank a token, and a sample has {tokens}: "
                f"tp_degree {spec.tp_degree}, at most {tokens} is right"
            )
    return None


@cache
def _transformer_dims(model: str, dataset: str) -> tuple[int, str, list[int]]:
    """Return the heads that can be divided (0 without a table), their kind, and the strides of patches if any.

    Where groups of heads share keys and values the groups are divided. Neither options nor the input's size change
    them.
    """
    table = read_shipped_table(model, dataset)
    rows = [] if table is None else table.layers
    attributes = [row.attributes for row in rows if "heads" in row.attributes]
    heads = min((attention.get("kv_heads", attention["heads"]) for attention in attributes), default=0)
    kind = "key-value heads" if any("kv_heads" in attention for attention in attributes) else "heads"
    strides = [row.attributes["stride"] for row in rows if row.kind == "Conv2d"]
    return heads, kind, strides[-1] if strides else []


def transformer_table_exclusion(spec: RunSpec, table: LayerTable) -> str | None:
    """The reason why a model without transformer blocks cannot be tensor-parallel, or ``None``."""
    if any(layer.kind == TRANSFORMER_BLOCK_KIND for layer in table.layers):
        return None
    return f"{spec.strategy} splits transformer blocks, and {spec.model} has none"


STRATEGIES = {
    "tensor": StrategyEntry(
        own_degree="tp_degree",
        description="transformer blocks split by heads and features (Megatron): column layers, then row layers",
        other_names=("tp",),
        represents="split_layers",
        options={
            "sequence_parallel": Option(
                False, "between split layers each rank keeps its own tokens: reduce_scatter and all_gather"
            ),
            "vocabulary_parallel": Option(
                True, "embedding, output layer and loss are split by vocabulary; of language models alone"
            ),
        },
        exclusion=tensor_exclusion,
        hybrid=("dp_degree",),
        table_exclusion=transformer_table_exclusion,
    )
}

ALIASES = {"data_tensor": HybridAlias("tensor")}
