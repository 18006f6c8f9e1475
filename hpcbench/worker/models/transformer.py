"""The transformer block that the GPT, Llama and ViT models share.

Its linear layers have fixed names so that tensor parallelism can split them: ``attention.query``, ``.key``, ``.value``,
``mlp.up`` and ``mlp.gate`` by output features (column), ``attention.output`` and ``mlp.down`` by input features (row).
Heads are contiguous in the features; their number is derived from the tensor shapes, so half of the features are half
of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


@dataclass(frozen=True, kw_only=True)
class BlockStyle:
    """The options in which families of blocks differ; the default is GPT-2's.

    ``kv_heads`` below the number of heads is grouped-query attention; ``inner`` is the width of the MLP (4 widths where
    absent); ``rotary_base`` turns queries and keys by their positions.
    """

    kv_heads: int | None = None
    inner: int | None = None
    activation: Literal["gelu", "relu2", "swiglu"] = "gelu"
    norm: Literal["layer", "layer_without_bias", "rms"] = "layer"
    biases: bool = True
    rotary_base: float | None = None


GPT_STYLE = BlockStyle()


def make_norm(style: BlockStyle, width: int, epsilon: float = 1e-5) -> nn.Module:
    """Return the normalisation of ``style`` over the last dim."""
    if style.norm == "rms":
        return nn.RMSNorm(width, eps=epsilon)
    return nn.LayerNorm(width, eps=epsilon, bias=style.norm == "layer")


class RotaryEmbedding(Function):
    """Turns pairs of features by angles that grow with the position (Su et al. 2021).

    Feature ``i`` is paired with ``i + width / 2``. Nothing is kept for the backward pass, which turns back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: float) -> Tensor:
        """[n, heads, length, width] -> the same shape, computed in fp32 at least."""
        ctx.base = base
        return _rotate(x, base, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _rotate(gradients[0], ctx.base, -1.0), None


def _rotate(x: Tensor, base: float, direction: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=wide.dtype)
    positions = torch.arange(x.shape[-2], device=x.device, dtype=wide.dtype)
    angles = positions.unsqueeze(1) * (base ** (-steps / half)).unsqueeze(0)
    cosines, sines = angles.cos(), angles.sin() * direction
    first, second = wide[..., :half], wide[..., half:]
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Self-attention with several heads; with ``causal`` a position attends to itself and earlier positions only."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float, style: BlockStyle = GPT_STYLE) -> None:
        super().__init__()
        assert width % heads == 0, f"{heads} heads of a width of {width}"
        self.head_width = width // heads
        self.causal = causal
        self.rotary_base = style.rotary_base
        self.kv_heads = style.kv_heads if style.kv_heads not in (None, heads) else None
        """Key and value heads of the whole layer; ``None`` where every head has keys and values of its own."""
        kv_width = self.head_width * (self.kv_heads or heads)
        self.query = nn.Linear(width, width, bias=style.biases)
        self.key = nn.Linear(width, kv_width, bias=style.biases)
        self.value = nn.Linear(width, kv_width, bias=style.biases)
        self.output = nn.Linear(width, width, bias=style.biases)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> the same shape."""
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        if self.rotary_base is not None:
            query, key = (RotaryEmbedding.apply(part, self.rotary_base) for part in (query, key))  # type: ignore[no-untyped-call]
        if key.shape[1] != query.shape[1]:
            # As torchtitan: fused attention for groups of heads exists on some devices only.
            sharing = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(sharing, dim=1) for part in (key, value))
        dropped = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, features: Tensor) -> Tensor:
        return features.view(*features.shape[:2], -1, self.head_width).transpose(1, 2)


class Mlp(nn.Module):
    """Two linear layers with an activation between them, or SwiGLU's three (Shazeer 2020)."""

    def __init__(self, width: int, inner: int, style: BlockStyle = GPT_STYLE) -> None:
        super().__init__()
        self.activation = style.activation
        self.up = nn.Linear(width, inner, bias=style.biases)
        if style.activation == "swiglu":
            self.gate = nn.Linear(width, inner, bias=style.biases)
        self.down = nn.Linear(inner, width, bias=style.biases)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> the same shape."""
        inner = self.up(x)
        if self.activation == "swiglu":
            inner = F.silu(self.gate(x)) * inner
        elif self.activation == "relu2":
            inner = F.relu(inner).square()
        else:
            inner = F.gelu(inner)
        return self.down(inner)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention and an MLP, each with a normalisation before it and a residual connection around it."""

    def __init__(
        self, width: int, heads: int, causal: bool, dropout: float, epsilon: float = 1e-5, style: BlockStyle = GPT_STYLE
    ) -> None:
        super().__init__()
        self.norm1 = make_norm(style, width, epsilon)
        self.attention = Attention(width, heads, causal, dropout, style)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = make_norm(style, width, epsilon)
        self.mlp = Mlp(width, style.inner or 4 * width, style)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> the same shape."""
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]
