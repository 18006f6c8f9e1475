"""The ``data make`` program: writes synthetic samples to files with several processes. Interrupted runs are resumable.

Needs no torch.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcbench.errors import ConfigError, StorageError, WorkerError
from hpcbench.fileio import make_folder, write_atomic, write_error
from hpcbench.parallel.workloads import DATASETS, sample_shape
from hpcbench.results.data_folder import (
    MANIFEST_NAME,
    PART_RECORD_NAME,
    SAMPLES_FORMAT_VERSION,
    SampleManifest,
    SamplePart,
    read_sample_manifest,
    read_sample_part,
    sample_part_folder,
    synthetic_folder,
)
from hpcbench.worker.failure import install_hint

if TYPE_CHECKING:
    from hpcbench.worker.data.sample_generator import SampleGenerator

_REQUIRED_PACKAGES = {"images": ("numpy", "PIL"), "volumes": ("numpy", "h5py"), "tokens": ("numpy",)}
_IMAGES_PER_FOLDER = 256
_VOLUME_FOLDER_BYTES = 2**27
_TOKENS_PER_FOLDER = 2**20
_STALE_AFTER_S = 3600.0
_PARENT_POLL_S = 1.0
_MAX_SINGLE_SYNCS = 8
_INTERRUPTED_EXIT_CODE = 130


def default_sample_count(dataset: str, size: int) -> int:
    """A pool that is made in minutes: 2,048 images, 1 to 4 GiB of volumes, 8 Mi tokens."""
    kind = DATASETS[dataset].kind
    if kind == "images":
        return 2048
    if kind == "tokens":
        return max(64, 2**23 // size)
    return max(4, min(64, 2**31 // _volume_bytes(dataset, size)))


def samples_per_folder(dataset: str, size: int) -> int:
    """Samples that lie in one folder, and are made in one go."""
    kind = DATASETS[dataset].kind
    if kind == "images":
        return _IMAGES_PER_FOLDER
    return max(
        1, _TOKENS_PER_FOLDER // size if kind == "tokens" else _VOLUME_FOLDER_BYTES // _volume_bytes(dataset, size)
    )


def _volume_bytes(dataset: str, size: int) -> int:
    return 2 * sample_shape(dataset, size)[0] * size**3


def make_samples(folder: Path, dataset: str, size: int, samples: int, workers: int) -> Iterator[int]:
    """Make ``samples`` of ``dataset``; yields how many are there, at the start and after each folder of them.

    Folders that are complete are left alone, and so is a larger set. Every file appears whole, the manifest last.
    """
    _check_packages(dataset)
    from hpcbench.worker.data.sample_generator import SampleGenerator

    made, each = synthetic_folder(folder, dataset, size), samples_per_folder(dataset, size)
    manifest = _existing_manifest(made, SampleGenerator(dataset, size).parameters())
    if manifest is not None and manifest.samples >= samples:
        yield manifest.samples
        return
    make_folder(made)
    counts = [min(each, samples - first) for first in range(0, samples, each)]
    todo = [number for number, count in enumerate(counts) if not _is_complete(made, number, count)]
    there = samples - sum(counts[number] for number in todo)
    _check_free_space(made, dataset, size, sum(counts[number] for number in todo))
    yield there
    # In an order of its own each: two makers at once seldom work at the same folder.
    random.Random(os.getpid()).shuffle(todo)  # noqa: S311 - no secret
    for number in _make_folders(made, dataset, size, [(number, counts[number]) for number in todo], workers):
        there += counts[number]
        yield there
    _write_manifest(made, dataset, size, counts)


def _existing_manifest(made: Path, parameters: str) -> SampleManifest | None:
    manifest = read_sample_manifest(made)
    if manifest is not None and (manifest.parameters, manifest.format_version) != (parameters, SAMPLES_FORMAT_VERSION):
        raise ConfigError(
            f"{made} holds samples that this version of hpcbench would not make",
            hint="remove it, or make them elsewhere: --folder",
        )
    return manifest


def _is_complete(made: Path, number: int, count: int) -> bool:
    part = read_sample_part(sample_part_folder(made, number))
    return part is not None and part.samples >= count


def _check_packages(dataset: str) -> None:
    for name in _REQUIRED_PACKAGES[DATASETS[dataset].kind]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise WorkerError(f"making {dataset} needs {name}: {error}", hint=install_hint(name)) from error


def _check_free_space(made: Path, dataset: str, size: int, samples: int) -> None:
    kind = DATASETS[dataset].kind
    # A JPEG of noise takes less than a byte a pixel, and its head.
    each = {"images": size * size + 1024, "tokens": 2 * size}.get(kind) or _volume_bytes(dataset, size)
    free = shutil.disk_usage(made).free
    if each * samples > free:
        raise StorageError(
            f"{samples} samples of {dataset} at {size} take about {each * samples} bytes, {made} has {free} free",
            hint="fewer --samples, or another --folder",
        )


def _make_folders(made: Path, dataset: str, size: int, todo: list[tuple[int, int]], workers: int) -> Iterator[int]:
    if workers == 1 or not todo:
        for number, count in todo:
            make_sample_folder(made, dataset, size, number, count)
            yield number
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(todo)), context, _exit_with_parent, (os.getpid(),)
    ) as pool:
        try:
            waiting = {pool.submit(make_sample_folder, made, dataset, size, *one): one[0] for one in todo}
            for done in concurrent.futures.as_completed(waiting):
                done.result()
                yield waiting[done]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _exit_with_parent(parent: int) -> None:
    """A maker that is killed, or interrupted from the keyboard, leaves nobody behind who writes on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def make_sample_folder(made: Path, dataset: str, size: int, number: int, count: int) -> None:
    """Make one folder of samples, unless another maker has meanwhile."""
    from hpcbench.worker.data.sample_generator import SampleGenerator

    if _is_complete(made, number, count):
        return
    folder = sample_part_folder(made, number)
    make_folder(folder)
    _remove_stale_files(folder)
    drawing = SampleGenerator(dataset, size)
    first = number * samples_per_folder(dataset, size)
    labels: list[int] = []
    try:
        if drawing.kind == "tokens":
            paths = [_write_tokens(folder, drawing, number, count)]
        elif drawing.kind == "volumes":
            paths = [_write_volume(folder, drawing, index) for index in range(first, first + count)]
        else:
            written = [_write_image(folder, drawing, index) for index in range(first, first + count)]
            labels, paths = [label for label, _ in written], [path for _, path in written]
        _sync_to_disk(folder, paths)
        part = SamplePart(samples=count, bytes=sum(path.stat().st_size for path in paths), labels=labels)
    except OSError as error:
        raise write_error(error, folder) from error
    write_atomic(folder / PART_RECORD_NAME, msgspec.json.encode(part))


