"""Made-up samples of a data set's shape, resident on the device, with something in them to learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.datasets import DATASETS
from hpcbench.worker.data.feed import Batch, Feed

SLOTS = 2
"""Distinct batches per replica; step k takes number k % SLOTS. Memory does not grow with the world."""

_COARSE = 4


class Synthetic(Feed):
    """Samples are drawn on the host, so that every device and every number of ranks sees the same ones."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        source = torch.Generator().manual_seed(self.seed)
        self._draw = {"images": draw_images, "volumes": draw_volumes, "tokens": draw_tokens}[
            DATASETS[spec.dataset].kind
        ]
        self._patterns = self._make_patterns(DATASETS[spec.dataset].kind, source)
        self._slots: dict[tuple[int, int], Batch] = {}

    def _make_patterns(self, kind: str, source: torch.Generator) -> Tensor:
        if kind == "tokens":
            return torch.randint(self.classes, (_PERIOD,), generator=source)
        coarse = [_COARSE for _ in self.shape[1:]]
        return torch.randn(self.classes, self.shape[0], *coarse, generator=source)

    def prepare(self, replica: int) -> None:
        """Make all slots of ``replica``."""
        for slot in range(SLOTS):
            self._slot(slot, replica)

    def batch(self, step: int, replica: int) -> Batch:
        """The beginning of the slot where the batch is partial."""
        inputs, labels = self._slot(step % SLOTS, replica)
        count = self.count(step, replica)
        return (inputs, labels) if count == self.batch_size else (inputs[:count], labels[:count])

    def forget(self) -> None:
        """Free all slots."""
        self._slots.clear()

    def _slot(self, slot: int, replica: int) -> Batch:
        key = (slot, replica)
        if key not in self._slots:
            source = torch.Generator().manual_seed(((self.seed * 1_000_003 + slot) * 1_000_003 + replica) % 2**63)
            inputs, targets = self._draw(self._patterns, self.batch_size, self.shape, source)
            self._slots[key] = (self.place(inputs), self.place(targets))
        return self._slots[key]


def draw_images(patterns: Tensor, count: int, shape: tuple[int, ...], source: torch.Generator) -> Batch:
    """Every class has a coarse pattern; a sample is its class's pattern plus as much noise."""
    labels = torch.randint(len(patterns), (count,), generator=source)
    inputs = torch.randn(count, *shape, generator=source)
    inputs += F.interpolate(patterns[labels], size=shape[1:])
    return inputs, labels


def draw_volumes(patterns: Tensor, count: int, shape: tuple[int, ...], source: torch.Generator) -> Batch:
    """Noise plus patterns weighted by the values to be found: [n, values] in [-1, 1]."""
    values = torch.rand(count, len(patterns), generator=source) * 2 - 1
    inputs = torch.randn(count, *shape, generator=source)
    inputs += F.interpolate(torch.einsum("nv,vcdhw->ncdhw", values, patterns), size=shape[1:])
    return inputs, values


_PERIOD = 31
"""Length of the phrase that token sequences repeat."""
_NOISE = 0.1


def draw_tokens(phrase: Tensor, count: int, shape: tuple[int, ...], source: torch.Generator) -> Batch:
    """A phrase said over and over from anywhere in it, one token in ten misheard; targets are the next tokens."""
    (length,) = shape
    begin = torch.randint(len(phrase), (count, 1), generator=source)
    said = phrase[(begin + torch.arange(length + 1)) % len(phrase)]
    misheard = torch.rand(count, length + 1, generator=source) < _NOISE
    other = phrase[torch.randint(len(phrase), (count, length + 1), generator=source)]
    heard = torch.where(misheard, other, said)
    return heard[:, :-1].contiguous(), heard[:, 1:].contiguous()
