"""Image files: decoded by pillow, resized and cropped to the exact size, normalised. There is no augmentation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from hpcbench.errors import WorkerError

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")


class ChannelStatistics(NamedTuple):
    """Mean and standard deviation of the channels, of values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


SYNTHETIC_STATISTICS = ChannelStatistics((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
IMAGENET_STATISTICS = ChannelStatistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The figures that torchvision's models are trained with."""


class ImageReader:
    """``files[i]`` is of class ``labels[i]``."""

    def __init__(
        self,
        files: Sequence[str],
        labels: Sequence[int],
        shape: tuple[int, ...],
        scale: ChannelStatistics,
        where: str = "",
    ) -> None:
        assert len(files) == len(labels), "every image has a label"
        self.where = where or (str(Path(files[0]).parent.parent) if files else "no images")
        self._files, self._labels, self._shape = files, labels, shape
        channels = (shape[0], 1, 1)
        mean, std = np.array(scale.mean[: shape[0]]), np.array(scale.std[: shape[0]])
        self._factor = (1 / (255 * std)).reshape(channels).astype(np.float32)
        self._offset = (mean / std).reshape(channels).astype(np.float32)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int, inputs: Any, target: Any) -> None:
        """See ``loader.Samples``."""
        pixels = decode_image(self._files[index], self._shape)
        np.multiply(pixels, self._factor, out=inputs)
        np.subtract(inputs, self._offset, out=inputs)
        target[0] = self._labels[index]


def decode_image(path: str, shape: tuple[int, ...]) -> Any:
    """The pixels [channels, height, width] of an image file. ``WorkerError`` names a file that is none."""
    channels, height, width = shape
    try:
        with Image.open(path) as opened:
            image = opened.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise WorkerError(f"cannot read the image {path}: {error}", hint="fetch or make this file again") from error
    pixels = np.asarray(_resize_and_crop(image, width, height))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _resize_and_crop(image: Image.Image, width: int, height: int) -> Image.Image:
    """The shorter edge brought to size, the middle of the longer one cut out."""
    if image.size == (width, height):
        return image
    scale = max(width / image.width, height / image.height)
    scaled = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
    return image.crop((left, top, left + width, top + height))


def list_image_folder(root: Path, classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """Files and labels of ``root/<class>/*``, in the same order everywhere; ``classes[i]`` has label ``i``."""
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        try:
            with os.scandir(root / name) as entries:
                found = sorted(entry.path for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES))
        except FileNotFoundError:
            continue
        files += found
        labels += [label] * len(found)
    return files, labels
