"""Decoder-only transformers: GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020), and those of published training
runs: Llama (Touvron et al. 2023, Dubey et al. 2024), MPT, Nemotron-4 and GPT-3 175B.

The sizes of ``gpt`` are those of GPT-3's table 2.1 and of Turing-NLG (Rosset 2020). Its output layer has weights of its
own unless the option ``tied`` is set: a sequence whose first and last block share a weight cannot be cut between them.
The others are as ``hpcbench/strategies/decoder_shapes.json`` counts them. Llama 2 is not among them: its 32,000
words are fewer than those of the data set.

Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases. MPT: LayerNorm without biases, learned
positions, GELU. Nemotron: LayerNorm, rotary positions, squared ReLU, no biases. GPT-3: GPT-2's block.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from hpcbench.strategies.decoder_shapes import DecoderShape, named_shape
from hpcbench.worker.models.transformer import GPT_STYLE, BlockStyle, TransformerBlock, make_norm

_GPT_SIZES = {
    "gpt": (4, 128, 4),
    "gpt_125m": (12, 768, 12),
    "gpt_350m": (24, 1024, 16),
    "gpt_760m": (24, 1536, 16),
    "gpt_1_3b": (24, 2048, 16),
    "gpt_2_7b": (32, 2560, 32),
    "gpt_6_7b": (32, 4096, 32),
    "gpt_13b": (40, 5120, 40),
    "gpt_17b": (78, 4256, 28),
}
"""Layers, width and heads."""
_INITIAL_STD = 0.02


class Embedding(nn.Module):
    """Tokens as vectors, learned positions added unless ``context`` is 0."""

    positions: nn.Embedding | None

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width) if context else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length] -> [n, length, width]."""
        vectors = self.tokens(x)
        if self.positions is not None:
            vectors = vectors + self.positions.weight[: x.shape[1]]
        return self.dropout(vectors)  # type: ignore[no-any-return]


class TokenHead(nn.Module):
    """The scores of every token of the vocabulary at every position."""

    def __init__(self, width: int, vocabulary: int, style: BlockStyle = GPT_STYLE) -> None:
        super().__init__()
        self.norm = make_norm(style, width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> [n, length, vocabulary]."""
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def build_gpt(name: str, in_shape: tuple[int, ...], vocabulary: int, options: dict[str, Any]) -> nn.Sequential:
    """``name`` for sequences of ``in_shape`` (length,): embedding, blocks, head."""
    layers, width, heads = _GPT_SIZES[name]
    embedding = Embedding(vocabulary, max(options["context"], *in_shape), width, options["dropout"])
    blocks = [TransformerBlock(width, heads, causal=True, dropout=options["dropout"]) for _ in range(layers)]
    return _initialised(embedding, blocks, TokenHead(width, vocabulary), options["tied"])


def _initialised(embedding: Embedding, blocks: list[TransformerBlock], head: TokenHead, is_tied: bool) -> nn.Sequential:
    """Return the model of these parts, its weights drawn as GPT-2 does."""
    if is_tied:
        head.output.weight = embedding.tokens.weight
    model = nn.Sequential(embedding, *blocks, head)
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            # GPT-2's initialisation: layers that add to the residual stream start smaller, by the number of blocks.
            is_residual = module_name.endswith(("attention.output", "mlp.down"))
            nn.init.normal_(module.weight, std=_INITIAL_STD / (math.sqrt(2 * len(blocks)) if is_residual else 1.0))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


_ROTARY_BASE, _LLAMA_3_ROTARY_BASE = 10_000.0, 500_000.0


def block_style(shape: DecoderShape) -> BlockStyle:
    """Return the style of a shape's blocks: the families differ in what their shapes differ in."""
    rotary = _LLAMA_3_ROTARY_BASE if shape.name.startswith("llama_") else _ROTARY_BASE
    return BlockStyle(
        kv_heads=shape.kv_heads,
        inner=shape.ffn,
        activation="swiglu" if shape.gated else "gelu" if shape.learned_positions else "relu2",
        norm="rms" if shape.gated else "layer" if shape.norm_vectors == 2 else "layer_without_bias",
        biases=shape.biases,
        rotary_base=None if shape.learned_positions else rotary,
    )


def build_decoder(name: str, in_shape: tuple[int, ...], vocabulary: int, options: dict[str, Any]) -> nn.Sequential:
    """``name`` for sequences of ``in_shape`` (length,): embedding, blocks, head."""
    shape = named_shape(name)
    style, dropout = block_style(shape), options["dropout"]
    words = max(options["vocabulary"] or shape.vocabulary, vocabulary)
    positions = max(shape.learned_positions, *in_shape) if shape.learned_positions else 0
    embedding = Embedding(words, positions, shape.hidden, dropout)
    blocks = [
        TransformerBlock(shape.hidden, shape.heads, causal=True, dropout=dropout, style=style)
        for _ in range(shape.layers)
    ]
    return _initialised(embedding, blocks, TokenHead(shape.hidden, words, style), options["tied"])
