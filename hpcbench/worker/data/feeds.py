"""The feeds of a run: synthetic samples on the device or the host, samples that background threads read from files, and
the choice among all feeds."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.workloads import BATCH_SLOTS, DATASETS, LARGE_SAMPLE_NUMBERS, is_resident
from hpcbench.worker.data.feed import NO_FILES, Batch, DataFeed, DataSource
from hpcbench.worker.data.resident_feed import ResidentFeed
from hpcbench.worker.data.sample_files import (
    SampleReader,
    open_real_samples,
    open_synthetic_samples,
    require_data_folder,
)
from hpcbench.worker.data.sample_generator import NOISE_FRACTION, PATTERN_EDGE, PHRASE_LENGTH

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


PREFETCHED_BATCHES = 2
"""Batches that are read while a step computes."""
_LARGE_BATCH_BYTES = 2**30
"""Size of a batch from which on only one batch is read ahead."""


SAMPLE_TIMEOUT_S = 300.0
"""A run fails after this time without a single new sample."""
_CLOSE_TIMEOUT_S = 1.0


class SampleLayout:
    """Shapes and dtypes of one sample in memory; ``target`` is ``class``, ``values`` or ``tokens``."""

    def __init__(self, inputs: tuple[int, ...], targets: tuple[int, ...], target: str) -> None:
        self.inputs, self.targets = inputs, targets
        self.inputs_type = torch.int64 if target == "tokens" else torch.float32
        self.targets_type = torch.float32 if target == "values" else torch.int64


class PendingBatch:
    """A batch that reader threads are filling."""

    def __init__(self, indexes: Sequence[int], shape: SampleLayout, pinned: bool) -> None:
        count = len(indexes)
        self.indexes = indexes
        self.inputs = torch.empty(count, *shape.inputs, dtype=shape.inputs_type, pin_memory=pinned)
        self.targets = torch.empty(count, *shape.targets, dtype=shape.targets_type, pin_memory=pinned)
        self.arrays = (self.inputs.numpy(), self.targets.numpy().reshape(count, -1))
        self.error: BaseException | None = None
        self.dropped = False
        self._left = count
        self._progress = threading.Condition()

    def sample_done(self, error: BaseException | None) -> None:
        """Count one more sample, which was read or failed with ``error``."""
        with self._progress:
            self.error = self.error or error
            self._left -= 1
            self._progress.notify_all()

    def wait(self, location: str) -> tuple[Tensor, Tensor]:
        """Return the complete batch; raises the exception of a failed read."""
        with self._progress:
            while self._left and self.error is None:
                before = self._left
                if not self._progress.wait(SAMPLE_TIMEOUT_S) and self._left == before:
                    message = f"waited {SAMPLE_TIMEOUT_S:.0f} s for a sample of {location}: the file system is stuck"
                    raise WorkerError(message)
        if self.error is not None:
            raise self.error
        return self.inputs, self.targets


class BatchLoader:
    """``threads`` readers of one set, which load the next batches while a step computes.

    Reading and decoding release the interpreter lock. The threads are daemons: a rank that ends does not wait for a
    file system.
    """

    def __init__(self, samples: SampleReader, shape: SampleLayout, threads: int, pinned: bool) -> None:
        self.threads = threads
        self._samples, self._shape, self._pinned = samples, shape, pinned
        self._jobs: queue.SimpleQueue[tuple[PendingBatch, int] | None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._serve, name=f"loader-{number}", daemon=True) for number in range(threads)
        ]
        for reader in self._readers:
            reader.start()

    def begin(self, indexes: Sequence[int]) -> PendingBatch:
        """Start reading a batch; returns at once."""
        pending = PendingBatch(indexes, self._shape, self._pinned)
        for position in range(len(indexes)):
            self._jobs.put((pending, position))
        return pending

    def wait(self, pending: PendingBatch) -> tuple[Tensor, Tensor]:
        """Return the batch's inputs and targets on the host."""
        return pending.wait(self._samples.location)

    def close(self) -> None:
        """End the threads, each after its current sample; a thread that is stuck ends with the process."""
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        for _ in self._readers:
            self._jobs.put(None)
        give_up = time.monotonic() + _CLOSE_TIMEOUT_S
        for reader in self._readers:
            reader.join(max(0.0, give_up - time.monotonic()))

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            pending, position = job
            if pending.dropped or pending.error is not None:
                continue
            inputs, targets = pending.arrays
            try:
                self._samples.read(pending.indexes[position], inputs[position], targets[position])
            except BaseException as error:  # noqa: BLE001 - raised by the step that waits
                pending.sample_done(error)
            else:
                pending.sample_done(None)


