"""The feed that reads samples from files in the background, and the lookup of the files that a run needs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import StorageError, WorkerError
from hpcbench.parallel.workloads import DATASETS, sample_shape
from hpcbench.results.data_folder import (
    SAMPLES_FORMAT_VERSION,
    SampleManifest,
    data_make_command,
    find_imagenet,
    list_volume_files,
    read_sample_manifest,
    read_sample_part,
    sample_part_folder,
    synthetic_folder,
)
from hpcbench.worker.data.batch_loader import BatchLoader, PendingBatch, SampleLayout, SampleReader
from hpcbench.worker.data.feed import Batch, DataFeed, DataSource

_VALIDATION_FOLDERS = ("validation", "val", "valid", "test")


def require_data_folder(spec: RunSpec, folder: Path | None) -> Path:
    """The data folder; ``unsupported`` where none was named."""
    if folder is None:
        raise WorkerError(
            f"data = {spec.data!r} needs a data folder, and none is named",
            status="unsupported",
            hint="set data_folder in the cluster's profile, or $HPCBENCH_DATA when submitting",
        )
    return folder


def missing_files_error(spec: RunSpec, folder: Path, what: str) -> WorkerError:
    """The set's own files are not where they should be."""
    layout = DATASETS[spec.dataset].real
    return WorkerError(
        f"no {what} of {spec.dataset} in {folder}",
        status="unsupported",
        hint=f"expected below {folder}: {layout}; another folder: data_folder of the profile, or $HPCBENCH_DATA",
    )


def open_synthetic_samples(spec: RunSpec, folder: Path) -> SampleReader:
    """The pool that ``hpcbench data make`` left for the run's data set and size."""
    shape = sample_shape(spec.dataset, spec.input_size)
    size, kind = shape[-1], DATASETS[spec.dataset].kind
    made = synthetic_folder(folder, spec.dataset, size)
    try:
        manifest = read_sample_manifest(made)
    except StorageError as error:
        raise WorkerError(error.message, status="unsupported", hint=error.hint) from error
    if manifest is None or manifest.format_version != SAMPLES_FORMAT_VERSION:
        state = "no complete set of samples" if manifest is None else "samples of another version of hpcbench"
        raise WorkerError(
            f"{state} in {made}", status="unsupported", hint=data_make_command(spec.dataset, size, folder)
        )
    counts = _samples_in_folders(manifest)
    folders = [sample_part_folder(made, number) for number in range(len(counts))]
    if kind == "tokens":
        from hpcbench.worker.data.token_files import TokenReader

        return TokenReader([one / "tokens.bin" for one in folders], size, DATASETS[spec.dataset].outputs, counts)
    numbers = [range(number * manifest.per_folder, number * manifest.per_folder + count)
               for number, count in enumerate(counts)]  # fmt: skip
    if kind == "volumes":
        from hpcbench.worker.data.volume_files import VolumeReader

        return VolumeReader([one / f"{index:08d}.hdf5" for one, inside in zip(folders, numbers, strict=True)
                        for index in inside], shape, DATASETS[spec.dataset].outputs)  # fmt: skip
    from hpcbench.worker.data.image_files import SYNTHETIC_STATISTICS, ImageReader

    files = [str(one / f"{index:08d}.jpg") for one, inside in zip(folders, numbers, strict=True) for index in inside]
    return ImageReader(files, _read_labels(made, manifest), shape, SYNTHETIC_STATISTICS)


def _samples_in_folders(manifest: SampleManifest) -> list[int]:
    whole, rest = divmod(manifest.samples, manifest.per_folder)
    return [manifest.per_folder] * whole + ([rest] if rest else [])


def _read_labels(made: Path, manifest: SampleManifest) -> list[int]:
    """One small file where the manifest is; its parts are looked at only where that one is gone."""
    try:
        labels: list[int] = msgspec.json.decode((made / "labels.json").read_bytes(), type=list[int])
    except (OSError, msgspec.MsgspecError):
        parts = [
            read_sample_part(sample_part_folder(made, number)) for number in range(len(_samples_in_folders(manifest)))
        ]
        labels = [label for part in parts if part for label in part.labels]
    if len(labels) < manifest.samples:
        raise WorkerError(
            f"{made} says {manifest.samples} samples, but has the labels of {len(labels)}",
            status="unsupported",
            hint=f"remove it, then: {data_make_command(manifest.dataset, manifest.size, made.parent)}",
        )
    return labels[: manifest.samples]


def open_real_samples(spec: RunSpec, folder: Path, held_out: bool = False) -> SampleReader:
    """The set's own files: those to train on, or those to evaluate with (which may be none)."""
    shape, outputs = sample_shape(spec.dataset, spec.input_size), DATASETS[spec.dataset].outputs
    if spec.dataset == "imagenet":
        return _open_imagenet(spec, folder, shape, held_out)
    if spec.dataset == "tokens":
        from hpcbench.worker.data.token_files import TokenReader

        path = folder / "tokens" / ("val.bin" if held_out else "train.bin")
        if not path.is_file():
            raise missing_files_error(spec, folder, path.name)
        return TokenReader([path], shape[0], outputs)
    from hpcbench.worker.data.volume_files import VolumeReader

    root = folder / "cosmoflow"
    names = [name for name in _VALIDATION_FOLDERS if (root / name).is_dir()] if held_out else ["train"]
    files = list_volume_files(root / names[0]) if names and (root / names[0]).is_dir() else []
    if not files:
        raise missing_files_error(spec, folder, "HDF5 files")
    return VolumeReader(files, shape, outputs, cut=True)


