"""Models that no calibration has seen: other widths and depths than the shipped ones, and small."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from hpcbench.worker.models.transformer import TransformerBlock


class Patches(nn.Module):
    """Images as a row of vectors with learned positions."""

    def __init__(self, channels: int, edge: int, width: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (edge // patch) ** 2, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, edge, edge] -> [n, patches, width]."""
        return self.patches(x).flatten(2).transpose(1, 2) + self.positions  # type: ignore[no-any-return]


class MeanHead(nn.Module):
    """Scores from the mean over all positions."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, patches, width] -> [n, outputs]."""
        return self.output(self.norm(x).mean(1))  # type: ignore[no-any-return]


def transformer(in_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """6 layers, 192 wide, 4 heads, patches of 4x4."""
    blocks = [TransformerBlock(192, 4, causal=False, dropout=0.0, epsilon=1e-6) for _ in range(6)]
    return nn.Sequential(Patches(in_shape[0], in_shape[-1], 192, 4), *blocks, MeanHead(192, outputs))


def _stage(wide_in: int, wide_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(wide_in, wide_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def fat(in_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Four convolutions and, as VGG's, a first linear layer that holds most of the weights."""
    widths = (in_shape[0], 40, 80, 112)
    stages = [_stage(before, after) for before, after in pairwise(widths)]
    features = widths[-1] * prod(extent // 8 for extent in in_shape[1:])
    head = nn.Sequential(nn.Flatten(), nn.Linear(features, 1536), nn.ReLU(), nn.Linear(1536, outputs))
    return nn.Sequential(*stages, head)


class Residual(nn.Module):
    """Two convolutions with batch normalisation around which the input goes, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(width, width, 3, padding=1, bias=False), bn1=nn.BatchNorm2d(width), relu=nn.ReLU(),
                conv2=nn.Conv2d(width, width, 3, padding=1, bias=False), bn2=nn.BatchNorm2d(width),
            )
        )  # fmt: skip
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[n, width, edge, edge] -> the same."""
        return self.relu(x + self.inner(x))  # type: ignore[no-any-return]


def residual(in_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """A small ResNet of three stages."""
    blocks: list[nn.Module] = [nn.Sequential(nn.Conv2d(in_shape[0], 40, 3, padding=1, bias=False), nn.BatchNorm2d(40))]
    for before, width in ((40, 40), (40, 80), (80, 160)):
        if before != width:
            blocks.append(nn.Sequential(nn.Conv2d(before, width, 2, 2, bias=False), nn.BatchNorm2d(width), nn.ReLU()))
        blocks += [Residual(width), Residual(width)]
    blocks.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, outputs)))
    return nn.Sequential(*blocks)


def volumes(in_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Four 3-D convolutions, the first three followed by a pool."""
    widths = (in_shape[0], 40, 72, 112, 160)
    blocks: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths)):
        layers: list[nn.Module] = [nn.Conv3d(before, after, 3, padding=1), nn.LeakyReLU(0.3)]
        blocks.append(nn.Sequential(*layers, *([nn.MaxPool3d(2)] if number < 3 else [])))
    blocks.append(nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(widths[-1], outputs)))
    return nn.Sequential(*blocks)
