"""Vision transformers (Dosovitskiy et al. 2021), equivalent to torchvision's, built of ``TransformerBlock``s."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hpcbench.worker.models.transformer import TransformerBlock

DEFAULTS = {
    "kind": "images",
    "min_size": 16,
    "options": {"dropout": (0.0, "of embeddings, attention and after each half of a block")},
}
MODELS = {
    "vit": {"description": "4 layers, 128 wide, 4 heads, patches of 4x4: trains on a CPU", "min_size": 8},
    "vit_b16": {"description": "ViT-B/16: 12 layers, 768 wide, 12 heads, patches of 16x16"},
    "vit_l16": {"description": "ViT-L/16: 24 layers, 1024 wide, 16 heads, patches of 16x16"},
}


_VIT_SIZES = {
    "vit": (4, 128, 4, 4),
    "vit_b16": (12, 768, 12, 16),
    "vit_l16": (24, 1024, 16, 16),
}
"""Layers, width, heads and the edge of a patch."""
_LAYER_NORM_EPSILON = 1e-6


class PatchEmbedding(nn.Module):
    """Patches as vectors, a class token before them, learned positions added; pixels that fill no patch are dropped."""

    def __init__(self, channels: int, edge: int, width: int, patch: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (edge // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.trunc_normal_(self.patches.weight, std=math.sqrt(1 / (channels * patch**2)))
        assert self.patches.bias is not None
        nn.init.zeros_(self.patches.bias)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, edge, edge] -> [n, patches + 1, width]."""
        vectors = self.patches(x).flatten(2).transpose(1, 2)
        token = self.class_token.expand(len(x), -1, -1)
        return self.dropout(torch.cat([token, vectors], dim=1) + self.positions)  # type: ignore[no-any-return]


class ClassHead(nn.Module):
    """The classes' scores from the class token."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=_LAYER_NORM_EPSILON)
        self.output = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, patches + 1, width] -> [n, classes]."""
        return self.output(self.norm(x)[:, 0])  # type: ignore[no-any-return]


def build(name: str, in_shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Sequential:
    """``name`` for images of ``in_shape`` (channels, height, width): embedding, blocks, head."""
    layers, width, heads, patch = _VIT_SIZES[name]
    blocks: list[nn.Module] = [PatchEmbedding(in_shape[0], in_shape[-1], width, patch, options["dropout"])]
    blocks += [
        TransformerBlock(width, heads, causal=False, dropout=options["dropout"], epsilon=_LAYER_NORM_EPSILON)
        for _ in range(layers)
    ]
    return nn.Sequential(*blocks, ClassHead(width, classes))
