"""Decoder-only pre-norm transformers after GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020).

The sizes are those of GPT-3's table 2.1 and of Turing-NLG (Rosset 2020). The output layer has its own weights unless
the option ``tied`` is set: a sequence whose first and last block share a weight cannot be cut between them.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from hpcbench.worker.models.transformer import GPT_STYLE, BlockStyle, TransformerBlock, make_norm

DEFAULTS = {
    "kind": "tokens",
    "min_size": 1,
    "options": {
        "context": (2048, "positions that there are weights for, at least; a longer input gets its own"),
        "tied": (False, "the output layer uses the embedding's weights, as published"),
        "dropout": (0.0, "of embeddings, attention and after each half of a block"),
    },
}
MODELS = {
    "gpt": {
        "description": "4 layers, 128 wide, 4 heads: trains on a CPU",
        "options": {
            "context": (1024, "positions that there are weights for, at least; a longer input gets its own"),
        },
    },
    "gpt_125m": {"description": "GPT-3 Small: 12 layers, 768 wide, 12 heads"},
    "gpt_350m": {"description": "GPT-3 Medium: 24 layers, 1024 wide, 16 heads"},
    "gpt_760m": {"description": "GPT-3 Large: 24 layers, 1536 wide, 16 heads"},
    "gpt_1_3b": {
        "description": "GPT-3 XL: 24 layers, 2048 wide, 16 heads of 128 (the paper's 24 do not divide its width)"
    },
    "gpt_2_7b": {"description": "GPT-3 2.7B: 32 layers, 2560 wide, 32 heads"},
    "gpt_6_7b": {"description": "GPT-3 6.7B: 32 layers, 4096 wide, 32 heads"},
    "gpt_13b": {"description": "GPT-3 13B: 40 layers, 5120 wide (the paper prints 5140), 40 heads of 128"},
    "gpt_17b": {
        "description": "as Turing-NLG: 78 layers, 4256 wide, 28 heads",
        "options": {
            "context": (1024, "positions that there are weights for, at least; a longer input gets its own"),
        },
    },
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


def build(name: str, in_shape: tuple[int, ...], vocabulary: int, options: dict[str, Any]) -> nn.Sequential:
    """``name`` for sequences of ``in_shape`` (length,): embedding, blocks, head."""
    layers, width, heads = _GPT_SIZES[name]
    embedding = Embedding(vocabulary, max(options["context"], *in_shape), width, options["dropout"])
    blocks = [TransformerBlock(width, heads, causal=True, dropout=options["dropout"]) for _ in range(layers)]
    head = TokenHead(width, vocabulary)
    if options["tied"]:
        head.output.weight = embedding.tokens.weight
    return initialised(nn.Sequential(embedding, *blocks, head), layers)


def initialised(model: nn.Sequential, layers: int) -> nn.Sequential:
    """Draw the weights of a model of ``layers`` blocks as GPT-2 does, and return it."""
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            # GPT-2's initialisation: layers that add to the residual stream start smaller, by the number of blocks.
            is_residual = module_name.endswith(("attention.output", "mlp.down"))
            nn.init.normal_(module.weight, std=_INITIAL_STD / (math.sqrt(2 * layers) if is_residual else 1.0))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model
