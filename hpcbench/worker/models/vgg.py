"""VGG (Simonyan and Zisserman 2015): the CIFAR form for small images, torchvision's form for larger ones."""

from __future__ import annotations

from typing import Any

from torch import nn

from hpcbench.worker.models.build import SMALL_IMAGE_EDGE, build_torchvision_model

DEFAULTS = {
    "kind": "images",
    "min_size": 8,
    "options": {
        "batch_norm": (True, "below 64 pixels: BatchNorm after every convolution"),
        "dropout": (0.5, "from 64 pixels on: dropout between the linear layers"),
    },
}
MODELS = {
    "vgg11": {"description": "11 layers, no shortcuts, wide; below 64 pixels one linear layer and BatchNorm"},
    "vgg16": {"description": "16 layers, no shortcuts, wide; below 64 pixels one linear layer and BatchNorm"},
}

_POOL = 0
_LAYER_CHANNELS = {
    "vgg11": (64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL),
    "vgg16": (64, 64, _POOL, 128, 128, _POOL, 256, 256, 256, _POOL, 512, 512, 512, _POOL, 512, 512, 512, _POOL),
}


def build(name: str, in_shape: tuple[int, ...], classes: int, options: dict[str, Any]) -> nn.Sequential:
    """``name`` for images of ``in_shape`` (channels, height, width), as a sequence of blocks."""
    if in_shape[-1] >= SMALL_IMAGE_EDGE:
        model = build_torchvision_model(name, classes, dropout=options["dropout"])
        if in_shape[0] != 3:
            model.features[0] = nn.Conv2d(in_shape[0], 64, 3, padding=1)
        return nn.Sequential(*model.features, nn.Sequential(model.avgpool, nn.Flatten()), *model.classifier)
    blocks: list[nn.Module] = []
    channels_in, extent = in_shape[0], in_shape[-1]
    for channels in _LAYER_CHANNELS[name]:
        if channels != _POOL:
            blocks.append(_convolution_block(channels_in, channels, options["batch_norm"]))
            channels_in = channels
        elif extent >= 2:  # an 8x8 or 28x28 image is a single pixel before the last pools
            blocks.append(nn.MaxPool2d(2))
            extent //= 2
    head = nn.Linear(channels_in * extent * extent, classes)
    nn.init.normal_(head.weight, 0.0, 0.01)
    nn.init.zeros_(head.bias)
    return nn.Sequential(*blocks, nn.Sequential(nn.Flatten(), head))


def _convolution_block(channels_in: int, channels: int, batch_norm: bool) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, 3, padding=1)
    # torchvision's initialisation: torch's own default lets the signal die in eight layers without BatchNorm.
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    assert convolution.bias is not None
    nn.init.zeros_(convolution.bias)
    norm = [nn.BatchNorm2d(channels)] if batch_norm else []
    return nn.Sequential(convolution, *norm, nn.ReLU(inplace=True))
