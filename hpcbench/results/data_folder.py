"""The contents of a data folder: synthetic samples with their manifests, and the files of real data sets."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.errors import StorageError
from hpcbench.fileio import read_error, read_regular
from hpcbench.workloads.datasets import DATASETS

SAMPLES_FORMAT_VERSION = 1
"""Version of synthetic files. It is raised whenever the same command would generate other samples."""
MANIFEST_NAME = "manifest.json"
PART_RECORD_NAME = "done.json"
"""Lies in a folder of samples that is complete."""

IMAGENET_NAMES = ("imagenet", "ImageNet", "IMAGENET", "ILSVRC2012")
VOLUME_SUFFIXES = (".hdf5", ".h5")


class SampleManifest(msgspec.Struct, kw_only=True):
    """Written last: what a folder of made samples holds as a whole."""

    format_version: int = SAMPLES_FORMAT_VERSION
    dataset: str
    size: int
    samples: int
    per_folder: int
    seed: int = 0
    parameters: str
    """Digest of all that the samples follow from."""
    bytes: int


class SamplePart(msgspec.Struct, kw_only=True):
    """``done.json`` of one folder of samples."""

    samples: int
    bytes: int
    labels: list[int] = []


class DatasetListing(msgspec.Struct, kw_only=True):
    """One data set in a data folder."""

    dataset: str
    kind: str
    """``made`` or ``real``."""
    size: int | None = None
    samples: int | None = None
    bytes: int | None = None
    complete: bool = True
    path: str
    detail: str = ""


def synthetic_folder(folder: Path, dataset: str, size: int) -> Path:
    """``<folder>/<dataset>-<size>``."""
    return folder / f"{dataset}-{size}"


def sample_part_folder(folder: Path, number: int) -> Path:
    """One of the folders that the samples are spread over."""
    return folder / f"{number:05d}"


def sample_part_files(part: Path, kind: str, indices: range) -> list[Path]:
    """Return the files of the samples ``indices`` in the folder ``part``: one for each, or one for all tokens."""
    if kind == "tokens":
        return [part / "tokens.bin"]
    return [part / f"{index:08d}.{'hdf5' if kind == 'volumes' else 'jpg'}" for index in indices]


def read_sample_manifest(folder: Path) -> SampleManifest | None:
    """The manifest of a complete folder; ``None`` where there is none, ``StorageError`` where it is none of ours."""
    try:
        return msgspec.json.decode(read_regular(folder / MANIFEST_NAME), type=SampleManifest)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_error(error, folder / MANIFEST_NAME) from error
    except msgspec.MsgspecError as error:
        raise StorageError(
            f"{folder / MANIFEST_NAME} is not a manifest of samples: {error}", hint=f"remove {folder}"
        ) from error


def read_sample_part(folder: Path) -> SamplePart | None:
    """Return the contents of a sample folder's ``done.json``; ``None`` if the folder is incomplete."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(read_regular(folder / PART_RECORD_NAME), type=SamplePart)
    return None


def data_make_command(dataset: str, size: int, folder: str | Path) -> str:
    """Return the command that makes the samples."""
    default_size = DATASETS[dataset].shape[-1]
    sized = "" if size == default_size else f" --size {size}"
    return f"hpcbench data make {dataset}{sized} --folder {shlex.quote(str(folder))}"


def list_datasets(folder: Path) -> list[DatasetListing]:
    """Every data set in ``folder``, made and real; images of ImageNet are not counted."""
    if not folder.is_dir():
        return []
    candidates = ((dataset, path) for dataset in DATASETS for path in sorted(folder.glob(f"{dataset}-*")))
    synthetic = [_list_synthetic(dataset, path) for dataset, path in candidates if path.is_dir()]
    listings = [listing for listing in synthetic if listing is not None]

    def add(dataset: str, path: Path, **values: Any) -> None:
        listings.append(DatasetListing(dataset=dataset, kind="real", path=str(path), **values))

    for dataset, path in (("mnist", folder / "MNIST" / "raw"), ("cifar10", folder / "cifar-10-batches-py")):
        if path.is_dir():
            add(dataset, path, size=DATASETS[dataset].shape[-1])
    images = find_imagenet(folder)
    if images is not None:
        classes = sum(path.is_dir() for path in (images / "train").iterdir())
        add("imagenet", images, detail=f"{classes} classes to train on")
    if (folder / "cosmoflow" / "train").is_dir():
        universes = len(list_volume_files(folder / "cosmoflow" / "train"))
        add("cosmoflow", folder / "cosmoflow", detail=f"{universes} files to train on")
    tokens = folder / "tokens" / "train.bin"
    if tokens.is_file():
        add("tokens", tokens, bytes=tokens.stat().st_size)
    return listings


def _list_synthetic(dataset: str, path: Path) -> DatasetListing | None:
    size = path.name.removeprefix(f"{dataset}-")
    if not size.isdecimal():
        return None
    listing = DatasetListing(dataset=dataset, kind="made", path=str(path), size=int(size))
    try:
        manifest = read_sample_manifest(path)
    except StorageError as error:
        return msgspec.structs.replace(listing, size=None, complete=False, detail=error.message)
    if manifest is not None:
        return msgspec.structs.replace(listing, size=manifest.size, samples=manifest.samples, bytes=manifest.bytes)
    parts = [part for inner in sorted(path.iterdir()) if (part := read_sample_part(inner)) is not None]
    samples, size_bytes = sum(part.samples for part in parts), sum(part.bytes for part in parts)
    detail = f"not complete: {data_make_command(dataset, int(size), path.parent)}"
    return msgspec.structs.replace(listing, samples=samples, bytes=size_bytes, complete=False, detail=detail)


def find_imagenet(folder: Path) -> Path | None:
    """Return the folder below ``folder`` that contains ImageNet's ``train``; ``None`` if there is none."""
    return next((folder / name for name in IMAGENET_NAMES if (folder / name / "train").is_dir()), None)


def list_volume_files(folder: Path) -> list[Path]:
    """All HDF5 files below ``folder``, in the same order everywhere."""
    return sorted(path for path in folder.rglob("*") if path.suffix in VOLUME_SUFFIXES and path.is_file())
