"""Which files a run reads, and what is said where they are not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.errors import StorageError, WorkerError
from hpcbench.parallel.datasets import DATASETS, input_shape
from hpcbench.results.datafolder import (
    FORMAT_VERSION,
    Manifest,
    imagenet_folder,
    made_folder,
    make_command,
    part_folder,
    read_manifest,
    read_part,
    volume_files,
)

if TYPE_CHECKING:
    from hpcbench.worker.data.loader import Samples

_VALIDATION = ("validation", "val", "valid", "test")


def needed_folder(spec: RunSpec, folder: Path | None) -> Path:
    """The data folder; ``unsupported`` where none was named."""
    if folder is None:
        raise WorkerError(
            f"data = {spec.data!r} needs a data folder, and none is named",
            status="unsupported",
            hint="set data_folder in the cluster's profile, or $HPCBENCH_DATA when submitting",
        )
    return folder


def missing_files(spec: RunSpec, folder: Path, what: str) -> WorkerError:
    """The set's own files are not where they should be."""
    layout = DATASETS[spec.dataset].real
    return WorkerError(
        f"no {what} of {spec.dataset} in {folder}",
        status="unsupported",
        hint=f"expected below {folder}: {layout}; another folder: data_folder of the profile, or $HPCBENCH_DATA",
    )


def made_samples(spec: RunSpec, folder: Path) -> Samples:
    """The pool that ``hpcbench data make`` left for the run's data set and size."""
    shape = input_shape(spec.dataset, spec.input_size)
    size, kind = shape[-1], DATASETS[spec.dataset].kind
    made = made_folder(folder, spec.dataset, size)
    try:
        manifest = read_manifest(made)
    except StorageError as error:
        raise WorkerError(error.message, status="unsupported", hint=error.hint) from error
    if manifest is None or manifest.format_version != FORMAT_VERSION:
        state = "no complete set of samples" if manifest is None else "samples of another version of hpcbench"
        raise WorkerError(f"{state} in {made}", status="unsupported", hint=make_command(spec.dataset, size, folder))
    counts = _counts(manifest)
    folders = [part_folder(made, number) for number in range(len(counts))]
    if kind == "tokens":
        from hpcbench.worker.data.tokens import TokenFiles

        return TokenFiles([one / "tokens.bin" for one in folders], size, DATASETS[spec.dataset].outputs, counts)
    numbers = [range(number * manifest.per_folder, number * manifest.per_folder + count)
               for number, count in enumerate(counts)]  # fmt: skip
    if kind == "volumes":
        from hpcbench.worker.data.volumes import Volumes

        return Volumes([one / f"{index:08d}.hdf5" for one, inside in zip(folders, numbers, strict=True)
                        for index in inside], shape, DATASETS[spec.dataset].outputs)  # fmt: skip
    from hpcbench.worker.data.images import MADE, Images

    files = [str(one / f"{index:08d}.jpg") for one, inside in zip(folders, numbers, strict=True) for index in inside]
    return Images(files, _labels(made, manifest), shape, MADE)


def _counts(manifest: Manifest) -> list[int]:
    whole, rest = divmod(manifest.samples, manifest.per_folder)
    return [manifest.per_folder] * whole + ([rest] if rest else [])


def _labels(made: Path, manifest: Manifest) -> list[int]:
    """One small file where the manifest is; its parts are looked at only where that one is gone."""
    try:
        labels: list[int] = msgspec.json.decode((made / "labels.json").read_bytes(), type=list[int])
    except (OSError, msgspec.MsgspecError):
        parts = [read_part(part_folder(made, number)) for number in range(len(_counts(manifest)))]
        labels = [label for part in parts if part for label in part.labels]
    if len(labels) < manifest.samples:
        raise WorkerError(
            f"{made} says {manifest.samples} samples, but has the labels of {len(labels)}",
            status="unsupported",
            hint=f"remove it, then: {make_command(manifest.dataset, manifest.size, made.parent)}",
        )
    return labels[: manifest.samples]


def real_samples(spec: RunSpec, folder: Path, held_out: bool = False) -> Samples:
    """The set's own files: those to train on, or those to evaluate with (which may be none)."""
    shape, outputs = input_shape(spec.dataset, spec.input_size), DATASETS[spec.dataset].outputs
    if spec.dataset == "imagenet":
        return _imagenet(spec, folder, shape, held_out)
    if spec.dataset == "tokens":
        from hpcbench.worker.data.tokens import TokenFiles

        path = folder / "tokens" / ("val.bin" if held_out else "train.bin")
        if not path.is_file():
            raise missing_files(spec, folder, path.name)
        return TokenFiles([path], shape[0], outputs)
    from hpcbench.worker.data.volumes import Volumes

    root = folder / "cosmoflow"
    names = [name for name in _VALIDATION if (root / name).is_dir()] if held_out else ["train"]
    files = volume_files(root / names[0]) if names and (root / names[0]).is_dir() else []
    if not files:
        raise missing_files(spec, folder, "HDF5 files")
    return Volumes(files, shape, outputs, cut=True)


def _imagenet(spec: RunSpec, folder: Path, shape: tuple[int, ...], held_out: bool) -> Samples:
    from hpcbench.worker.data.images import IMAGENET, Images, image_folder

    root = imagenet_folder(folder)
    if root is None:
        raise missing_files(spec, folder, "train folder")
    classes = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
    if len(classes) > DATASETS[spec.dataset].outputs:
        raise WorkerError(
            f"{root / 'train'} has {len(classes)} classes, {spec.dataset} has {DATASETS[spec.dataset].outputs}",
            status="unsupported",
            hint="one folder per class, and nothing else",
        )
    part = root / ("val" if held_out else "train")
    files, labels = image_folder(part, classes) if part.is_dir() else ([], [])
    if not files and not held_out:
        raise missing_files(spec, folder, "images")
    return Images(files, labels, shape, IMAGENET, where=str(part))
