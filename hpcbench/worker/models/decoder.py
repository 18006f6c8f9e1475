"""Decoder-only transformers: GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020), and those of published training
runs: Llama (Touvron et al. 2023, Dubey et al. 2024), MPT, Nemotron-4 and GPT-3 175B.

The sizes of ``gpt`` are those of GPT-3's table 2.1 and of Turing-NLG (Rosset 2020). Its output layer has weights of its
own unless the option ``tied`` is set: a sequence whose first and last block share a weight cannot be cut between them.
The others are as ``hpcbench/parallel/decoder_shapes.json`` counts them. Llama 2 is not among them: its 32,000 words are
fewer than those of the data set.

Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases. MPT: LayerNorm without biases, learned
positions, GELU. Nemotron: LayerNorm, rotary positions, squared ReLU, no biases. GPT-3: GPT-2's block.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from hpcbench.parallel.decoder_shapes import DecoderShape, named_shape
from hpcbench.worker.models.transformer import GPT_STYLE, BlockStyle, TransformerBlock, make_norm

FAMILIES = {
    "decoder": {
        "builder": "build_decoder",
        "kind": "tokens",
        "min_size": 1,
        "options": {
            "vocabulary": (
                0,
                "words that there are weights for; 0: as published, and never fewer than the data set has",
            ),
            "tied": (False, "the output layer uses the embedding's weights"),
            "dropout": (0.0, "of embeddings, attention and after each half of a block"),
        },
    },
    "tied_decoder": {
        "base": "decoder",
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "gpt": {
        "builder": "build_gpt",
        "kind": "tokens",
        "min_size": 1,
        "options": {
            "context": (2048, "positions that there are weights for, at least; a longer input gets its own"),
            "tied": (False, "the output layer uses the embedding's weights, as published"),
            "dropout": (0.0, "of embeddings, attention and after each half of a block"),
        },
    },
    "short_gpt": {
        "base": "gpt",
        "options": {"context": (1024, "positions that there are weights for, at least; a longer input gets its own")},
    },
}
MODELS = {
    "llama": ("decoder", None, "4 layers, 128 wide, 4 heads, 2 key-value heads: trains on a CPU"),
    "llama_1b": ("tied_decoder", 8192, "Llama 3.2 1B: 16 layers, 2048 wide, 32 heads, 8 key-value heads"),
    "llama_3b": ("tied_decoder", 8192, "Llama 3.2 3B: 28 layers, 3072 wide, 24 heads, 8 key-value heads"),
    "llama_8b": ("decoder", 8192, "Llama 3.1 8B: 32 layers, 4096 wide, 32 heads, 8 key-value heads"),
    "llama_70b": ("decoder", 8192, "Llama 3.1 70B: 80 layers, 8192 wide, 64 heads, 8 key-value heads"),
    "llama_405b": ("decoder", 8192, "Llama 3.1 405B: 126 layers, 16384 wide, 128 heads, 8 key-value heads"),
    "playbook_1b": ("tied_decoder", 4096, "the Ultra-Scale Playbook's 1B: 16 layers, 2048 wide, 32 heads"),
    "playbook_3b": ("tied_decoder", 4096, "the Ultra-Scale Playbook's 3B: 28 layers, 3072 wide, 32 heads"),
    "playbook_8b": ("decoder", 4096, "the Ultra-Scale Playbook's 8B: 32 layers, 4096 wide, 32 heads"),
    "playbook_70b": (
        "decoder",
        4096,
        "the Ultra-Scale Playbook's 70B: 80 layers, 8192 wide, 64 heads, 8 key-value heads",
    ),
    "playbook_80b": ("decoder", 4096, "the Ultra-Scale Playbook's 80B: 80 layers, 8192 wide, 64 heads"),
    "mpt_125m": ("tied_decoder", 2048, "MPT 125M: 12 layers, 768 wide, 12 heads"),
    "mpt_350m": ("tied_decoder", 2048, "MPT 350M: 24 layers, 1024 wide, 16 heads"),
    "mpt_760m": ("tied_decoder", 2048, "MPT 760M: 24 layers, 1536 wide, 12 heads"),
    "mpt_1b": ("tied_decoder", 2048, "MPT 1B: 24 layers, 2048 wide, 16 heads"),
    "mpt_3b": ("tied_decoder", 2048, "MPT 3B: 32 layers, 2560 wide, 20 heads"),
    "mpt_7b": ("tied_decoder", 2048, "MPT 7B: 32 layers, 4096 wide, 32 heads"),
    "mpt_13b": ("tied_decoder", 2048, "MPT 13B: 40 layers, 5120 wide, 40 heads"),
    "mpt_30b": ("tied_decoder", 2048, "MPT 30B: 48 layers, 7168 wide, 56 heads"),
    "mpt_70b": ("tied_decoder", 2048, "MPT 70B: 80 layers, 8192 wide, 64 heads"),
    "nemotron_15b": ("decoder", 4096, "Nemotron-4 15B: 32 layers, 6144 wide, 48 heads, 8 key-value heads"),
    "nemotron_340b": ("decoder", 4096, "Nemotron-4 340B: 96 layers, 18432 wide, 96 heads, 8 key-value heads"),
    "gpt3_175b": ("tied_decoder", 2048, "GPT-3 175B: 96 layers, 12288 wide, 96 heads"),
    "gpt": ("short_gpt", None, "4 layers, 128 wide, 4 heads: trains on a CPU"),
    "gpt_125m": ("gpt", None, "GPT-3 Small: 12 layers, 768 wide, 12 heads"),
    "gpt_350m": ("gpt", None, "GPT-3 Medium: 24 layers, 1024 wide, 16 heads"),
    "gpt_760m": ("gpt", None, "GPT-3 Large: 24 layers, 1536 wide, 16 heads"),
    "gpt_1_3b": (
        "gpt",
        None,
        "GPT-3 XL: 24 layers, 2048 wide, 16 heads of 128 (the paper's 24 do not divide its width)",
    ),
    "gpt_2_7b": ("gpt", None, "GPT-3 2.7B: 32 layers, 2560 wide, 32 heads"),
    "gpt_6_7b": ("gpt", None, "GPT-3 6.7B: 32 layers, 4096 wide, 32 heads"),
    "gpt_13b": ("gpt", None, "GPT-3 13B: 40 layers, 5120 wide (the paper prints 5140), 40 heads of 128"),
    "gpt_17b": ("short_gpt", None, "as Turing-NLG: 78 layers, 4256 wide, 28 heads"),
}
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
