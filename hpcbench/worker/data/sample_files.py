"""Readers of samples in files: images, CosmoFlow's HDF5 volumes and flat token files; and the lookup of a run's files.

Readers serve forked processes, and call no torch. pillow and h5py are optional packages, imported when a file of their
kind is opened.
"""

from __future__ import annotations

import bisect
import importlib
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import StorageError, WorkerError, unsupported
from hpcbench.results import data_folder
from hpcbench.workloads.datasets import DATASETS, sample_shape

_VALIDATION_FOLDERS = ("validation", "val", "valid", "test")
_IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
_BYTES_PER_TOKEN = 2
_REPLACE_HINT = "fetch or make this file again"


ChannelStatistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Means and standard deviations of the channels, for values in [0, 1]."""
SYNTHETIC_STATISTICS = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
IMAGENET_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The figures that torchvision's models are trained with."""


class SampleReader(Protocol):
    """A data set in files.

    Args of ``read``: the sample's index, and the numpy arrays to fill: ``inputs`` [*sample shape] and ``target`` [1],
    [values] or [length]. It raises ``WorkerError`` for a file that cannot be read.
    """

    location: str
    """The files' folder, for messages."""

    def __len__(self) -> int: ...

    def read(self, index: int, inputs: Any, target: Any) -> None: ...


class ImageReader:
    """Image files: decoded by pillow, resized and cropped to the exact size, normalised; without augmentation.

    ``files[i]`` has class ``labels[i]``.
    """

    def __init__(
        self, files: Sequence[str], labels: Sequence[int], shape: tuple[int, ...], statistics: ChannelStatistics,
        location: str = "",
    ) -> None:  # fmt: skip
        assert len(files) == len(labels), "every image has a label"
        importlib.import_module("PIL")  # A missing package is reported here, not by a loader worker.
        self.location = location or (str(Path(files[0]).parent.parent) if files else "no images")
        self._files, self._labels, self._shape = files, labels, shape
        channels = (shape[0], 1, 1)
        mean, std = (np.array(values[: shape[0]]) for values in statistics)
        self._factor = (1 / (255 * std)).reshape(channels).astype(np.float32)
        self._offset = (mean / std).reshape(channels).astype(np.float32)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int, inputs: Any, target: Any) -> None:
        """Fill ``inputs`` [channels, height, width] and ``target`` [1]."""
        pixels = decode_image(self._files[index], self._shape)
        np.multiply(pixels, self._factor, out=inputs)
        np.subtract(inputs, self._offset, out=inputs)
        target[0] = self._labels[index]


def decode_image(path: str, shape: tuple[int, ...]) -> Any:
    """Return the pixels of an image file as an array [channels, height, width] of ``shape``.

    The shorter edge is resized, and the middle of the longer one is cut out.

    Raises:
        WorkerError: The file is not a readable image.
    """
    from PIL import Image, UnidentifiedImageError

    channels, height, width = shape
    try:
        with Image.open(path) as file:
            image = file.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise WorkerError(f"cannot read the image {path}: {error}", hint=_REPLACE_HINT) from error
    if image.size != (width, height):
        scale = max(width / image.width, height / image.height)
        resized = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
        image = image.resize(resized, Image.Resampling.BILINEAR)
        left, top = (resized[0] - width) // 2, (resized[1] - height) // 2
        image = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


