"""The table of layers of a GPT as Megatron-LM computes it: fused kernels, an attention that stores its scores, fp16.

What each kernel reads and writes is our count of the kernels that Narayanan et al. 2021 (section 4.2) and Korthikanti
et al. 2022 (section 4.1) describe. Sizes below are in bytes with numbers of two bytes and masks of one; a table holds
bytes of fp32, twice as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcbench.strategies.layer_table import LOSS_ROW_NAME, LayerRow, LayerTable, TensorShape
from hpcbench.strategies.tensor.entry import TRANSFORMER_BLOCK_KIND

TOKENS = 2048
VOCABULARY = 51_200
_DROPOUT = 0.1
_FP32_BYTES = 4
_OF_TABLE = 2
"""Bytes of a table for one byte with numbers of two."""


class Gpt(NamedTuple):
    """Sizes of a model."""

    layers: int
    width: int
    heads: int
    selective: bool = False
    """The inner part of attention is computed again in the backward pass (Korthikanti et al. 2022, section 5)."""
    tied: bool = False
    """The output layer lies where the embedding is, and has no weights of its own."""
    tokens: int = TOKENS
    vocabulary: int = VOCABULARY

    @property
    def numbers(self) -> int:
        """Return the elements between two blocks, per sample."""
        return self.tokens * self.width

    @property
    def scores(self) -> int:
        """Return the attention scores, per sample."""
        return self.heads * self.tokens * self.tokens


class Kept(NamedTuple):
    """The bytes per sample that autograd saves of a row for the backward pass."""

    split: int = 0
    """On ranks that share the block: this divided by their number."""
    whole: int = 0
    """On every rank; shared like ``split`` under sequence parallelism."""


def table_of(gpt: Gpt) -> LayerTable:
    """Embedding, blocks and head, with the names that tensor parallelism goes by."""
    rows = [*_embedding(gpt)]
    for block in range(1, gpt.layers + 1):
        rows += _block(gpt, block)
    rows += _head(gpt, gpt.layers + 1)
    return LayerTable(
        model="megatron",
        dataset="tokens",
        input_size=gpt.tokens,
        blocks=gpt.layers + 2,
        parameter_tensors=list(_tensors(gpt)),
        buffers=[],
        layers=rows,
    )


def kept_in_block(gpt: Gpt) -> dict[str, Kept]:
    """Return saved bytes by row of a block; the sum is Korthikanti et al. 2022's equation 1, s b h (34 + 5 a s / h)."""
    numbers, scores = gpt.numbers, 0 if gpt.selective else gpt.scores
    return {
        "norm1": Kept(whole=2 * numbers),
        "attention.query": Kept(whole=2 * numbers),
        "attention.scores": Kept(split=4 * numbers),
        "attention.softmax": Kept(split=2 * scores),
        "attention.dropout": Kept(split=scores),
        "attention.context": Kept(split=2 * numbers + 2 * scores),
        "attention.output": Kept(split=2 * numbers),
        "dropout1": Kept(whole=numbers),
        "norm2": Kept(whole=2 * numbers),
        "mlp.up": Kept(whole=2 * numbers),
        "mlp.gelu": Kept(split=8 * numbers),
        "mlp.down": Kept(split=8 * numbers),
        "dropout2": Kept(whole=numbers),
    }


