"""MobileNetV2 (Sandler et al. 2018): the CIFAR form for small images, torchvision's form for larger ones."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.worker.models.build import SMALL_IMAGE_EDGE, build_torchvision_model

MODELS = {
    "mobilenetv2": {
        "kind": "images",
        "min_size": 8,
        "description": "inverted residuals with depthwise convolutions; below 64 pixels it halves three times only",
        "options": {"dropout": (0.2, "from 64 pixels on: dropout before the linear layer")},
    },
}

_STAGE_SETTINGS = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""The paper's table 2: expansion, channels, blocks, stride; the second stage's stride is lowered to 1."""
_STEM_CHANNELS, _HEAD_CHANNELS = 32, 1280


class InvertedResidual(nn.Module):
    """Widen by a 1x1 convolution, filter each channel by itself, narrow again; a shortcut where the extents stay."""

    def __init__(self, channels_in: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = expansion * channels_in
        self.conv1 = nn.Conv2d(channels_in, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.conv3 = nn.Conv2d(wide, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Sequential | None = None
        if stride == 1:
            self.shortcut = nn.Sequential()
            if channels_in != channels:
                self.shortcut.extend([nn.Conv2d(channels_in, channels, 1, bias=False), nn.BatchNorm2d(channels)])

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels_in, h, w] -> [n, channels, h / stride, w / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return y if self.shortcut is None else y + self.shortcut(x)  # type: ignore[no-any-return]


def build(_name: str, in_shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Sequential:
    """MobileNetV2 for images of ``in_shape`` (channels, height, width), as a sequence of blocks."""
    if in_shape[-1] >= SMALL_IMAGE_EDGE:
        model = build_torchvision_model("mobilenet_v2", classes, dropout=options["dropout"])
        if in_shape[0] != 3:
            model.features[0][0] = nn.Conv2d(in_shape[0], _STEM_CHANNELS, 3, 2, padding=1, bias=False)
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(*model.features, pool, *model.classifier)
    blocks: list[nn.Module] = [_convolution_block(in_shape[0], _STEM_CHANNELS, 3)]
    channels_in = _STEM_CHANNELS
    for expansion, channels, count, stride in _STAGE_SETTINGS:
        for number in range(count):
            blocks.append(InvertedResidual(channels_in, channels, expansion, 1 if number else stride))
            channels_in = channels
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_HEAD_CHANNELS, classes))
    return nn.Sequential(*blocks, _convolution_block(channels_in, _HEAD_CHANNELS, 1), head)


def _convolution_block(channels_in: int, channels: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())
