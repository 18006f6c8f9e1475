"""Real samples that are few and small enough to lie on the device as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.worker.data.feed import Batch, Feed

_EVALUATION_BATCH = 500


class Resident(Feed):
    """``train`` is one epoch; ``held_out`` is for evaluation alone. Both are inputs and labels on the host."""

    kind = "real"

    def __init__(self, spec: RunSpec, device: torch.device, train: Batch, held_out: Batch) -> None:
        super().__init__(spec, device, samples=len(train[1]))
        self._inputs, self._labels = self.place(train[0]), train[1].to(device)
        self._unseen = (self.place(held_out[0]), held_out[1].to(device))

        self._order: tuple[int, Tensor] = (-1, self._labels)

    def epoch_order(self, epoch: int) -> Tensor:
        """Kept on the device, so that no step has to wait for it."""
        if self._order[0] != epoch:
            self._order = (epoch, super().epoch_order(epoch).to(self.device))
        return self._order[1]

    def prepare(self, replica: int) -> None:
        """Everything is resident already."""
        self.batch(0, replica)

    def batch(self, step: int, replica: int) -> Batch:
        """[share, *shape] and [share]."""
        chosen = self.chosen(step, replica)
        return self.place(self._inputs[chosen]), self._labels[chosen]

    def held_out(self) -> Iterator[Batch]:
        """Images that training never sees."""
        inputs, labels = self._unseen
        return zip(torch.split(inputs, _EVALUATION_BATCH), torch.split(labels, _EVALUATION_BATCH), strict=True)


def normalised(inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """``inputs`` [n, channels, ...] with the channels' ``mean`` taken off, in units of their ``std``."""
    channels = (1, len(mean), *(1 for _ in inputs.shape[2:]))
    return (inputs - torch.tensor(mean).view(channels)) / torch.tensor(std).view(channels)
