"""The data sets as numbers: shapes, classes, counts. What feeds them to a replica is the worker's."""

from __future__ import annotations

from typing import NamedTuple


class Dataset(NamedTuple):
    """``shape`` is channels first, without the batch; ``samples`` is one epoch of training."""

    shape: tuple[int, ...]
    classes: int
    samples: int
    synthetic: bool
    description: str


DATASETS = {
    "digits": Dataset((1, 8, 8), 10, 1500, False, "handwritten digits that ship with scikit-learn: real, offline"),
    "mnist": Dataset((1, 28, 28), 10, 60_000, True, "the shape of MNIST"),
    "cifar10": Dataset((3, 32, 32), 10, 50_000, True, "the shape of CIFAR-10"),
    "imagenet": Dataset((3, 224, 224), 1000, 1_281_167, True, "the shape of ImageNet-1k"),
}


def input_shape(dataset: str, input_size: int | None) -> tuple[int, ...]:
    """Channels and extents of one sample; ``input_size`` replaces every extent of a synthetic set."""
    shape = DATASETS[dataset].shape
    return shape if input_size is None else (shape[0], *(input_size for _ in shape[1:]))
