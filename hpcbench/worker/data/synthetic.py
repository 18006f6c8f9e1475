"""Made-up images of a data set's shape, resident on the device, with something in them to learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from hpcbench.config.spec import RunSpec
from hpcbench.worker.data.feed import Batch, Feed

SLOTS = 2
"""Distinct batches per replica; step k takes number k % SLOTS. Memory does not grow with the world."""

_COARSE = 4


class Synthetic(Feed):
    """Every class has a coarse pattern; a sample is its class's pattern plus as much noise."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        source = torch.Generator().manual_seed(self.seed)
        self._patterns = torch.randn(self.classes, self.shape[0], _COARSE, _COARSE, generator=source)
        self._slots: dict[tuple[int, int], Batch] = {}

    def prepare(self, replica: int) -> None:
        """Make all slots of ``replica``."""
        for slot in range(SLOTS):
            self._slot(slot, replica)

    def batch(self, step: int, replica: int) -> Batch:
        """[share, channels, height, width] and [share]: the beginning of the slot where the batch is partial."""
        inputs, labels = self._slot(step % SLOTS, replica)
        count = self.count(step, replica)
        return (inputs, labels) if count == self.batch_size else (inputs[:count], labels[:count])

    def _slot(self, slot: int, replica: int) -> Batch:
        key = (slot, replica)
        if key not in self._slots:
            # Made on the host, so that every device and every number of ranks sees the same samples.
            source = torch.Generator().manual_seed(((self.seed * 1_000_003 + slot) * 1_000_003 + replica) % 2**63)
            labels = torch.randint(self.classes, (self.batch_size,), generator=source)
            inputs = torch.randn(self.batch_size, *self.shape, generator=source)
            inputs += F.interpolate(self._patterns[labels], size=self.shape[1:])
            self._slots[key] = (self.place(inputs), labels.to(self.device))
        return self._slots[key]
