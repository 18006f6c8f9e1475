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
from collections.abc import Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hpcbench.errors import ConfigError, StorageError, WorkerError
from hpcbench.fileio import make_folder, write_atomic, write_error
from hpcbench.results import data_folder
from hpcbench.worker.distributed.rank_environment import cpu_mask
from hpcbench.worker.failure import install_hint
from hpcbench.workloads.datasets import DATASETS, sample_shape

if TYPE_CHECKING:
    from hpcbench.worker.data.sample_generator import SampleGenerator

_REQUIRED_PACKAGES = {"images": ("numpy", "PIL"), "volumes": ("numpy", "h5py"), "tokens": ("numpy",)}
_STALE_AFTER_S = 3600.0
_PARENT_POLL_S = 1.0
_MAX_SINGLE_SYNCS = 8
_INTERRUPTED_EXIT_CODE = 130


def default_sample_count(dataset: str, size: int) -> int:
    """Return the samples of a pool that is made in minutes: 2,048 images, 1 to 4 GiB of volumes, 8 Mi tokens."""
    each = _sample_bytes(dataset, size)
    counts = {"images": 2048, "volumes": max(4, min(64, 2**31 // each)), "tokens": max(64, 2**24 // each)}
    return counts[DATASETS[dataset].kind]


def samples_per_folder(dataset: str, size: int) -> int:
    """Return how many samples lie in one folder and are made in one go: 256 images, 128 MiB of volumes, 1 Mi tokens."""
    each = _sample_bytes(dataset, size)
    return max(1, {"images": 256, "volumes": 2**27 // each, "tokens": 2**21 // each}[DATASETS[dataset].kind])


def _sample_bytes(dataset: str, size: int) -> int:
    # A JPEG of noise takes less than a byte a pixel, and its header.
    volume_bytes = 2 * sample_shape(dataset, size)[0] * size**3
    return {"images": size * size + 1024, "volumes": volume_bytes, "tokens": 2 * size}[DATASETS[dataset].kind]


def make_samples(folder: Path, dataset: str, size: int, samples: int, workers: int) -> Generator[int, None, None]:
    """Write a pool of synthetic samples. Complete parts are kept, and so is a larger pool.

    Every file appears complete, the manifest last. Two makers may work on one pool.

    Args:
        folder: The data folder.
        dataset: Name of the data set.
        size: Edge length, or tokens of a sample.
        samples: Number of different samples.
        workers: Number of processes.

    Yields:
        The number of complete samples, at the start and after each part.

    Raises:
        ConfigError: The folder holds samples that were made with other parameters.
        StorageError: Not enough space.
        WorkerError: A package is missing.
    """
    _check_packages(dataset)
    from hpcbench.worker.data.sample_generator import SampleGenerator

    pool, part_samples = data_folder.synthetic_folder(folder, dataset, size), samples_per_folder(dataset, size)
    parameters = SampleGenerator(dataset, size).parameters()
    manifest = data_folder.read_sample_manifest(pool)
    if manifest is not None:
        if (manifest.parameters, manifest.format_version) != (parameters, data_folder.SAMPLES_FORMAT_VERSION):
            message = f"{pool} holds samples that this version of hpcbench would not make"
            raise ConfigError(message, hint="remove it, or make them elsewhere: --folder")
        if manifest.samples >= samples:
            yield manifest.samples
            return
    make_folder(pool)
    counts = [min(part_samples, samples - first) for first in range(0, samples, part_samples)]
    missing = {number: count for number, count in enumerate(counts) if not _is_complete(pool, number, count)}
    complete = samples - sum(missing.values())
    _check_free_space(pool, dataset, size, sum(missing.values()))
    yield complete
    # In a random order: two makers at once seldom work on the same part.
    order = list(missing.items())
    random.Random(os.getpid()).shuffle(order)  # noqa: S311 - no secret
    for count in _make_parts(pool, dataset, size, order, workers):
        complete += count
        yield complete
    _write_manifest(pool, dataset, size, counts, parameters)


def _is_complete(pool: Path, number: int, count: int) -> bool:
    part = data_folder.read_sample_part(data_folder.sample_part_folder(pool, number))
    return part is not None and part.samples >= count


def _check_packages(dataset: str) -> None:
    for name in _REQUIRED_PACKAGES[DATASETS[dataset].kind]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise WorkerError(f"making {dataset} needs {name}: {error}", hint=install_hint(name)) from error


def _check_free_space(pool: Path, dataset: str, size: int, samples: int) -> None:
    needed = _sample_bytes(dataset, size) * samples
    free = shutil.disk_usage(pool).free
    if needed > free:
        message = f"{samples} samples of {dataset} at {size} take about {needed} bytes, {pool} has {free} free"
        raise StorageError(message, hint="fewer --samples, or another --folder")


def _make_parts(pool: Path, dataset: str, size: int, parts: list[tuple[int, int]], workers: int) -> Iterator[int]:
    """Make ``parts`` (number and samples); yield the samples of each one that is complete."""
    make = partial(make_sample_folder, pool, dataset, size)
    if workers == 1:
        yield from (make(number, count) for number, count in parts)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, _exit_with_parent, (os.getpid(),)) as processes:
        try:
            # Processes start here and inherit the mask: an interrupt from the terminal reaches the maker alone.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            futures = [processes.submit(make, number, count) for number, count in parts]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            yield from (future.result() for future in concurrent.futures.as_completed(futures))
        except BaseException:
            # A process that is just starting would print a traceback if the maker ended before it.
            for process in multiprocessing.active_children():
                process.kill()
            processes.shutdown(wait=False, cancel_futures=True)
            raise


def _exit_with_parent(parent: int) -> None:
    """End this process when its parent ends: a maker that is killed or interrupted leaves no writing process behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def make_sample_folder(pool: Path, dataset: str, size: int, number: int, count: int) -> int:
    """Make part ``number``, unless another maker has completed it; returns ``count``, its samples.

    Raises:
        StorageError: the folder cannot be written.
    """
    from hpcbench.worker.data.sample_generator import SampleGenerator

    if _is_complete(pool, number, count):
        return count
    folder = data_folder.sample_part_folder(pool, number)
    make_folder(folder)
    _remove_stale_files(folder)
    generator = SampleGenerator(dataset, size)
    first = number * samples_per_folder(dataset, size)
    paths = data_folder.sample_part_files(folder, generator.kind, range(first, first + count))
    try:
        write = {"images": _write_image, "volumes": _write_volume, "tokens": _write_tokens}[generator.kind]
        labels = [label for index, path in enumerate(paths, first) for label in write(path, generator, index, count)]
        _sync_to_disk(folder, paths)
        part = data_folder.SamplePart(samples=count, bytes=sum(path.stat().st_size for path in paths), labels=labels)
    except OSError as error:
        raise write_error(error, folder) from error
    write_atomic(folder / data_folder.PART_RECORD_NAME, msgspec.json.encode(part))
    return count


def _sync_to_disk(folder: Path, paths: list[Path]) -> None:
    """Write the files to the device before the record of their part; many files together, which is faster."""
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
    """Yield a temporary path that is renamed to ``path`` at the end."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_stale_files(folder: Path) -> None:
    """Remove temporary files of a maker that was killed. Younger ones may belong to a running maker."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                path.unlink()


def _write_image(path: Path, generator: SampleGenerator, index: int, _count: int) -> list[int]:
    """Write one image and return its label."""
    from PIL import Image

    from hpcbench.worker.data.sample_generator import JPEG_QUALITY

    pixels, label = generator.image(index)
    with _atomic_path(path) as temporary:
        Image.fromarray(pixels).save(temporary, "JPEG", quality=JPEG_QUALITY)
    return [label]


def _write_volume(path: Path, generator: SampleGenerator, index: int, _count: int) -> list[int]:
    import h5py

    with _atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        file["full"], file["unitPar"] = generator.volume(index)
    return []


def _write_tokens(path: Path, generator: SampleGenerator, first: int, count: int) -> list[int]:
    # All tokens of the part are generated, so that an enlarged pool begins with the samples that it had.
    whole = samples_per_folder(generator.dataset, generator.size)
    with _atomic_path(path) as temporary:
        generator.tokens(first // whole, whole)[: count * generator.size + 1].tofile(temporary)
    return []


def _write_manifest(pool: Path, dataset: str, size: int, counts: list[int], parameters: str) -> None:
    parts = [
        part
        for number in range(len(counts))
        if (part := data_folder.read_sample_part(data_folder.sample_part_folder(pool, number)))
    ]
    if len(parts) != len(counts):
        raise StorageError(f"{pool}: a folder of samples has gone while others were made", hint="run the command again")
    labels = [label for part, count in zip(parts, counts, strict=True) for label in part.labels[:count]]
    write_atomic(pool / "labels.json", msgspec.json.encode(labels))
    manifest = data_folder.SampleManifest(
        dataset=dataset,
        size=size,
        samples=sum(counts),
        per_folder=samples_per_folder(dataset, size),
        parameters=parameters,
        bytes=sum(part.bytes for part in parts),
    )
    write_atomic(pool / data_folder.MANIFEST_NAME, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def main(words: list[str]) -> int:
    """``data make``: one JSON line per step of progress on standard output."""
    parser = argparse.ArgumentParser(prog="python -m hpcbench.worker data", description=__doc__)
    parser.add_argument("what", choices=["make"])
    parser.add_argument("dataset", choices=sorted(name for name in DATASETS if DATASETS[name].synthetic))
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the data folder")
    parser.add_argument("--size", type=int, metavar="N", help="edge length or tokens; the set's own by default")
    parser.add_argument("--samples", type=int, metavar="N", help="how many different ones")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; one per core by default")
    arguments = parser.parse_args(words)
    size = arguments.size or DATASETS[arguments.dataset].shape[-1]
    samples = arguments.samples or default_sample_count(arguments.dataset, size)
    workers = arguments.workers or len(cpu_mask())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        complete_counts = make_samples(arguments.folder.absolute(), arguments.dataset, size, samples, workers)
        with contextlib.closing(complete_counts) as counts:
            for complete in counts:
                progress = {"done": min(complete, samples), "samples": max(samples, complete)}
                print(json.dumps(progress), flush=True)  # noqa: T201 - the caller reads it
    except KeyboardInterrupt:
        # The next maker makes unfinished parts again.
        return _INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # The caller has ended.
        os._exit(_INTERRUPTED_EXIT_CODE)
    except BrokenProcessPool as error:
        message = f"a process that made samples was ended from outside: {error}"
        raise StorageError(message, hint="run the command again; fewer --workers") from error
    return 0