class VolumeReader:
    """CosmoFlow's HDF5 files: ``full`` [n, n, n, channels] holds matter counts, ``unitPar`` the target values.

    Each file is one sample, or with ``cut`` as many cubes of the samples' size as fit into it. The logarithm of the
    counts is taken (MLPerf's ``apply_log``), and channels come first.
    """

    def __init__(self, files: Sequence[Path], shape: tuple[int, ...], values: int, cut: bool = False) -> None:
        self._h5py = importlib.import_module("h5py")
        self.location = str(files[0].parent)
        self._files, self._shape, self._values = files, shape, values
        extent = self._edge(files[0]) if cut else shape[-1]
        self._per_edge = extent // shape[-1]
        if self._per_edge == 0:
            message = f"{files[0]} holds a volume of {extent}^3, too small for samples of {shape[-1]}^3"
            raise unsupported(message, f"an input_size of {extent} or less")

    def _edge(self, path: Path) -> int:
        try:
            with self._h5py.File(path, "r") as file:
                return int(file["full"].shape[0])
        except (OSError, KeyError, IndexError) as error:
            hint = "HDF5 with full [n, n, n, 4] and unitPar [4] is expected"
            raise unsupported(f"cannot read the volume {path}: {error}", hint) from error

    def __len__(self) -> int:
        return len(self._files) * self._per_edge**3

    def read(self, index: int, inputs: Any, target: Any) -> None:
        """Fill ``inputs`` [channels, n, n, n] and ``target`` [values]; ``WorkerError`` if the file has other shapes."""
        number, cube = divmod(index, self._per_edge**3)
        path = self._files[number]
        size, channels = self._shape[-1], self._shape[0]
        corner = (cube // self._per_edge**2, cube // self._per_edge % self._per_edge, cube % self._per_edge)
        region = tuple(slice(step * size, (step + 1) * size) for step in corner)
        try:
            with self._h5py.File(path, "r") as file:
                full, extent = file["full"], self._per_edge * size
                shape = tuple(full.shape)
                if len(shape) != 4 or shape[3] != channels or min(shape[:3]) < extent:
                    wanted = f"{extent} x {extent} x {extent} x {channels} is wanted"
                    raise WorkerError(f"{path} holds a volume of {' x '.join(map(str, shape))}; {wanted}")
                counts = full[region]
                values = file["unitPar"][: self._values]
        except (OSError, KeyError, RuntimeError) as error:
            raise WorkerError(f"cannot read the volume {path}: {error}", hint=_REPLACE_HINT) from error
        if values.shape != target.shape:
            raise WorkerError(f"{path} has {values.shape} values in unitPar, {target.shape} are wanted")
        # Channel by channel: the whole volume is never in memory twice as floating point.
        for channel in range(channels):
            np.log1p(counts[..., channel], out=inputs[channel], dtype=np.float32, casting="unsafe")
        target[:] = values


class TokenReader:
    """Flat uint16 token files: a sample is ``length`` tokens, its targets are the next tokens.

    Samples follow one another, file after file; a remainder at a file's end is not used. ``counts`` are the samples of
    each file; by default as many as fit into it.
    """

    def __init__(
        self, files: Sequence[Path], length: int, vocabulary: int, counts: Sequence[int] | None = None
    ) -> None:
        self.location = str(files[0].parent)
        self._files, self._length, self._vocabulary = files, length, vocabulary
        self._tokens = [_map_tokens(path) for path in files]
        fitting = [max(0, (len(tokens) - 1) // length) for tokens in self._tokens]
        self._ends = list(accumulate(counts or fitting))
        for path, expected, available in zip(files, counts or fitting, fitting, strict=True):
            if expected > available:
                raise WorkerError(f"{path} holds {available} samples of {length} tokens, {expected} should be there")
        if self._ends[-1] == 0:
            message = (
                f"{files[0]} holds {len(self._tokens[0])} tokens, too few for one sample of {length} and its next token"
            )
            raise unsupported(message, "uint16 tokens one after another, without a header")

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int, inputs: Any, target: Any) -> None:
        """Fill ``inputs`` [length] and ``target`` [length]; ``WorkerError`` for a token beyond the vocabulary."""
        number = bisect.bisect_right(self._ends, index)
        first = (index - (self._ends[number - 1] if number else 0)) * self._length
        tokens = self._tokens[number][first : first + self._length + 1]
        largest = int(tokens.max())
        if largest >= self._vocabulary:
            message = f"{self._files[number]} holds token {largest} near position {first}"
            hint = "uint16 tokens of GPT-2's vocabulary are expected"
            raise WorkerError(f"{message}; the vocabulary has {self._vocabulary}", hint=hint)
        inputs[:] = tokens[:-1]
        target[:] = tokens[1:]


def _map_tokens(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size == 0 or size % _BYTES_PER_TOKEN:
            raise unsupported(f"{path} has {size} bytes, which are no uint16 tokens", "fetch it again")
        return np.memmap(path, dtype=np.uint16, mode="r")
    except OSError as error:
        raise unsupported(f"cannot read the tokens {path}: {error.strerror}") from error


def require_data_folder(spec: RunSpec, folder: Path | None) -> Path:
    """Return ``folder``; ``WorkerError`` (``unsupported``) if none is configured."""
    if folder is None:
        hint = "set data_folder in the cluster's profile, or $HPCBENCH_DATA when submitting"
        raise unsupported(f"data = {spec.data!r} needs a data folder, and none is named", hint)
    return folder


def missing_files_error(spec: RunSpec, folder: Path, what: str) -> WorkerError:
    """Return the error of a data set whose files are not below ``folder``."""
    layout = DATASETS[spec.dataset].real
    hint = f"expected below {folder}: {layout}; another folder: data_folder of the profile, or $HPCBENCH_DATA"
    return unsupported(f"no {what} of {spec.dataset} in {folder}", hint)


def open_synthetic_samples(spec: RunSpec, folder: Path) -> SampleReader:
    """Open the pool that ``hpcbench data make`` wrote for the run's data set and size.

    Raises:
        WorkerError: ``unsupported`` if there is no complete pool of this version.
    """
    shape, dataset = sample_shape(spec.dataset, spec.input_size), DATASETS[spec.dataset]
    size, kind = shape[-1], dataset.kind
    pool = data_folder.synthetic_folder(folder, spec.dataset, size)
    command = data_folder.data_make_command(spec.dataset, size, folder)
    try:
        manifest = data_folder.read_sample_manifest(pool)
    except StorageError as error:
        raise unsupported(error.message, error.hint) from error
    if manifest is None or manifest.format_version != data_folder.SAMPLES_FORMAT_VERSION:
        state = "no complete set of samples" if manifest is None else "samples of another version of hpcbench"
        raise unsupported(f"{state} in {pool}", command)
    files: list[Path] = []
    counts = []
    for number, first in enumerate(range(0, manifest.samples, manifest.per_folder)):
        indices = range(first, min(first + manifest.per_folder, manifest.samples))
        files += data_folder.sample_part_files(data_folder.sample_part_folder(pool, number), kind, indices)
        counts.append(len(indices))
    if kind == "tokens":
        return TokenReader(files, size, dataset.outputs, counts)
    if kind == "volumes":
        return VolumeReader(files, shape, dataset.outputs)
    try:
        labels = msgspec.json.decode((pool / "labels.json").read_bytes(), type=list[int])
    except (OSError, msgspec.MsgspecError):
        labels = []
    if len(labels) < manifest.samples:
        message = f"{pool} says {manifest.samples} samples, but has the labels of {len(labels)}"
        raise unsupported(message, f"remove it, then: {command}")
    return ImageReader([str(path) for path in files], labels[: manifest.samples], shape, SYNTHETIC_STATISTICS)


def open_real_samples(spec: RunSpec, folder: Path, held_out: bool = False) -> SampleReader:
    """Open the data set's own files: the training part, or the part for evaluation (which may be empty).

    Raises:
        WorkerError: ``unsupported`` if the files are missing.
    """
    shape, outputs = sample_shape(spec.dataset, spec.input_size), DATASETS[spec.dataset].outputs
    if spec.dataset == "imagenet":
        return _open_imagenet(spec, folder, shape, held_out)
    if spec.dataset == "tokens":
        path = folder / "tokens" / ("val.bin" if held_out else "train.bin")
        if not path.is_file():
            raise missing_files_error(spec, folder, path.name)
        return TokenReader([path], shape[0], outputs)
    root = folder / "cosmoflow"
    names = [name for name in _VALIDATION_FOLDERS if (root / name).is_dir()] if held_out else ["train"]
    files = data_folder.list_volume_files(root / names[0]) if names and (root / names[0]).is_dir() else []
    if not files:
        raise missing_files_error(spec, folder, "HDF5 files")
    return VolumeReader(files, shape, outputs, cut=True)


def _open_imagenet(spec: RunSpec, folder: Path, shape: tuple[int, ...], held_out: bool) -> SampleReader:
    root = data_folder.find_imagenet(folder)
    if root is None:
        raise missing_files_error(spec, folder, "train folder")
    classes = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
    if len(classes) > DATASETS[spec.dataset].outputs:
        message = f"{root / 'train'} has {len(classes)} classes, {spec.dataset} has {DATASETS[spec.dataset].outputs}"
        raise unsupported(message, "one folder per class, and nothing else")
    part = root / ("val" if held_out else "train")
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        try:
            with os.scandir(part / name) as entries:
                images = sorted(entry.path for entry in entries if entry.name.lower().endswith(_IMAGE_SUFFIXES))
        except FileNotFoundError:
            continue
        files += images
        labels += [label] * len(images)
    if not files and not held_out:
        raise missing_files_error(spec, folder, "images")
    return ImageReader(files, labels, shape, IMAGENET_STATISTICS, location=str(part))
