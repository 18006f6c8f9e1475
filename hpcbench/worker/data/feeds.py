"""The feeds of a run: synthetic samples on the device or the host, samples that worker processes read from files, and
the choice among all feeds."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.worker.data.feed import NO_FILES, Batch, DataFeed, DataSource
from hpcbench.worker.data.resident_feed import ResidentFeed
from hpcbench.worker.data.sample_files import (
    SampleReader,
    open_real_samples,
    open_synthetic_samples,
    require_data_folder,
)
from hpcbench.worker.data.sample_generator import NOISE_FRACTION, PATTERN_EDGE, PHRASE_LENGTH
from hpcbench.workloads.datasets import BATCH_SLOTS, DATASETS, LARGE_SAMPLE_NUMBERS, is_resident

_MAX_PATTERN_NUMBERS = 2**22
"""Values that are held beside the samples while their patterns are added."""


class SyntheticFeed(DataFeed):
    """Samples drawn on the host, so that every device and every number of ranks gets the same ones.

    With ``data = "host"`` they stay there (pinned for cuda) and every step copies its batch, as with a data loader.
    """

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.storage = spec.data
        self._home = device if spec.data == "device" else torch.device("cpu")
        self._pinned = spec.data == "host" and device.type == "cuda"
        self.slots = 1 if math.prod(self.shape) >= LARGE_SAMPLE_NUMBERS else BATCH_SLOTS
        self.distinct_samples = min(self.samples, self.slots * self.global_batch_size)
        source = torch.Generator().manual_seed(self.seed)
        kind = DATASETS[spec.dataset].kind
        self._draw = {"images": draw_images, "volumes": draw_volumes, "tokens": draw_tokens}[kind]
        if kind == "tokens":
            self._patterns = torch.randint(self.classes, (PHRASE_LENGTH,), generator=source)
        else:
            coarse = [PATTERN_EDGE for _ in self.shape[1:]]
            self._patterns = torch.randn(self.classes, self.shape[0], *coarse, generator=source)
        self._slots: dict[tuple[int, int], Batch] = {}

    def prepare(self, replica: int) -> None:
        for slot in range(self.slots):
            self._slot(slot, replica)

    def batch(self, step: int, replica: int) -> Batch:
        """Return the step's slot, or its beginning if the batch is partial."""
        inputs, targets = self._slot(step % self.slots, replica)
        count = self.replica_count(step, replica)
        if count != self.batch_size:
            inputs, targets = inputs[:count], targets[:count]
        if self.storage == "device":
            return inputs, targets
        return (
            inputs.to(self.device, non_blocking=True, copy=True),
            targets.to(self.device, non_blocking=True, copy=True),
        )

    def free(self) -> None:
        self._slots.clear()

    def _slot(self, slot: int, replica: int) -> Batch:
        key = (slot, replica)
        if key not in self._slots:
            source = torch.Generator().manual_seed(((self.seed * 1_000_003 + slot) * 1_000_003 + replica) % 2**63)
            drawn = self._draw(self._patterns, self.batch_size, self.shape, source)
            inputs, targets = (self.to_device(tensor, self._home) for tensor in drawn)
            self._slots[key] = (inputs.pin_memory(), targets.pin_memory()) if self._pinned else (inputs, targets)
        return self._slots[key]


def draw_images(patterns: Tensor, count: int, shape: tuple[int, ...], source: torch.Generator) -> Batch:
    """Draw ``count`` images and labels: a sample is its class's coarse pattern plus as much noise."""
    labels = torch.randint(len(patterns), (count,), generator=source)
    inputs = torch.randn(count, *shape, generator=source)
    _add_patterns(inputs, patterns[labels])
    return inputs, labels


def draw_volumes(patterns: Tensor, count: int, shape: tuple[int, ...], source: torch.Generator) -> Batch:
    """Draw ``count`` volumes and target values [n, values] in [-1, 1]: noise plus patterns weighted by the targets."""
    values = torch.rand(count, len(patterns), generator=source) * 2 - 1
    inputs = torch.randn(count, *shape, generator=source)
    _add_patterns(inputs, torch.einsum("nv,vcdhw->ncdhw", values, patterns))
    return inputs, values


