"""The data sets as numbers: shapes, targets, counts. What feeds them to a replica is the worker's."""

from __future__ import annotations

from typing import NamedTuple


class Dataset(NamedTuple):
    """``shape`` is one sample, without the batch: channels first for images and volumes, the length for tokens.

    ``outputs`` is how many numbers a model gives: classes, regression targets, or the vocabulary (for each token).
    ``samples`` is one epoch of training; ``held_out`` is for evaluation alone.
    """

    kind: str
    """``images``, ``volumes`` or ``tokens``: what a model must take."""
    target: str
    """``class`` (one number a sample), ``values`` (real numbers) or ``tokens`` (the next one at every position)."""
    shape: tuple[int, ...]
    outputs: int
    samples: int
    held_out: int
    synthetic: bool
    """Made up, and of any size."""
    description: str


_VOCABULARY = 50_257
"""GPT-2's byte pairs (Radford et al. 2019)."""

DATASETS = {
    "digits": Dataset(
        "images", "class", (1, 8, 8), 10, 1500, 297, False,
        "handwritten digits that ship with scikit-learn: real, offline",
    ),
    "mnist": Dataset("images", "class", (1, 28, 28), 10, 60_000, 10_000, True, "the shape of MNIST"),
    "cifar10": Dataset("images", "class", (3, 32, 32), 10, 50_000, 10_000, True, "the shape of CIFAR-10"),
    "imagenet": Dataset("images", "class", (3, 224, 224), 1000, 1_281_167, 50_000, True, "the shape of ImageNet-1k"),
    "highres": Dataset("images", "class", (3, 512, 512), 1000, 50_000, 10_000, True, "DDLBench's 512 x 512 images"),
    "cosmoflow": Dataset(
        "volumes", "values", (4, 128, 128, 128), 4, 524_288, 65_536, True, "the shape of CosmoFlow as MLPerf cuts it"
    ),
    "cosmoflow_256": Dataset("volumes", "values", (4, 256, 256, 256), 4, 1584, 176, True, "CosmoFlow, 256^3"),
    "cosmoflow_512": Dataset("volumes", "values", (4, 512, 512, 512), 4, 1584, 176, True, "CosmoFlow, 512^3"),
    "tokens": Dataset(
        "tokens", "tokens", (128,), _VOCABULARY, 1_000_000, 10_000, True, "sequences of GPT-2's 50,257 tokens"
    ),
}  # fmt: skip


def input_shape(dataset: str, input_size: int | None) -> tuple[int, ...]:
    """The shape of one sample; ``input_size`` replaces every extent, or the length of a sequence."""
    found = DATASETS[dataset]
    if input_size is None:
        return found.shape
    if found.kind == "tokens":
        return (input_size,)
    return (found.shape[0], *(input_size for _ in found.shape[1:]))
