"""The transformer block that the GPT and ViT models share.

Its linear layers have fixed names so that tensor parallelism can split them: ``attention.query``, ``.key``, ``.value``
and ``mlp.up`` by output features (column), ``attention.output`` and ``mlp.down`` by input features (row). Heads are
contiguous in the features; their number is derived from the tensor shapes, so half of the features are half of the
heads.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention with several heads; with ``causal`` a position attends to itself and earlier positions only."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        assert width % heads == 0, f"{heads} heads of a width of {width}"
        self.head_width = width // heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> the same shape."""
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        dropped = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, features: Tensor) -> Tensor:
        return features.view(*features.shape[:2], -1, self.head_width).transpose(1, 2)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> the same shape."""
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention and an MLP, each with a layer norm before it and a residual connection around it."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=epsilon)
        self.attention = Attention(width, heads, causal, dropout)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps=epsilon)
        self.mlp = Mlp(width, 4 * width)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> the same shape."""
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]
