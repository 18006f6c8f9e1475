"""The feed that reads samples from files in the background."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.workloads import DATASETS
from hpcbench.worker.data.batch_loader import BatchLoader, PendingBatch, SampleLayout, SampleReader
from hpcbench.worker.data.feed import Batch, DataFeed, DataSource
from hpcbench.worker.data.sample_files import open_real_samples, open_synthetic_samples, require_data_folder

PREFETCHED_BATCHES = 2
"""Batches that are read while a step computes."""
_LARGE_BATCH_BYTES = 2**30
"""Size of a batch from which on only one batch is read ahead."""


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
        """Iterate over ImageNet's ``val``, if it is there."""
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
