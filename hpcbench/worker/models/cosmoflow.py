"""CosmoFlow (Mathuriya et al. 2018, arXiv:1808.04728) in MLPerf HPC's form (Farrell et al. 2021, arXiv:2110.11466).

The sizes follow MLPerf's reference from v1.0 on: five 3^3 convolutions starting at 32 filters and doubling, each
followed by a leaky ReLU (slope 0.3) and a 2^3 pool; then 128, 64 and 4 linear units with dropout 0.5 after the first
two and 1.2 tanh at the end. Weights use Glorot initialisation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PUBLISHED_FILTERS = (32, 64, 128, 256, 512)
_PUBLISHED_EDGE = 128
_LEAKY_SLOPE = 0.3


class ScaledTanh(nn.Module):
    """1.2 tanh: targets lie in [-1, 1], which tanh itself reaches only at infinity."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return 1.2 * torch.tanh(x)


def build(_name: str, in_shape: tuple[int, ...], outputs: int, options: dict[str, Any]) -> nn.Sequential:
    """CosmoFlow for volumes of ``in_shape`` (channels, depth, height, width), as a sequence of blocks.

    Every doubling of the edge beyond 128 adds a convolution of 512 filters and its pool, so that the first linear
    layer stays the published one. A volume that has shrunk to a single voxel is not pooled any more.
    """
    filters = list(_PUBLISHED_FILTERS)
    while in_shape[-1] >= _PUBLISHED_EDGE * 2 ** (len(filters) - len(_PUBLISHED_FILTERS) + 1):
        filters.append(_PUBLISHED_FILTERS[-1])
    blocks: list[nn.Module] = []
    channels_in, extent = in_shape[0], in_shape[-1]
    for channels in filters:
        block = nn.Sequential(
            _initialize_glorot(nn.Conv3d(channels_in, channels, 3, padding=1)), nn.LeakyReLU(_LEAKY_SLOPE)
        )
        if extent >= 2:
            block.append(nn.MaxPool3d(2))
            extent //= 2
        blocks.append(block)
        channels_in = channels
    width = channels_in * extent**3
    for number, units in enumerate((128, 64)):
        flatten = [] if number else [nn.Flatten()]
        linear = _initialize_glorot(nn.Linear(width, units))
        blocks.append(nn.Sequential(*flatten, linear, nn.LeakyReLU(_LEAKY_SLOPE), nn.Dropout(options["dropout"])))
        width = units
    return nn.Sequential(*blocks, nn.Sequential(_initialize_glorot(nn.Linear(width, outputs)), ScaledTanh()))


def _initialize_glorot(layer: nn.Conv3d | nn.Linear) -> nn.Module:
    nn.init.xavier_uniform_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
