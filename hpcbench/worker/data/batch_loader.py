"""Reader threads that load the next batches while a step computes.

Reading and decoding release the interpreter lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hpcbench.errors import WorkerError

SAMPLE_TIMEOUT_S = 300.0
"""A run fails after this time without a single new sample."""
_CLOSE_TIMEOUT_S = 1.0


class SampleReader(Protocol):
    """A data set in files. ``read`` is called from several threads at once and calls no torch, which would start more.

    Args of ``read``: the sample's index, and the numpy arrays to fill: ``inputs`` [*sample shape] and ``target`` [1],
    [values] or [length]. It raises ``WorkerError`` for a file that cannot be read.
    """

    location: str
    """The files' folder, for messages."""

    def __len__(self) -> int: ...

    def read(self, index: int, inputs: Any, target: Any) -> None: ...


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
    """``threads`` readers of one set. They are daemons: a rank that ends does not wait for a file system."""

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
