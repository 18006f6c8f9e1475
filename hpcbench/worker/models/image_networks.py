"""Networks for images: MobileNetV2 (Sandler et al. 2018), ResNet (He et al. 2016), VGG (Simonyan and Zisserman 2015)
and vision transformers (Dosovitskiy et al. 2021).

The convolutional ones have the CIFAR form for small images and torchvision's form for larger ones; the transformers are
equivalent to torchvision's, built of ``TransformerBlock``s.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.worker.models.torchvision_models import SMALL_IMAGE_EDGE, build_torchvision_model
from hpcbench.worker.models.transformer import TransformerBlock

_MOBILENET_STAGES = (
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


def build_mobilenet(_name: str, in_shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Sequential:
    """MobileNetV2 for images of ``in_shape`` (channels, height, width), as a sequence of blocks."""
    if in_shape[-1] >= SMALL_IMAGE_EDGE:
        model = build_torchvision_model("mobilenet_v2", classes, dropout=options["dropout"])
        if in_shape[0] != 3:
            model.features[0][0] = nn.Conv2d(in_shape[0], _STEM_CHANNELS, 3, 2, padding=1, bias=False)
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(*model.features, pool, *model.classifier)
    blocks: list[nn.Module] = [_convolution_block(in_shape[0], _STEM_CHANNELS, 3)]
    channels_in = _STEM_CHANNELS
    for expansion, channels, count, stride in _MOBILENET_STAGES:
        for number in range(count):
            blocks.append(InvertedResidual(channels_in, channels, expansion, 1 if number else stride))
            channels_in = channels
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_HEAD_CHANNELS, classes))
    return nn.Sequential(*blocks, _convolution_block(channels_in, _HEAD_CHANNELS, 1), head)


def _convolution_block(channels_in: int, channels: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())


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


_RESNET_STAGES: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


def build_resnet(name: str, in_shape: tuple[int, ...], classes: int, _options: dict[str, Any]) -> nn.Sequential:
    """``name`` for images of ``in_shape`` (channels, height, width), as a sequence of blocks."""
    if in_shape[-1] >= SMALL_IMAGE_EDGE:
        model = build_torchvision_model(name, classes)
        if in_shape[0] != 3:
            model.conv1 = nn.Conv2d(in_shape[0], 64, 7, 2, padding=3, bias=False)
        stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
        stages = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
        return nn.Sequential(stem, *stages, nn.Sequential(model.avgpool, nn.Flatten(), model.fc))
    blocks: list[nn.Module] = [_convolution_block(in_shape[0], 64, 3)]
    kind, counts = _RESNET_STAGES[name]
    channels_in = 64
    for stage, count in enumerate(counts):
        channels = 64 * 2**stage
        for number in range(count):
            blocks.append(kind(channels_in, channels, 2 if stage and not number else 1))
            channels_in = channels * kind.expansion
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, classes))
    return nn.Sequential(*blocks, head)


_POOL = 0
_VGG_CHANNELS = {
    "vgg11": (64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL),
    "vgg16": (64, 64, _POOL, 128, 128, _POOL, 256, 256, 256, _POOL, 512, 512, 512, _POOL, 512, 512, 512, _POOL),
}


def build_vgg(name: str, in_shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Sequential:
    """``name`` for images of ``in_shape`` (channels, height, width), as a sequence of blocks."""
    if in_shape[-1] >= SMALL_IMAGE_EDGE:
        model = build_torchvision_model(name, classes, dropout=options["dropout"])
        if in_shape[0] != 3:
            model.features[0] = nn.Conv2d(in_shape[0], 64, 3, padding=1)
        return nn.Sequential(*model.features, nn.Sequential(model.avgpool, nn.Flatten()), *model.classifier)
    blocks: list[nn.Module] = []
    channels_in, extent = in_shape[0], in_shape[-1]
    for channels in _VGG_CHANNELS[name]:
        if channels != _POOL:
            blocks.append(_vgg_convolution_block(channels_in, channels, options["batch_norm"]))
            channels_in = channels
        elif extent >= 2:  # an 8x8 or 28x28 image is a single pixel before the last pools
            blocks.append(nn.MaxPool2d(2))
            extent //= 2
    head = nn.Linear(channels_in * extent * extent, classes)
    nn.init.normal_(head.weight, 0.0, 0.01)
    nn.init.zeros_(head.bias)
    return nn.Sequential(*blocks, nn.Sequential(nn.Flatten(), head))


def _vgg_convolution_block(channels_in: int, channels: int, batch_norm: bool) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, 3, padding=1)
    # torchvision's initialisation: torch's own default lets the signal die in eight layers without BatchNorm.
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    assert convolution.bias is not None
    nn.init.zeros_(convolution.bias)
    norm = [nn.BatchNorm2d(channels)] if batch_norm else []
    return nn.Sequential(convolution, *norm, nn.ReLU(inplace=True))


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


def build_vit(name: str, in_shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Sequential:
    """``name`` for images of ``in_shape`` (channels, height, width): embedding, blocks, head."""
    layers, width, heads, patch = _VIT_SIZES[name]
    blocks: list[nn.Module] = [PatchEmbedding(in_shape[0], in_shape[-1], width, patch, options["dropout"])]
    blocks += [
        TransformerBlock(width, heads, causal=False, dropout=options["dropout"], epsilon=_LAYER_NORM_EPSILON)
        for _ in range(layers)
    ]
    return nn.Sequential(*blocks, ClassHead(width, classes))
