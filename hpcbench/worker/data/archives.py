"""MNIST and CIFAR-10 from the files that their authors gave out, in the folders where torchvision keeps them."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.datasets import DATASETS
from hpcbench.worker.data.feed import Batch, Source
from hpcbench.worker.data.resident import Resident, normalised
from hpcbench.worker.data.sets import missing_files, needed_folder

_SCALES = {"mnist": ((0.1307,), (0.3081,)), "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))}
"""Mean and standard deviation of the channels of the training images, in [0, 1]."""
_LARGEST_BYTES = 256 * 2**20
_IDX_BYTE = 0x08


class Archive(Resident):
    """All of it lies on the device; the set's own test part is held out."""

    def __init__(self, spec: RunSpec, device: torch.device, source: Source) -> None:
        self._folder = needed_folder(spec, source.folder)
        read = _mnist if spec.dataset == "mnist" else _cifar10
        train, held_out = read(spec, self._folder)
        super().__init__(spec, device, _scaled(spec.dataset, *train), _scaled(spec.dataset, *held_out))

    def described(self) -> dict[str, Any]:
        """Also where the files are."""
        return {**super().described(), "data_folder": str(self._folder)}


def _scaled(dataset: str, pixels: Tensor, labels: Tensor) -> Batch:
    return normalised(pixels.float() / 255, *_SCALES[dataset]), labels


def _mnist(spec: RunSpec, folder: Path) -> tuple[Batch, Batch]:
    root = folder / "MNIST" / "raw"
    return _mnist_part(spec, folder, root, "train"), _mnist_part(spec, folder, root, "t10k")


def _mnist_part(spec: RunSpec, folder: Path, root: Path, part: str) -> Batch:
    paths = []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        found = next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)
        if found is None:
            raise missing_files(spec, folder, name)
        paths.append(found)
    images, labels = (read_idx(path) for path in paths)
    _check_labels(paths[1], labels, len(images), DATASETS[spec.dataset].outputs)
    if images.shape[1:] != DATASETS[spec.dataset].shape[1:]:
        raise WorkerError(f"{paths[0]} holds images of {images.shape[1:]}, (28, 28) are wanted")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def read_idx(path: Path) -> Any:
    """The array of bytes in an idx file (yann.lecun.com's format), which may be packed by gzip."""
    data = _whole(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _IDX_BYTE or not 1 <= data[3] <= 3:
        raise WorkerError(f"{path} is no idx file of bytes: it begins with {data[:4].hex() or 'nothing'}")
    dims = data[3]
    begin = 4 + 4 * dims
    if len(data) < begin:
        raise WorkerError(f"{path} is cut short: {len(data)} bytes")
    shape = struct.unpack(f">{dims}I", data[4:begin])
    wanted = begin + int(np.prod(shape, dtype=object))
    if len(data) != wanted:
        raise WorkerError(f"{path} has {len(data)} bytes, but its header speaks of {wanted}", hint="fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=begin).reshape(shape).copy()


def _whole(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise WorkerError(f"cannot read {path}: {error}", hint="fetch it again") from error
    if len(data) > _LARGEST_BYTES:
        raise WorkerError(f"{path} is larger than {_LARGEST_BYTES} bytes: none of this set's files")
    return data


def _cifar10(spec: RunSpec, folder: Path) -> tuple[Batch, Batch]:
    root = folder / "cifar-10-batches-py"
    paths = [root / f"data_batch_{number}" for number in range(1, 6)]
    for path in (*paths, root / "test_batch"):
        if not path.is_file():
            raise missing_files(spec, folder, path.name)
    parts = [read_cifar(path) for path in paths]
    train = torch.cat([pixels for pixels, _ in parts]), torch.cat([labels for _, labels in parts])
    return train, read_cifar(root / "test_batch")


def read_cifar(path: Path) -> Batch:
    """One of CIFAR-10's python batches: pixels [n, 3, 32, 32] and labels [n]."""
    try:
        held = _NumbersOnly(io.BytesIO(_whole(path)), encoding="bytes").load()
    except WorkerError:
        raise
    except Exception as error:
        hint = "fetch cifar-10-python.tar.gz again, from its author"
        raise WorkerError(f"{path} is no batch of CIFAR-10: {error}", hint=hint) from error
    pixels = held.get(b"data") if isinstance(held, dict) else None
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise WorkerError(f"{path} is no batch of CIFAR-10: no rows of 3,072 bytes under 'data'", hint="fetch it again")
    labels = np.array(held.get(b"labels"))
    _check_labels(path, labels, len(pixels), 10)
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(labels.astype(np.int64))


def _check_labels(path: Path, labels: Any, count: int, classes: int) -> None:
    if labels.shape != (count,) or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes:
        raise WorkerError(f"{path} does not hold {count} labels from 0 to {classes - 1}", hint="fetch it again")


_RECONSTRUCT = np.empty(0).__reduce__()[0]
_FOUND: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _NumbersOnly(pickle.Unpickler):
    """A pickle can name any function to be called. Those of CIFAR-10 name numpy's arrays, and nothing else is found."""

    def find_class(self, module: str, name: str) -> Any:
        """What an array is made with."""
        if (module, name) not in _FOUND:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch does; nothing of it was run")
        return _FOUND[module, name]
