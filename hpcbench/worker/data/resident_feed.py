"""Real data sets small enough to stay on the device as a whole: MNIST, CIFAR-10 and scikit-learn's digits.

MNIST and CIFAR-10 are read from their original files in torchvision's folder layout."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError, unsupported
from hpcbench.worker.data.feed import Batch, DataFeed, DataSource
from hpcbench.worker.data.sample_files import missing_files_error, require_data_folder
from hpcbench.worker.failure import install_hint
from hpcbench.workloads.datasets import DATASETS

_EVALUATION_BATCH = 500


class ResidentFeed(DataFeed):
    """A whole real data set on the device. Its test part is held out for evaluation."""

    kind = "real"

    def __init__(self, spec: RunSpec, device: torch.device, source: DataSource) -> None:
        self._folder: Path | None = None
        if spec.dataset == "digits":
            inputs, labels = _load_digits()
            count = DATASETS["digits"].samples
            inputs = (inputs - inputs[:count].mean()) / inputs[:count].std()
            train, test = (inputs[:count], labels[:count]), (inputs[count:], labels[count:])
        else:
            self._folder = require_data_folder(spec, source.folder)
            read = _read_mnist_part if spec.dataset == "mnist" else _read_cifar10_part
            parts = [read(spec, self._folder, is_train) for is_train in (True, False)]
            statistics = _CHANNEL_STATISTICS[spec.dataset]
            train, test = ((normalize_channels(pixels.float() / 255, *statistics), labels) for pixels, labels in parts)
        super().__init__(spec, device, samples=len(train[1]))
        self._inputs, self._labels = self.to_device(train[0]), train[1].to(device)
        self._held_out = (self.to_device(test[0]), test[1].to(device))
        self._order: tuple[int, Tensor] = (-1, self._labels)

    def epoch_order(self, epoch: int) -> Tensor:
        """Return the permutation of ``epoch``, cached on the device so that no step waits for it."""
        if self._order[0] != epoch:
            order = super().epoch_order(epoch)
            # A step may begin an epoch: its host must not wait for a copy.
            order = order.pin_memory() if self.device.type == "cuda" else order
            self._order = (epoch, order.to(self.device, non_blocking=True))
        return self._order[1]

    def prepare(self, replica: int) -> None:
        self.batch(0, replica)

    def batch(self, step: int, replica: int) -> Batch:
        indices = self.sample_indices(step, replica)
        return self.to_device(self._inputs[indices]), self._labels[indices]

    def held_out(self) -> Iterator[Batch]:
        inputs, labels = self._held_out
        return zip(torch.split(inputs, _EVALUATION_BATCH), torch.split(labels, _EVALUATION_BATCH), strict=True)

    def description(self) -> dict[str, Any]:
        """Return the facts for the result, with the data folder if there is one."""
        return super().description() | ({} if self._folder is None else {"data_folder": str(self._folder)})


def normalize_channels(inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return ``inputs`` [n, channels, ...] minus the channels' ``mean``, divided by their ``std``."""
    channels = (1, len(mean), *(1 for _ in inputs.shape[2:]))
    return (inputs - torch.tensor(mean).view(channels)) / torch.tensor(std).view(channels)


