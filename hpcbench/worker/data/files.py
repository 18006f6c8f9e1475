"""Samples that are read from files in the background: made-up pools, ImageNet, CosmoFlow, tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.datasets import DATASETS
from hpcbench.worker.data.feed import Batch, Feed, Source
from hpcbench.worker.data.loader import Loader, Loading, Samples, Shape
from hpcbench.worker.data.sets import made_samples, needed_folder, real_samples

AHEAD = 2
"""Batches that are read while a step computes."""
_LARGE_BYTES = 2**30
"""A batch of this size is read ahead alone."""


class Files(Feed):
    """The wait for a batch, and its copy to the device, are the step's data phase; reading goes on behind it.

    Of a made-up pool the epoch takes its samples again and again until it is as long as the data set's.
    """

    storage = "files"

    def __init__(self, spec: RunSpec, device: torch.device, source: Source) -> None:
        folder = needed_folder(spec, source.folder)
        found = real_samples(spec, folder) if spec.data == "real" else made_samples(spec, folder)
        super().__init__(spec, device, samples=len(found) if spec.data == "real" else None)
        self.kind = "real" if spec.data == "real" else "synthetic"
        self.distinct_samples = min(self.samples, len(found))
        self._folder, self._spec, self._samples = folder, spec, found
        dataset = DATASETS[spec.dataset]
        targets = {"class": (), "values": (dataset.outputs,), "tokens": self.shape}[dataset.target]
        self._layout = Shape(self.shape, targets, dataset.target)
        self._pinned = device.type == "cuda"
        self._loader = Loader(found, self._layout, max(1, source.threads), self._pinned)
        self._pending: dict[tuple[int, int], Loading] = {}
        self._ahead_of: int | None = None
        batch_bytes = 4 * math.prod(self.shape) * self.batch_size
        self._ahead = AHEAD if batch_bytes < _LARGE_BYTES else 1

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
        unseen = real_samples(self._spec, self._folder, held_out=True) if self._has_held_out() else None
        return self._evaluate(unseen) if unseen is not None and len(unseen) else None

    def close(self) -> None:
        """End the threads."""
        self._loader.close()

    def described(self) -> dict[str, Any]:
        """Also where the files are and how many threads read them."""
        return {**super().described(), "data_folder": str(self._folder), "loader_workers": self._loader.threads}

    def _has_held_out(self) -> bool:
        return self.kind == "real" and DATASETS[self._spec.dataset].target == "class"

    def _evaluate(self, unseen: Samples) -> Iterator[Batch]:
        loader = Loader(unseen, self._layout, self._loader.threads, self._pinned)
        waiting: deque[Loading] = deque()
        try:
            for first in range(0, len(unseen), self.batch_size):
                waiting.append(loader.begin(range(first, min(len(unseen), first + self.batch_size))))
                if len(waiting) > AHEAD:
                    yield self._placed(loader, waiting.popleft())
            while waiting:
                yield self._placed(loader, waiting.popleft())
        finally:
            loader.close()

    def _placed(self, loader: Loader, loading: Loading) -> Batch:
        inputs, targets = loader.wait(loading)
        return self.place(inputs), self.place(targets)

    def _read_ahead(self, steps: range, replica: int) -> None:
        for step in steps:
            if (step, replica) not in self._pending:
                self._pending[step, replica] = self._begin(step, replica)

    def _begin(self, step: int, replica: int) -> Loading:
        distinct = len(self._samples)
        return self._loader.begin([index % distinct for index in self.chosen(step, replica).tolist()])