def _add_patterns(inputs: Tensor, coarse: Tensor) -> None:
    """Add to each sample its coarse pattern at the sample's size, a few samples or one channel at a time."""
    values = inputs[0].numel()
    if values <= _MAX_PATTERN_NUMBERS:
        samples = max(1, _MAX_PATTERN_NUMBERS // values)
    else:
        samples, inputs, coarse = 1, inputs.flatten(0, 1).unsqueeze(1), coarse.flatten(0, 1).unsqueeze(1)
    for chunk, pattern in zip(torch.split(inputs, samples), torch.split(coarse, samples), strict=True):
        chunk.add_(F.interpolate(pattern, size=inputs.shape[2:]))


def draw_tokens(phrase: Tensor, count: int, shape: tuple[int, ...], source: torch.Generator) -> Batch:
    """Draw token sequences that repeat a phrase from a random start, one token in ten replaced, and next tokens."""
    (length,) = shape
    begin = torch.randint(len(phrase), (count, 1), generator=source)
    tokens = phrase[(begin + torch.arange(length + 1)) % len(phrase)]
    is_noise = torch.rand(count, length + 1, generator=source) < NOISE_FRACTION
    replacement = phrase[torch.randint(len(phrase), (count, length + 1), generator=source)]
    noisy = torch.where(is_noise, replacement, tokens)
    return noisy[:, :-1].contiguous(), noisy[:, 1:].contiguous()


_PREFETCH_FACTOR = 2
"""Batches that a loader worker reads ahead, torch's default."""
_MAX_SHARED_BYTES = 2**31
"""Bytes of a rank's batches in shared memory: a smaller prefetch, then fewer workers keep below. One batch must fit."""
BATCH_TIMEOUT_S = 600
"""A run fails if it waits for a batch for this time."""


_JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class FileSamples(Dataset[Batch]):
    """The samples of files as ``DataLoader`` reads them: a whole batch at once, in memory that processes share."""

    def __init__(self, samples: SampleReader, inputs: tuple[int, ...], targets: tuple[int, ...], target: str) -> None:
        self._samples, self._inputs, self._targets = samples, inputs, targets
        self._inputs_type = torch.int64 if target == "tokens" else torch.float32
        self._targets_type = torch.float32 if target == "values" else torch.int64

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indexes: Sequence[int], shared: bool = False) -> Batch:
        """Return the samples ``indexes``; raises ``WorkerError`` for a file that cannot be read."""
        inputs = torch.empty(len(indexes), *self._inputs, dtype=self._inputs_type)
        targets = torch.empty(len(indexes), *self._targets, dtype=self._targets_type)
        if shared:
            # Before they are filled: full shared memory is then an error of this process' main thread, which reports
            # it.
            for tensor in (inputs, targets):
                tensor.share_memory_()  # type: ignore[no-untyped-call]
        rows = targets.numpy().reshape(len(indexes), -1)
        for index, row, target in zip(indexes, inputs.numpy(), rows, strict=True):
            self._samples.read(index, row, target)
        return inputs, targets

    def __getitems__(self, indexes: list[int]) -> Batch | WorkerError:
        """Return the batch, or its error: torch would turn a raised one into text, without its status and hint."""
        try:
            return self.read(indexes, shared=True)
        except WorkerError as error:
            return error