_CHANNEL_STATISTICS = {"mnist": ((0.1307,), (0.3081,)), "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))}
"""Mean and standard deviation of the channels of the training images, in [0, 1]."""
_MAX_FILE_BYTES = 256 * 2**20
_IDX_UINT8 = 0x08


def _read_mnist_part(spec: RunSpec, folder: Path, is_train: bool) -> Batch:
    root, part, paths = folder / "MNIST" / "raw", "train" if is_train else "t10k", []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        path = next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)
        if path is None:
            raise missing_files_error(spec, folder, name)
        paths.append(path)
    images, labels = (read_idx(path) for path in paths)
    _check_labels(paths[1], labels, len(images), DATASETS[spec.dataset].outputs)
    if images.shape[1:] != DATASETS[spec.dataset].shape[1:]:
        raise WorkerError(f"{paths[0]} holds images of {images.shape[1:]}, (28, 28) are wanted")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def read_idx(path: Path) -> Any:
    """Return the array of bytes in an idx file (yann.lecun.com's format), which may be compressed with gzip.

    Raises:
        WorkerError: the file cannot be read, or is not an idx file of 1 to 3 dims.
    """
    data = _read_whole_file(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _IDX_UINT8 or not 1 <= data[3] <= 3:
        raise WorkerError(f"{path} is not an idx file of bytes: it begins with {data[:4].hex() or 'nothing'}")
    dims = data[3]
    begin = 4 + 4 * dims
    if len(data) < begin:
        raise WorkerError(f"{path} is cut short: {len(data)} bytes")
    shape = struct.unpack(f">{dims}I", data[4:begin])
    expected = begin + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        raise WorkerError(f"{path} has {len(data)} bytes, but its header speaks of {expected}", hint="fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=begin).reshape(shape).copy()


def _read_whole_file(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise WorkerError(f"cannot read {path}: {error}", hint="fetch it again") from error
    if len(data) > _MAX_FILE_BYTES:
        raise WorkerError(f"{path} is larger than {_MAX_FILE_BYTES} bytes: none of this set's files")
    return data


def _read_cifar10_part(spec: RunSpec, folder: Path, is_train: bool) -> Batch:
    root = folder / "cifar-10-batches-py"
    paths = [root / f"data_batch_{number}" for number in range(1, 6)] if is_train else [root / "test_batch"]
    for path in paths:
        if not path.is_file():
            raise missing_files_error(spec, folder, path.name)
    pixels, labels = zip(*(read_cifar_batch(path) for path in paths), strict=True)
    return torch.cat(pixels), torch.cat(labels)


def read_cifar_batch(path: Path) -> Batch:
    """Read one of CIFAR-10's python batches: pixels [n, 3, 32, 32] and labels [n].

    Raises:
        WorkerError: the file cannot be read, or is no such batch.
    """
    try:
        content = _NumpyUnpickler(io.BytesIO(_read_whole_file(path)), encoding="bytes").load()
    except WorkerError:
        raise
    except Exception as error:
        hint = "fetch cifar-10-python.tar.gz again, from its author"
        raise WorkerError(f"{path} is not a batch of CIFAR-10: {error}", hint=hint) from error
    pixels = content.get(b"data") if isinstance(content, dict) else None
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise WorkerError(
            f"{path} is not a batch of CIFAR-10: no rows of 3,072 bytes under 'data'", hint="fetch it again"
        )
    labels = np.array(content.get(b"labels"))
    _check_labels(path, labels, len(pixels), 10)
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(labels.astype(np.int64))


def _check_labels(path: Path, labels: Any, count: int, classes: int) -> None:
    if labels.shape != (count,) or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes:
        raise WorkerError(f"{path} does not hold {count} labels from 0 to {classes - 1}", hint="fetch it again")


_NUMPY_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED_GLOBALS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _NUMPY_RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _NUMPY_RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _NumpyUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays only: a pickle can name any function to be called, those of CIFAR-10 name no other."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the allowed global ``module.name``."""
        if (module, name) not in _ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch does; nothing of it was run")
        return _ALLOWED_GLOBALS[module, name]


@cache
def _load_digits() -> Batch:
    """Load scikit-learn's digits, images [n, 1, 8, 8] and labels [n]: the first 1,500 train, the others are held out.

    ``load_digits`` is avoided because it imports scipy, which costs every rank a second and a file system a thousand
    files. A line of the package's file is 64 pixels and the digit.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise unsupported("dataset digits needs scikit-learn, and this python has none", install_hint("sklearn"))
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
    except OSError as error:
        hint = "python -m pip install --upgrade scikit-learn"
        raise unsupported(f"dataset digits: this scikit-learn has no {path}: {error}", hint) from error
    numbers = bytearray(map(int, text.replace("\n", ",").rstrip(",").split(",")))
    rows = torch.frombuffer(numbers, dtype=torch.uint8).view(-1, 65)
    return rows[:, :-1].double().reshape(-1, 1, 8, 8), rows[:, -1].long()