def _open_imagenet(spec: RunSpec, folder: Path, shape: tuple[int, ...], held_out: bool) -> SampleReader:
    from hpcbench.worker.data.image_files import IMAGENET_STATISTICS, ImageReader, list_image_folder

    root = find_imagenet(folder)
    if root is None:
        raise missing_files_error(spec, folder, "train folder")
    classes = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
    if len(classes) > DATASETS[spec.dataset].outputs:
        raise WorkerError(
            f"{root / 'train'} has {len(classes)} classes, {spec.dataset} has {DATASETS[spec.dataset].outputs}",
            status="unsupported",
            hint="one folder per class, and nothing else",
        )
    part = root / ("val" if held_out else "train")
    files, labels = list_image_folder(part, classes) if part.is_dir() else ([], [])
    if not files and not held_out:
        raise missing_files_error(spec, folder, "images")
    return ImageReader(files, labels, shape, IMAGENET_STATISTICS, where=str(part))


PREFETCHED_BATCHES = 2
"""Batches that are read while a step computes."""
_LARGE_BATCH_BYTES = 2**30
"""A batch of this size is read ahead alone."""


class FileFeed(DataFeed):
    """The wait for a batch, and its copy to the device, are the step's data phase; reading goes on behind it.

    Of a made-up pool the epoch takes its samples again and again until it is as long as the data set's.
    """

    storage = "files"

    def __init__(self, spec: RunSpec, device: torch.device, source: DataSource) -> None:
        folder = require_data_folder(spec, source.folder)
        found = open_real_samples(spec, folder) if spec.data == "real" else open_synthetic_samples(spec, folder)
        super().__init__(spec, device, samples=len(found) if spec.data == "real" else None)
        self.kind = "real" if spec.data == "real" else "synthetic"
        self.distinct_samples = min(self.samples, len(found))
        self._folder, self._spec, self._samples = folder, spec, found
        dataset = DATASETS[spec.dataset]
        targets = {"class": (), "values": (dataset.outputs,), "tokens": self.shape}[dataset.target]
        self._layout = SampleLayout(self.shape, targets, dataset.target)
        self._pinned = device.type == "cuda"
        self._loader = BatchLoader(found, self._layout, max(1, source.threads), self._pinned)
        self._pending: dict[tuple[int, int], PendingBatch] = {}
        self._ahead_of: int | None = None
        batch_bytes = 4 * math.prod(self.shape) * self.batch_size
        self._ahead = PREFETCHED_BATCHES if batch_bytes < _LARGE_BATCH_BYTES else 1

    def prepare(self, replica: int) -> None:
        """Begin to read the first batches; later ones are read ahead for this replica alone."""
        self._ahead_of = replica
        self._read_ahead(range(self._ahead), replica)

    def batch(self, step: int, replica: int) -> Batch:
        """Waits where reading is slower than the steps."""
        loading = self._pending.pop((step, replica), None) or self._begin(step, replica)
        for key in [key for key in self._pending if key[1] == replica and not step < key[0] <= step + self._ahead]:
            self._pending.pop(key).dropped = True
        if replica == self._ahead_of:
            self._read_ahead(range(step + 1, step + 1 + self._ahead), replica)
        return self._placed(self._loader, loading)

    def held_out(self) -> Iterator[Batch] | None:
        """ImageNet's ``val``, where it is there."""
        unseen = open_real_samples(self._spec, self._folder, held_out=True) if self._has_held_out() else None
        return self._evaluate(unseen) if unseen is not None and len(unseen) else None

    def close(self) -> None:
        """End the threads."""
        self._loader.close()

    def described(self) -> dict[str, Any]:
        """Also where the files are and how many threads read them."""
        return {**super().described(), "data_folder": str(self._folder), "loader_workers": self._loader.threads}

    def _has_held_out(self) -> bool:
        return self.kind == "real" and DATASETS[self._spec.dataset].target == "class"

    def _evaluate(self, unseen: SampleReader) -> Iterator[Batch]:
        loader = BatchLoader(unseen, self._layout, self._loader.threads, self._pinned)
        waiting: deque[PendingBatch] = deque()
        try:
            for first in range(0, len(unseen), self.batch_size):
                waiting.append(loader.begin(range(first, min(len(unseen), first + self.batch_size))))
                if len(waiting) > PREFETCHED_BATCHES:
                    yield self._placed(loader, waiting.popleft())
            while waiting:
                yield self._placed(loader, waiting.popleft())
        finally:
            loader.close()

    def _placed(self, loader: BatchLoader, loading: PendingBatch) -> Batch:
        inputs, targets = loader.wait(loading)
        return self.place(inputs), self.place(targets)

    def _read_ahead(self, steps: range, replica: int) -> None:
        for step in steps:
            if (step, replica) not in self._pending:
                self._pending[step, replica] = self._begin(step, replica)

    def _begin(self, step: int, replica: int) -> PendingBatch:
        distinct = len(self._samples)
        return self._loader.begin([index % distinct for index in self.chosen(step, replica).tolist()])
