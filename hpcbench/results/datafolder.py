"""What a data folder holds: samples that were made up, with a manifest each, and the sets' own files."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path

import msgspec

from hpcbench.errors import StorageError
from hpcbench.fileio import read_regular, reading_error
from hpcbench.parallel.datasets import DATASETS

FORMAT_VERSION = 1
"""Of made files. Raised whenever the same command would make other samples."""
MANIFEST = "manifest.json"
DONE = "done.json"
"""Lies in a folder of samples that is complete."""

IMAGENET_NAMES = ("imagenet", "ImageNet", "IMAGENET", "ILSVRC2012")
VOLUME_ENDINGS = (".hdf5", ".h5")


class Manifest(msgspec.Struct, kw_only=True):
    """Written last: what a folder of made samples holds as a whole."""

    format_version: int = FORMAT_VERSION
    dataset: str
    size: int
    samples: int
    per_folder: int
    seed: int = 0
    parameters: str
    """Digest of all that the samples follow from."""
    bytes: int


class Part(msgspec.Struct, kw_only=True):
    """``done.json`` of one folder of samples."""

    samples: int
    bytes: int
    labels: list[int] = []


class Found(msgspec.Struct, kw_only=True):
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


def made_folder(folder: Path, dataset: str, size: int) -> Path:
    """``<folder>/<dataset>-<size>``."""
    return folder / f"{dataset}-{size}"


def part_folder(made: Path, number: int) -> Path:
    """One of the folders that the samples are spread over."""
    return made / f"{number:05d}"


def read_manifest(made: Path) -> Manifest | None:
    """The manifest of a complete folder; ``None`` where there is none, ``StorageError`` where it is none of ours."""
    try:
        return msgspec.json.decode(read_regular(made / MANIFEST), type=Manifest)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise reading_error(error, made / MANIFEST) from error
    except msgspec.MsgspecError as error:
        raise StorageError(f"{made / MANIFEST} is no manifest of samples: {error}", hint=f"remove {made}") from error


def read_part(folder: Path) -> Part | None:
    """What ``done.json`` of a folder of samples says; ``None`` where it is not complete."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(read_regular(folder / DONE), type=Part)
    return None


def make_command(dataset: str, size: int, folder: str | Path) -> str:
    """What a person types to have the samples made."""
    own = DATASETS[dataset].shape[-1]
    sized = "" if size == own else f" --size {size}"
    return f"hpcbench data make {dataset}{sized} --folder {shlex.quote(str(folder))}"


def survey(folder: Path) -> list[Found]:
    """Every data set in ``folder``, made and real; images of ImageNet are not counted."""
    if not folder.is_dir():
        return []
    made = [
        found
        for dataset in DATASETS
        for path in sorted(folder.glob(f"{dataset}-*"))
        if path.is_dir() and (found := _made(dataset, path)) is not None
    ]
    return [*made, *_real(folder)]


def _made(dataset: str, path: Path) -> Found | None:
    size = path.name.removeprefix(f"{dataset}-")
    if not size.isdecimal():
        return None
    try:
        manifest = read_manifest(path)
    except StorageError as error:
        return Found(dataset=dataset, kind="made", path=str(path), complete=False, detail=error.message)
    if manifest is not None:
        return Found(
            dataset=dataset, kind="made", size=manifest.size, samples=manifest.samples, bytes=manifest.bytes,
            path=str(path),
        )  # fmt: skip
    parts = [part for inner in sorted(path.iterdir()) if (part := read_part(inner)) is not None]
    return Found(
        dataset=dataset, kind="made", size=int(size), samples=sum(part.samples for part in parts),
        bytes=sum(part.bytes for part in parts), complete=False, path=str(path),
        detail=f"not complete: {make_command(dataset, int(size), path.parent)}",
    )  # fmt: skip


def _real(folder: Path) -> list[Found]:
    found = []
    for dataset, path in (("mnist", folder / "MNIST" / "raw"), ("cifar10", folder / "cifar-10-batches-py")):
        if path.is_dir():
            whole = DATASETS[dataset]
            found.append(_real_one(dataset, path, size=whole.shape[-1]))
    images = imagenet_folder(folder)
    if images is not None:
        with os.scandir(images / "train") as entries:
            classes = sum(entry.is_dir() for entry in entries)
        found.append(_real_one("imagenet", images, detail=f"{classes} classes to train on"))
    if (folder / "cosmoflow" / "train").is_dir():
        universes = len(volume_files(folder / "cosmoflow" / "train"))
        found.append(_real_one("cosmoflow", folder / "cosmoflow", detail=f"{universes} files to train on"))
    tokens = folder / "tokens" / "train.bin"
    if tokens.is_file():
        found.append(_real_one("tokens", tokens, bytes=tokens.stat().st_size))
    return found


def _real_one(dataset: str, path: Path, size: int | None = None, bytes: int | None = None, detail: str = "") -> Found:  # noqa: A002
    return Found(dataset=dataset, kind="real", size=size, bytes=bytes, path=str(path), detail=detail)


def imagenet_folder(folder: Path) -> Path | None:
    """The folder below ``folder`` that holds ImageNet's ``train``."""
    return next((folder / name for name in IMAGENET_NAMES if (folder / name / "train").is_dir()), None)


def volume_files(folder: Path) -> list[Path]:
    """All HDF5 files below ``folder``, in the same order everywhere."""
    return sorted(path for path in folder.rglob("*") if path.suffix in VOLUME_ENDINGS and path.is_file())
