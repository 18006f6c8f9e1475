"""Tensor parallelism in integers: who takes which heads, features, words and tokens, and what excludes a run."""

from __future__ import annotations

from functools import cache
from math import prod

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.datasets import DATASETS, input_shape
from hpcbench.parallel.layers import LayerTable, read_table
from hpcbench.parallel.own_model import is_own
from hpcbench.parallel.shard import even_ranges

BLOCK = "TransformerBlock.other"
"""Kind of the row that every transformer block has in a table of layers."""


def head_ranges(heads: int, head_width: int, ranks: int) -> list[range]:
    """The features of queries, keys and values that each rank computes: whole heads.

    >>> head_ranges(4, 32, 3)
    [range(0, 64), range(64, 96), range(96, 128)]
    """
    return [range(one.start * head_width, one.stop * head_width) for one in even_ranges(heads, ranks)]


def excluded(spec: RunSpec) -> str | None:
    """Why a run cannot be tensor-parallel, or ``None``. A user's own model is looked at when it is built."""
    if spec.precision == "fp16":
        return f"{spec.strategy} with fp16 would need a loss scale that all ranks of a layer agree on: use bf16"
    if spec.compile:
        return f"{spec.strategy} cannot be compiled: its collectives are not traced"
    if is_own(spec.model):
        return None
    found = _model(spec.model, spec.dataset)
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


class _Transformer:
    """What a table of layers tells of a shipped model; neither options nor the input's size change the heads."""

    def __init__(self, table: LayerTable) -> None:
        by_kind = {layer.kind: layer for layer in table.layers}
        self.heads = min(
            (layer.attributes["heads"] for layer in table.layers if "heads" in layer.attributes), default=0
        )
        self._stride: list[int] = by_kind["Conv2d"].attributes["stride"] if "PatchEmbedding.other" in by_kind else []

    def tokens(self, spec: RunSpec) -> int:
        """Of a sample: words, or patches and the class token."""
        shape = input_shape(spec.dataset, spec.input_size)
        if DATASETS[spec.dataset].kind == "tokens":
            return shape[-1]
        return prod(extent // stride for extent, stride in zip(shape[1:], self._stride, strict=True)) + 1


@cache
def _model(model: str, dataset: str) -> _Transformer | None:
    table = read_table(model, dataset)
    return None if table is None else _Transformer(table)