def _sync_to_disk(folder: Path, paths: list[Path]) -> None:
    """Onto the device before anything says that the folder is complete. Many small files together: one by one each
    would wait for the device.
    """
    if len(paths) > _MAX_SINGLE_SYNCS and hasattr(libc := ctypes.CDLL(None, use_errno=True), "syncfs"):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            if libc.syncfs(descriptor) == 0:
                return
        finally:
            os.close(descriptor)
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _atomic_path(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes ``path`` at the end."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_stale_files(folder: Path) -> None:
    """What a maker that was killed has left. Younger files may be another's who is at it."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                path.unlink()


def _write_image(folder: Path, drawing: SampleGenerator, index: int) -> tuple[int, Path]:
    from PIL import Image

    from hpcbench.worker.data.sample_generator import JPEG_QUALITY

    pixels, label = drawing.image(index)
    path = folder / f"{index:08d}.jpg"
    with _atomic_path(path) as temporary:
        Image.fromarray(pixels).save(temporary, "JPEG", quality=JPEG_QUALITY)
    return label, path


def _write_volume(folder: Path, drawing: SampleGenerator, index: int) -> Path:
    import h5py

    counts, values = drawing.volume(index)
    path = folder / f"{index:08d}.hdf5"
    with _atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        file["full"] = counts
        file["unitPar"] = values
    return path


def _write_tokens(folder: Path, drawing: SampleGenerator, number: int, count: int) -> Path:
    path = folder / "tokens.bin"
    with _atomic_path(path) as temporary:
        # The whole stretch is drawn, so that a set that is enlarged begins with the samples that it had.
        said = drawing.tokens(number, samples_per_folder(drawing.dataset, drawing.size))
        said[: count * drawing.size + 1].tofile(temporary)
    return path


def _write_manifest(made: Path, dataset: str, size: int, counts: list[int]) -> None:
    from hpcbench.worker.data.sample_generator import SampleGenerator

    parts = [read_sample_part(sample_part_folder(made, number)) for number in range(len(counts))]
    whole = [part for part in parts if part is not None]
    if len(whole) != len(counts):
        raise StorageError(f"{made}: a folder of samples has gone while others were made", hint="run the command again")
    labels = [label for part, count in zip(whole, counts, strict=True) for label in part.labels[:count]]
    write_atomic(made / "labels.json", msgspec.json.encode(labels))
    manifest = SampleManifest(
        dataset=dataset, size=size, samples=sum(counts), per_folder=samples_per_folder(dataset, size),
        parameters=SampleGenerator(dataset, size).parameters(), bytes=sum(part.bytes for part in whole),
    )  # fmt: skip
    write_atomic(made / MANIFEST_NAME, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def main(words: list[str]) -> int:
    """``data make``: one JSON line per step of progress on standard output."""
    parser = argparse.ArgumentParser(prog="python -m hpcbench.worker data", description=__doc__)
    parser.add_argument("what", choices=["make"])
    parser.add_argument("dataset", choices=sorted(name for name in DATASETS if DATASETS[name].synthetic))
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the data folder")
    parser.add_argument("--size", type=int, metavar="N", help="edge length or tokens; the set's own by default")
    parser.add_argument("--samples", type=int, metavar="N", help="how many different ones")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; one per core by default")
    given = parser.parse_args(words)
    size = given.size or DATASETS[given.dataset].shape[-1]
    samples = given.samples or default_sample_count(given.dataset, size)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # What is half done is another maker's to do again; nothing is waited for.
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED_EXIT_CODE))
    try:
        for there in make_samples(given.folder.absolute(), given.dataset, size, samples, given.workers or cores):
            _print_progress({"done": min(there, samples), "samples": max(samples, there)})
    except BrokenPipeError:
        # Whoever asked has gone.
        os._exit(_INTERRUPTED_EXIT_CODE)
    except BrokenProcessPool as error:
        raise StorageError(
            f"a process that made samples was ended from outside: {error}",
            hint="run the command again; fewer --workers",
        ) from error
    return 0


def _print_progress(progress: dict[str, Any]) -> None:
    print(json.dumps(progress), flush=True)  # noqa: T201 - what the caller reads
