"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8, shipped with the package, resident on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.worker.data.feed import Batch, Feed

_EVALUATION_BATCH = 99


class Digits(Feed):
    """The first 1,500 images train, the last 297 are held out; every epoch has its own order from the seed."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        inputs, labels = _load()
        train = inputs[: self.samples]
        inputs = (inputs - train.mean()) / train.std()
        self._inputs = self.place(inputs)
        self._labels = labels.to(device)
        self._order = torch.empty(0, dtype=torch.int64)
        self._epoch = -1

    def prepare(self, replica: int) -> None:
        """Everything is resident already."""
        self.batch(0, replica)

    def batch(self, step: int, replica: int) -> Batch:
        """[share, 1, 8, 8] and [share]."""
        epoch, position = self.position(step)
        if epoch != self._epoch:
            source = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(self.samples, generator=source).to(self.device)
            self._epoch = epoch
        first = position * self.global_batch_size
        share = self.share(step, replica)
        chosen = self._order[first + share.start : first + share.stop]
        return self.place(self._inputs[chosen]), self._labels[chosen]

    def held_out(self) -> Iterator[Batch]:
        """The 297 images that training never sees."""
        return zip(
            torch.split(self._inputs[self.samples :], _EVALUATION_BATCH),
            torch.split(self._labels[self.samples :], _EVALUATION_BATCH),
            strict=True,
        )


def _load() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise WorkerError(
            f"dataset digits needs scikit-learn: {error}",
            status="unsupported",
            hint="python -m pip install scikit-learn",
        ) from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images.astype("float64")).unsqueeze(1)
    return images, torch.from_numpy(bunch.target.astype("int64"))