class FileFeed(DataFeed):
    """Samples in files. A step's data phase is the wait for a batch and its copy to the device; reads overlap steps.

    An epoch repeats the samples of a synthetic pool until it is as long as the data set's. Worker processes read the
    batches of the replica that is prepared, in the order of steps; this process reads those of others itself.
    """

    storage = "files"

    def __init__(self, spec: RunSpec, device: torch.device, source: DataSource) -> None:
        folder = require_data_folder(spec, source.folder)
        is_real = spec.data == "real"
        samples = open_real_samples(spec, folder) if is_real else open_synthetic_samples(spec, folder)
        super().__init__(spec, device, samples=len(samples) if is_real else None)
        self.kind = "real" if is_real else "synthetic"
        self.distinct_samples = min(self.samples, len(samples))
        self._folder, self._spec, self._location = folder, spec, samples.location
        self._samples = self._with_layout(samples)
        batch_bytes = 4 * math.prod(self.shape) * self.batch_size
        self._workers = max(1, min(source.workers, _MAX_SHARED_BYTES // batch_bytes))
        fits = _PREFETCH_FACTOR * self._workers * batch_bytes <= _MAX_SHARED_BYTES
        self._prefetch_factor = _PREFETCH_FACTOR if fits else 1
        self._replica: int | None = None
        self._loader: DataLoader[Batch] | None = None
        self._batches: Iterator[Any] | None = None
        self._next_step = 0

    def prepare(self, replica: int) -> None:
        """Start the workers, which begin to read the batches of ``replica`` from step 0 on."""
        self._replica = replica
        self._loader = self._open_loader(self._samples, self)
        self._begin_at(0)

    def batch(self, step: int, replica: int) -> Batch:
        """Return the batch; waits if reading is slower than the steps."""
        if replica != self._replica:
            return self._finish(self._samples.read(self._file_indices(step, replica)))
        if step != self._next_step:
            self._begin_at(step)
        self._next_step += 1
        assert self._batches is not None, "prepare begins to read"
        return self._finish(self._wait(self._batches))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of the prepared replica's samples from the next step on: a loader's ``batch_sampler``."""
        assert self._replica is not None, "prepare chooses it"
        return (self._file_indices(step, self._replica) for step in count(self._next_step))

    def _file_indices(self, step: int, replica: int) -> list[int]:
        return [index % len(self._samples) for index in self.sample_indices(step, replica).tolist()]

    def held_out(self) -> Iterator[Batch] | None:
        """Return an iterator over the held-out samples (ImageNet's ``val``); ``None`` if there are none."""
        if self.kind != "real" or DATASETS[self._spec.dataset].target != "class":
            return None
        samples = open_real_samples(self._spec, self._folder, held_out=True)
        return self._iterate(self._with_layout(samples)) if len(samples) else None

    def close(self) -> None:
        """End the workers, each after its current batch or, where it is stuck, with the job."""
        if self._batches is not None:
            _end_workers(self._batches)
        self._batches = self._loader = None

    def description(self) -> dict[str, Any]:
        """Return the facts for the result, with the data folder and the number of loader workers."""
        return super().description() | {"data_folder": str(self._folder), "loader_workers": self._workers}

    def _with_layout(self, samples: SampleReader) -> FileSamples:
        dataset = DATASETS[self._spec.dataset]
        targets = {"class": (), "values": (dataset.outputs,), "tokens": self.shape}[dataset.target]
        return FileSamples(samples, self.shape, targets, dataset.target)

    def _open_loader(self, samples: FileSamples, sampler: Iterable[list[int]]) -> DataLoader[Batch]:
        # By fork: a worker that imports torch anew would cost seconds and a file system a thousand files. Workers touch
        # neither the device nor a process group.
        return DataLoader(
            samples, batch_sampler=sampler, num_workers=self._workers, prefetch_factor=self._prefetch_factor,
            persistent_workers=True, pin_memory=self.device.type == "cuda", collate_fn=lambda read: read,
            worker_init_fn=_leave_signals_to_the_rank, multiprocessing_context="fork", timeout=BATCH_TIMEOUT_S,
        )  # fmt: skip

    def _begin_at(self, step: int) -> None:
        assert self._loader is not None, "prepare opens it"
        self._next_step = step
        self._batches = _start_workers(self._loader)

    def _iterate(self, samples: FileSamples) -> Iterator[Batch]:
        starts = range(0, len(samples), self.batch_size)
        batches = [list(range(first, min(len(samples), first + self.batch_size))) for first in starts]
        read = _start_workers(self._open_loader(samples, batches))
        try:
            for _ in batches:
                yield self._finish(self._wait(read))
        finally:
            _end_workers(read)

    def _wait(self, batches: Iterator[Any]) -> Batch:
        try:
            read: Batch | WorkerError = next(batches)
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            message = f"waited {BATCH_TIMEOUT_S} s for a batch of {self._location}: the file system is stuck"
            raise WorkerError(message) from error
        if isinstance(read, WorkerError):
            raise read
        return read

    def _finish(self, read: Batch) -> Batch:
        inputs, targets = read
        return self.to_device(inputs), self.to_device(targets)


def _end_workers(batches: Any) -> None:
    """End the workers of a loader's iterator: an exception that passes through the run delays its deletion."""
    batches._shutdown_workers()


def _leave_signals_to_the_rank(_worker: int) -> None:
    """A scheduler signals all processes of a job: the rank decides what follows, and ends its workers."""
    signal.set_wakeup_fd(-1)
    for number in _JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _JOB_SIGNALS)


def _start_workers(loader: DataLoader[Batch]) -> Iterator[Any]:
    """Return an iterator over ``loader``; a signal of the job reaches no worker before it leaves them to the rank.

    A worker that such a signal ended would never be missed by torch, which then waits for its batch.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_feed(spec: RunSpec, device: torch.device, source: DataSource = NO_FILES) -> DataFeed:
    """Create the feed of the run's data set.

    Args:
        spec: The run; ``dataset`` and ``data`` decide the feed.
        device: The device of the batches.
        source: The data folder and the number of loader workers, for data in files.

    Raises:
        WorkerError: ``unsupported`` if the data set's files are missing.
    """
    if is_resident(spec.dataset, spec.data):
        return ResidentFeed(spec, device, source)
    if spec.data in ("device", "host"):
        return SyntheticFeed(spec, device)
    return FileFeed(spec, device, source)
