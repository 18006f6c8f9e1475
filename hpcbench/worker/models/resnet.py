"""ResNet (He et al. 2016): the CIFAR form for small images, torchvision's form for larger ones."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.worker.models.build import SMALL_IMAGE_EDGE, build_torchvision_model

DEFAULTS = {"kind": "images", "min_size": 8}
MODELS = {
    "resnet18": {"description": "18 layers, residual; below 64 pixels a 3x3 stem without pooling"},
    "resnet50": {"description": "50 layers, residual, bottlenecks; below 64 pixels a 3x3 stem without pooling"},
    "resnet152": {"description": "152 layers, residual, bottlenecks; below 64 pixels a 3x3 stem without pooling"},
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; ``stride`` halves the extents where it is 2."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels_in, h, w] -> [n, channels, h / stride, w / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the last one widens by ``expansion``."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = self.expansion * channels
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.shortcut = _shortcut(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels_in, h, w] -> [n, 4 * channels, h / stride, w / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    if stride == 1 and channels_in == channels_out:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out))


_BLOCKS_PER_STAGE: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


def build(name: str, in_shape: tuple[int, ...], classes: int, _options: dict[str, Any]) -> nn.Sequential:
    """``name`` for images of ``in_shape`` (channels, height, width), as a sequence of blocks."""
    if in_shape[-1] >= SMALL_IMAGE_EDGE:
        model = build_torchvision_model(name, classes)
        if in_shape[0] != 3:
            model.conv1 = nn.Conv2d(in_shape[0], 64, 7, 2, padding=3, bias=False)
        stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
        stages = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
        return nn.Sequential(stem, *stages, nn.Sequential(model.avgpool, nn.Flatten(), model.fc))
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(in_shape[0], 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    ]
    kind, counts = _BLOCKS_PER_STAGE[name]
    channels_in = 64
    for stage, count in enumerate(counts):
        channels = 64 * 2**stage
        for number in range(count):
            blocks.append(kind(channels_in, channels, 2 if stage and not number else 1))
            channels_in = channels * kind.expansion
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, classes))
    return nn.Sequential(*blocks, head)
