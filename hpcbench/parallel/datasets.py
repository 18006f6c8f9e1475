"""The data sets as numbers: shapes, targets, counts. What feeds them to a replica is the worker's.

CosmoFlow's counts are those of MLPerf HPC 1.0 (README and configs/cosmo.yaml of mlcommons/hpc: 524,288 sub-volumes of
128^3 to train, 65,536 to validate; version 0.7 had 262,144). Those of the larger volumes follow ParaDL's experiments
(Kahira et al., HPDC 2021).
"""

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
    """Can be made up, of any size."""
    real: str | None
    """The set's own files below the data folder; ``None`` where there are none to read."""
    description: str


_VOCABULARY = 50_257
"""GPT-2's byte pairs (Radford et al. 2019)."""

_UNIVERSES = "cosmoflow/train/**/*.hdf5, each with full [n, n, n, 4] and unitPar [4]"
"""ExaLearn's cosmoUniverse files, before they are cut up."""

DATASETS = {
    "digits": Dataset(
        "images", "class", (1, 8, 8), 10, 1500, 297, False, None,
        "handwritten digits that ship with scikit-learn: real, offline",
    ),
    "mnist": Dataset(
        "images", "class", (1, 28, 28), 10, 60_000, 10_000, True,
        "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte, also .gz", "the shape of MNIST, or MNIST",
    ),
    "cifar10": Dataset(
        "images", "class", (3, 32, 32), 10, 50_000, 10_000, True,
        "cifar-10-batches-py/{data_batch_1 ... data_batch_5,test_batch}", "the shape of CIFAR-10, or CIFAR-10",
    ),
    "imagenet": Dataset(
        "images", "class", (3, 224, 224), 1000, 1_281_167, 50_000, True,
        "imagenet/{train,val}/<class>/*.JPEG", "the shape of ImageNet-1k, or its files",
    ),
    "highres": Dataset(
        "images", "class", (3, 512, 512), 1000, 50_000, 10_000, True, None, "DDLBench's 512 x 512 images",
    ),
    "cosmoflow": Dataset(
        "volumes", "values", (4, 128, 128, 128), 4, 524_288, 65_536, True,
        _UNIVERSES, "CosmoFlow as MLPerf cuts it, or its files",
    ),
    "cosmoflow_256": Dataset(
        "volumes", "values", (4, 256, 256, 256), 4, 1584, 176, True, _UNIVERSES, "CosmoFlow, 256^3",
    ),
    "cosmoflow_512": Dataset(
        "volumes", "values", (4, 512, 512, 512), 4, 1584, 176, True, _UNIVERSES, "CosmoFlow, 512^3",
    ),
    "tokens": Dataset(
        "tokens", "tokens", (128,), _VOCABULARY, 1_000_000, 10_000, True,
        "tokens/train.bin: uint16 in the machine's order", "sequences of GPT-2's 50,257 tokens",
    ),
}  # fmt: skip

ONE_SIZE = frozenset({"digits", "mnist", "cifar10"})
"""Their real images have one size and are not changed; those of the others are cut or resized to what is asked."""


def input_shape(dataset: str, input_size: int | None) -> tuple[int, ...]:
    """The shape of one sample; ``input_size`` replaces every extent, or the length of a sequence."""
    found = DATASETS[dataset]
    if input_size is None:
        return found.shape
    if found.kind == "tokens":
        return (input_size,)
    return (found.shape[0], *(input_size for _ in found.shape[1:]))
