"""Data sets as shapes, targets and counts.

CosmoFlow's counts are those of MLPerf HPC 1.0 (README and configs/cosmo.yaml of mlcommons/hpc: 524,288 sub-volumes of
128^3 to train, 65,536 to validate; version 0.7 had 262,144). Those of the larger volumes follow ParaDL's experiments
(Kahira et al., HPDC 2021).

A package of a third party adds data sets by an entry point of the group ``hpcbench.datasets``: a module with
``DATASETS``."""

from __future__ import annotations

from typing import NamedTuple

from hpcbench.plugins import add_plugins


class Dataset(NamedTuple):
    """``shape`` is one sample, without the batch: channels first for images and volumes, the length for tokens.

    ``outputs`` is how many numbers a model gives: classes, regression targets, or the vocabulary (for each token).
    ``samples`` is one epoch of training; ``held_out`` is for evaluation alone.
    """

    kind: str
    """``images``, ``volumes`` or ``tokens``: the kind of input that a model must take."""
    target: str
    """``class`` (one number a sample), ``values`` (real numbers) or ``tokens`` (the next one at every position)."""
    shape: tuple[int, ...]
    outputs: int
    samples: int
    held_out: int
    synthetic: bool
    """The data can be synthetic, of any size."""
    real: str | None
    """The set's own files below the data folder; ``None`` where there are none to read."""
    description: str


_GPT2_VOCABULARY_SIZE = 50_257
"""GPT-2's byte pairs (Radford et al. 2019)."""

_COSMO_UNIVERSE_FILES = "cosmoflow/train/**/*.hdf5, each with full [n, n, n, 4] and unitPar [4]"
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
        _COSMO_UNIVERSE_FILES, "CosmoFlow as MLPerf cuts it, or its files",
    ),
    "cosmoflow_256": Dataset(
        "volumes", "values", (4, 256, 256, 256), 4, 1584, 176, True, _COSMO_UNIVERSE_FILES, "CosmoFlow, 256^3",
    ),
    "cosmoflow_512": Dataset(
        "volumes", "values", (4, 512, 512, 512), 4, 1584, 176, True, _COSMO_UNIVERSE_FILES, "CosmoFlow, 512^3",
    ),
    "tokens": Dataset(
        "tokens", "tokens", (128,), _GPT2_VOCABULARY_SIZE, 1_000_000, 10_000, True,
        "tokens/train.bin: uint16 in the machine's order", "sequences of GPT-2's 50,257 tokens",
    ),
}  # fmt: skip

FIXED_SIZE_DATASETS = frozenset({"digits", "mnist", "cifar10"})
"""Data sets whose real images have one size and are not changed; other images are cut or resized to the input size."""


def sample_shape(dataset: str, input_size: int | None) -> tuple[int, ...]:
    """The shape of one sample; ``input_size`` replaces every extent, or the length of a sequence."""
    kind, _, shape, *_ = DATASETS[dataset]
    if input_size is None:
        return shape
    return (input_size,) if kind == "tokens" else (shape[0], *(input_size for _ in shape[1:]))


BATCH_SLOTS = 2
"""Distinct synthetic batches per replica; step k takes batch k % BATCH_SLOTS. Memory does not grow with the world
size."""
LARGE_SAMPLE_NUMBERS = 2**26
"""Values in a sample (256 MiB in fp32) from which a replica has a single batch: drawing another takes a minute."""
RESIDENT_DATASETS = ("mnist", "cifar10", "digits")
"""Real sets that stay on the device as a whole."""


def is_resident(dataset: str, data: str) -> bool:
    """Return whether a run holds its whole data set on the device."""
    return dataset == "digits" or (data == "real" and dataset in RESIDENT_DATASETS)


add_plugins("hpcbench.datasets", "DATASETS", Dataset, DATASETS)
