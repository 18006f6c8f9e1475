"""Decoder-only transformers of published training runs: Llama (Touvron et al. 2023, Dubey et al. 2024), MPT, Nemotron-4
and GPT-3, as ``hpcbench/parallel/decoder_shapes.json`` counts them. Llama 2 is not among them: its 32,000 words are
fewer than those of the data set.

Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases. MPT: LayerNorm without biases, learned
positions, GELU. Nemotron: LayerNorm, rotary positions, squared ReLU, no biases. GPT-3: GPT-2's block.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hpcbench.parallel.decoder_shapes import DecoderShape, named_shape
from hpcbench.worker.models.gpt import Embedding, TokenHead, initialised
from hpcbench.worker.models.transformer import BlockStyle, TransformerBlock

DEFAULTS = {
    "kind": "tokens",
    "min_size": 1,
    "options": {
        "vocabulary": (0, "words that there are weights for; 0: as published, and never fewer than the data set has"),
        "tied": (False, "the output layer uses the embedding's weights"),
        "dropout": (0.0, "of embeddings, attention and after each half of a block"),
    },
}
MODELS = {
    "llama": {"description": "4 layers, 128 wide, 4 heads, 2 key-value heads: trains on a CPU"},
    "llama_1b": {
        "description": "Llama 3.2 1B: 16 layers, 2048 wide, 32 heads, 8 key-value heads",
        "input_size": 8192,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "llama_3b": {
        "description": "Llama 3.2 3B: 28 layers, 3072 wide, 24 heads, 8 key-value heads",
        "input_size": 8192,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "llama_8b": {"description": "Llama 3.1 8B: 32 layers, 4096 wide, 32 heads, 8 key-value heads", "input_size": 8192},
    "llama_70b": {
        "description": "Llama 3.1 70B: 80 layers, 8192 wide, 64 heads, 8 key-value heads",
        "input_size": 8192,
    },
    "llama_405b": {
        "description": "Llama 3.1 405B: 126 layers, 16384 wide, 128 heads, 8 key-value heads",
        "input_size": 8192,
    },
    "playbook_1b": {
        "description": "the Ultra-Scale Playbook's 1B: 16 layers, 2048 wide, 32 heads",
        "input_size": 4096,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "playbook_3b": {
        "description": "the Ultra-Scale Playbook's 3B: 28 layers, 3072 wide, 32 heads",
        "input_size": 4096,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "playbook_8b": {"description": "the Ultra-Scale Playbook's 8B: 32 layers, 4096 wide, 32 heads", "input_size": 4096},
    "playbook_70b": {
        "description": "the Ultra-Scale Playbook's 70B: 80 layers, 8192 wide, 64 heads, 8 key-value heads",
        "input_size": 4096,
    },
    "playbook_80b": {
        "description": "the Ultra-Scale Playbook's 80B: 80 layers, 8192 wide, 64 heads",
        "input_size": 4096,
    },
    "mpt_125m": {
        "description": "MPT 125M: 12 layers, 768 wide, 12 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "mpt_350m": {
        "description": "MPT 350M: 24 layers, 1024 wide, 16 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "mpt_760m": {
        "description": "MPT 760M: 24 layers, 1536 wide, 12 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "mpt_1b": {
        "description": "MPT 1B: 24 layers, 2048 wide, 16 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "mpt_3b": {
        "description": "MPT 3B: 32 layers, 2560 wide, 20 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "mpt_7b": {
        "description": "MPT 7B: 32 layers, 4096 wide, 32 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "mpt_13b": {
        "description": "MPT 13B: 40 layers, 5120 wide, 40 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "mpt_30b": {
        "description": "MPT 30B: 48 layers, 7168 wide, 56 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "mpt_70b": {
        "description": "MPT 70B: 80 layers, 8192 wide, 64 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
    "nemotron_15b": {
        "description": "Nemotron-4 15B: 32 layers, 6144 wide, 48 heads, 8 key-value heads",
        "input_size": 4096,
    },
    "nemotron_340b": {
        "description": "Nemotron-4 340B: 96 layers, 18432 wide, 96 heads, 8 key-value heads",
        "input_size": 4096,
    },
    "gpt3_175b": {
        "description": "GPT-3 175B: 96 layers, 12288 wide, 96 heads",
        "input_size": 2048,
        "options": {"tied": (True, "the output layer uses the embedding's weights, as published")},
    },
}

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


def build(name: str, in_shape: tuple[int, ...], vocabulary: int, options: dict[str, Any]) -> nn.Sequential:
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
    head = TokenHead(shape.hidden, words, style)
    if options["tied"]:
        head.output.weight = embedding.tokens.weight
    return initialised(nn.Sequential(embedding, *blocks, head), shape.layers)