def _block(gpt: Gpt, block: int) -> Iterator[LayerRow]:
    """One product makes queries, keys and values; the rows of the latter two only name their weights."""
    width, numbers, scores = gpt.width, gpt.numbers, gpt.scores
    shape, wide = [gpt.tokens, width], [gpt.tokens, 4 * width]
    again = int(gpt.selective)
    product = 2 * gpt.tokens * gpt.tokens * width
    norm = (shape, numbers, 2 * width, 0, 4 * numbers, 10 * numbers)
    dropout = (shape, numbers, 0, 0, 7 * numbers, 13 * numbers)
    square = 2 * numbers * width
    entries: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
        ("norm1", "LayerNorm", norm, {}),
        (
            "attention.query", "Linear",
            (shape, 3 * numbers, 3 * (width * width + width), 3 * square, 8 * numbers, 22 * numbers),
            {"in_features": width, "out_features": width},
        ),
        ("attention.key", "Linear", (shape, numbers, 0, 0, 0, 0), {"out_features": width}),
        ("attention.value", "Linear", (shape, numbers, 0, 0, 0, 0), {"out_features": width}),
        (
            "attention.scores", "Product",
            ([gpt.tokens, 2 * width], scores, 0, product, 4 * numbers + 2 * scores, 8 * numbers + 4 * scores), {},
        ),
        ("attention.softmax", "Softmax", ([scores], scores, 0, 0, 4 * scores, 6 * scores), {}),
        ("attention.dropout", "Dropout", ([scores], scores, 0, 0, 5 * scores, 5 * scores), {}),
        (
            "attention.context", "Product",
            ([scores + numbers], numbers, 0, product, 4 * numbers + 2 * scores, 8 * numbers + 4 * scores), {},
        ),
        (
            "attention.output", "Linear",
            (shape, numbers, width * width + width, square, 4 * numbers, 8 * numbers),
            {"in_features": width, "out_features": width},
        ),
        ("attention", "Attention.other", (shape, numbers, 0, 0, 0, 0), {"head_width": width // gpt.heads}),
        ("dropout1", "Dropout", dropout, {"p": _DROPOUT}),
        ("norm2", "LayerNorm", norm, {}),
        (
            "mlp.up", "Linear",
            (shape, 4 * numbers, 4 * width * width + 4 * width, 4 * square, 10 * numbers, 20 * numbers),
            {"in_features": width, "out_features": 4 * width},
        ),
        ("mlp.gelu", "GELU", (wide, 4 * numbers, 0, 0, 16 * numbers, 32 * numbers), {}),
        (
            "mlp.down", "Linear",
            (wide, numbers, 4 * width * width + width, 4 * square, 10 * numbers, 20 * numbers),
            {"in_features": 4 * width, "out_features": width},
        ),
        ("dropout2", "Dropout", dropout, {"p": _DROPOUT}),
    ]  # fmt: skip
    for name, kind, counted, attributes in entries:
        is_core = again and name in ("attention.scores", "attention.softmax", "attention.dropout", "attention.context")
        yield _row(f"{block}.{name}", block, kind, counted, attributes, 1 if is_core else 0)
    yield _row(str(block), block, TRANSFORMER_BLOCK_KIND, (shape, numbers, 0, 0, 0, 0), {})


def _embedding(gpt: Gpt) -> Iterator[LayerRow]:
    numbers, shape = gpt.numbers, [gpt.tokens, gpt.width]
    words = gpt.vocabulary * gpt.width
    found = {"num_embeddings": gpt.vocabulary, "embedding_dim": gpt.width}
    yield _row("0.tokens", 0, "Embedding", ([gpt.tokens], numbers, words, 0, 4 * numbers, 4 * numbers), found)
    yield _row("0.dropout", 0, "Dropout", (shape, numbers, 0, 0, 5 * numbers, 5 * numbers), {"p": _DROPOUT})
    positions = gpt.tokens * gpt.width
    yield _row("0", 0, "Embedding.other", ([gpt.tokens], numbers, positions, 0, 6 * numbers, 2 * numbers), {})


def _head(gpt: Gpt, block: int) -> Iterator[LayerRow]:
    numbers, shape, logits = gpt.numbers, [gpt.tokens, gpt.width], gpt.tokens * gpt.vocabulary
    norm = (shape, numbers, 2 * gpt.width, 0, 4 * numbers, 10 * numbers)
    yield _row(f"{block}.norm", block, "LayerNorm", norm, {})
    words = 0 if gpt.tied else gpt.vocabulary * gpt.width
    flops = 2 * numbers * gpt.vocabulary
    moved = (2 * numbers + 2 * logits, 4 * numbers + 4 * logits)
    attributes = {"in_features": gpt.width, "out_features": gpt.vocabulary}
    yield _row(f"{block}.output", block, "Linear", (shape, logits, words, flops, *moved), attributes)
    # In fp32, one kernel an operation: cast, maximum, difference, exponential, sum, quotient.
    yield _row(LOSS_ROW_NAME, block + 1, "Loss", ([gpt.tokens, gpt.vocabulary], 0, 0, 0, 38 * logits, 14 * logits), {})


def _row(
    name: str, block: int, kind: str, counted: tuple[Any, ...], attributes: dict[str, Any], again: int = 0
) -> LayerRow:
    """``counted``: input shape, numbers that come out, parameters, forward FLOPs, bytes moved forward and backward.

    ``again``: forward passes that are repeated in the backward pass.
    """
    shape, made, parameters, flops, forward, backward = counted
    return LayerRow(
        name=name,
        block=block,
        kind=kind,
        input_shape=shape,
        output_shape=[made],
        parameters=parameters,
        forward_flops=flops,
        backward_flops=(2 + again) * flops,
        activation_bytes=0,
        activation_fixed_bytes=0,
        output_bytes=_FP32_BYTES * made,
        forward_moved_bytes=_OF_TABLE * forward,
        backward_moved_bytes=_OF_TABLE * (backward + again * forward),
        attributes=attributes,
    )


def _tensors(gpt: Gpt) -> Iterator[TensorShape]:
    width = gpt.width
    yield TensorShape("0.tokens.weight", [gpt.vocabulary, width])
    yield TensorShape("0.positions.weight", [gpt.tokens, width])
    for block in range(1, gpt.layers + 1):
        for name in ("norm1", "norm2"):
            yield TensorShape(f"{block}.{name}.weight", [width])
            yield TensorShape(f"{block}.{name}.bias", [width])
        for name in ("query", "key", "value", "output"):
            yield TensorShape(f"{block}.attention.{name}.weight", [width, width])
            yield TensorShape(f"{block}.attention.{name}.bias", [width])
        for name, (out, inner) in {"up": (4 * width, width), "down": (width, 4 * width)}.items():
            yield TensorShape(f"{block}.mlp.{name}.weight", [out, inner])
            yield TensorShape(f"{block}.mlp.{name}.bias", [out])
    head = gpt.layers + 1
    yield TensorShape(f"{head}.norm.weight", [width])
    yield TensorShape(f"{head}.norm.bias", [width])
    if not gpt.tied:
        yield TensorShape(f"{head}.output.weight", [gpt.vocabulary, width])