class FileFeed(DataFeed):
    """Samples in files. A step's data phase is the wait for a batch and its copy to the device; reads overlap steps.

    An epoch repeats the samples of a synthetic pool until it is as long as the data set's.
    """

    storage = "files"

    def __init__(self, spec: RunSpec, device: torch.device, source: DataSource) -> None:
        folder = require_data_folder(spec, source.folder)
        is_real = spec.data == "real"
        samples = open_real_samples(spec, folder) if is_real else open_synthetic_samples(spec, folder)
        super().__init__(spec, device, samples=len(samples) if is_real else None)
        self.kind = "real" if is_real else "synthetic"
        self.distinct_samples = min(self.samples, len(samples))
        self._folder, self._spec, self._samples = folder, spec, samples
        dataset = DATASETS[spec.dataset]
        targets = {"class": (), "values": (dataset.outputs,), "tokens": self.shape}[dataset.target]
        self._layout = SampleLayout(self.shape, targets, dataset.target)
        self._pinned = device.type == "cuda"
        self._loader = BatchLoader(samples, self._layout, max(1, source.threads), self._pinned)
        self._pending: dict[tuple[int, int], PendingBatch] = {}
        self._prefetch_replica: int | None = None
        batch_bytes = 4 * math.prod(self.shape) * self.batch_size
        self._prefetched = PREFETCHED_BATCHES if batch_bytes < _LARGE_BATCH_BYTES else 1

    def prepare(self, replica: int) -> None:
        """Begin to read the first batches; later batches are prefetched for this replica only."""
        self._prefetch_replica = replica
        self._prefetch(range(self._prefetched), replica)

    def batch(self, step: int, replica: int) -> Batch:
        """Return the batch; waits if reading is slower than the steps."""
        pending = self._pending.pop((step, replica), None) or self._begin(step, replica)
        stale = [key for key in self._pending if key[1] == replica and not step < key[0] <= step + self._prefetched]
        for key in stale:
            self._pending.pop(key).dropped = True
        if replica == self._prefetch_replica:
            self._prefetch(range(step + 1, step + 1 + self._prefetched), replica)
        return self._finish(self._loader, pending)

    def held_out(self) -> Iterator[Batch] | None:
        """Return an iterator over the held-out samples (ImageNet's ``val``); ``None`` if there are none."""
        if self.kind != "real" or DATASETS[self._spec.dataset].target != "class":
            return None
        samples = open_real_samples(self._spec, self._folder, held_out=True)
        return self._iterate(samples) if len(samples) else None

    def close(self) -> None:
        self._loader.close()

    def description(self) -> dict[str, Any]:
        """Return the facts for the result, with the data folder and the number of reader threads."""
        return super().description() | {"data_folder": str(self._folder), "loader_workers": self._loader.threads}

    def _iterate(self, samples: SampleReader) -> Iterator[Batch]:
        loader = BatchLoader(samples, self._layout, self._loader.threads, self._pinned)
        pending: deque[PendingBatch] = deque()
        try:
            for first in range(0, len(samples), self.batch_size):
                pending.append(loader.begin(range(first, min(len(samples), first + self.batch_size))))
                if len(pending) > PREFETCHED_BATCHES:
                    yield self._finish(loader, pending.popleft())
            while pending:
                yield self._finish(loader, pending.popleft())
        finally:
            loader.close()

    def _finish(self, loader: BatchLoader, pending: PendingBatch) -> Batch:
        inputs, targets = loader.wait(pending)
        return self.to_device(inputs), self.to_device(targets)

    def _prefetch(self, steps: range, replica: int) -> None:
        for step in steps:
            if (step, replica) not in self._pending:
                self._pending[step, replica] = self._begin(step, replica)

    def _begin(self, step: int, replica: int) -> PendingBatch:
        distinct = len(self._samples)
        return self._loader.begin([index % distinct for index in self.sample_indices(step, replica).tolist()])


def make_feed(spec: RunSpec, device: torch.device, source: DataSource = NO_FILES) -> DataFeed:
    """Create the feed of the run's data set.

    Args:
        spec: The run; ``dataset`` and ``data`` decide the feed.
        device: The device of the batches.
        source: The data folder and the number of reader threads, for data in files.

    Raises:
        WorkerError: ``unsupported`` if the data set's files are missing.
    """
    if is_resident(spec.dataset, spec.data):
        return ResidentFeed(spec, device, source)
    if spec.data in ("device", "host"):
        return SyntheticFeed(spec, device)
    return FileFeed(spec, device, source)
