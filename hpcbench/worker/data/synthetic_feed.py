"""Synthetic learnable samples in a data set's shape, resident on the device or on the host."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.workloads import DATASETS
from hpcbench.worker.data.feed import Batch, DataFeed

BATCH_SLOTS = 2
"""Distinct batches per replica; step k takes number k % SLOTS. Memory does not grow with the world."""
LARGE_SAMPLE_NUMBERS = 2**26
"""Numbers in a sample (256 MiB in fp32) from which a replica has one batch alone: drawing another takes a minute."""

_PATTERN_EDGE = 4
_MAX_PATTERN_NUMBERS = 2**22
"""Numbers: so much is held beside the samples while their patterns are added."""


class SyntheticFeed(DataFeed):
    """Samples are drawn on the host, so that every device and every number of ranks sees the same ones.

    With ``data = "host"`` they stay there (pinned for cuda) and every step copies its own, as a loader's would be.
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
        self._patterns = self._make_patterns(kind, source)
        self._slots: dict[tuple[int, int], Batch] = {}

    def _make_patterns(self, kind: str, source: torch.Generator) -> Tensor:
        if kind == "tokens":
            return torch.randint(self.classes, (_PHRASE_LENGTH,), generator=source)
        coarse = [_PATTERN_EDGE for _ in self.shape[1:]]
        return torch.randn(self.classes, self.shape[0], *coarse, generator=source)

    def prepare(self, replica: int) -> None:
        """Make all slots of ``replica``."""
        for slot in range(self.slots):
            self._slot(slot, replica)

    def batch(self, step: int, replica: int) -> Batch:
        """The beginning of the slot where the batch is partial."""
        inputs, targets = self._slot(step % self.slots, replica)
        count = self.count(step, replica)
        if count != self.batch_size:
            inputs, targets = inputs[:count], targets[:count]
        return (inputs, targets) if self.storage == "device" else (self._copy(inputs), self._copy(targets))

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True, copy=True)

    def forget(self) -> None:
        """Free all slots."""
        self._slots.clear()

    def _slot(self, slot: int, replica: int) -> Batch:
        key = (slot, replica)
        if key not in self._slots:
            source = torch.Generator().manual_seed(((self.seed * 1_000_003 + slot) * 1_000_003 + replica) % 2**63)
            drawn = self._draw(self._patterns, self.batch_size, self.shape, source)
            inputs, targets = (self.place(tensor, self._home) for tensor in drawn)
            self._slots[key] = (inputs.pin_memory(), targets.pin_memory()) if self._pinned else (inputs, targets)
        return self._slots[key]


def draw_images(patterns: Tensor, count: int, shape: tuple[int, ...], source: torch.Generator) -> Batch:
    """Every class has a coarse pattern; a sample is its class's pattern plus as much noise."""
    labels = torch.randint(len(patterns), (count,), generator=source)
    inputs = torch.randn(count, *shape, generator=source)
    _add_patterns(inputs, patterns[labels])
    return inputs, labels


def draw_volumes(patterns: Tensor, count: int, shape: tuple[int, ...], source: torch.Generator) -> Batch:
    """Noise plus patterns weighted by the values to be found: [n, values] in [-1, 1]."""
    values = torch.rand(count, len(patterns), generator=source) * 2 - 1
    inputs = torch.randn(count, *shape, generator=source)
    _add_patterns(inputs, torch.einsum("nv,vcdhw->ncdhw", values, patterns))
    return inputs, values


def _add_patterns(inputs: Tensor, coarse: Tensor) -> None:
    """Add to each sample its coarse pattern at the sample's size; never for all of them at once."""
    first = inputs[0]
    samples = max(1, _MAX_PATTERN_NUMBERS // first.numel())
    if first.numel() <= _MAX_PATTERN_NUMBERS:
        for some, pattern in zip(torch.split(inputs, samples), torch.split(coarse, samples), strict=True):
            some.add_(F.interpolate(pattern, size=inputs.shape[2:]))
        return
    for sample, pattern in zip(inputs, coarse, strict=True):
        for channel, of_channel in zip(sample, pattern, strict=True):
            channel.add_(F.interpolate(of_channel[None, None], size=inputs.shape[2:])[0, 0])


_PHRASE_LENGTH = 31
"""Length of the phrase that token sequences repeat."""
_NOISE_FRACTION = 0.1


def draw_tokens(phrase: Tensor, count: int, shape: tuple[int, ...], source: torch.Generator) -> Batch:
    """A phrase said over and over from anywhere in it, one token in ten misheard; targets are the next tokens."""
    (length,) = shape
    begin = torch.randint(len(phrase), (count, 1), generator=source)
    said = phrase[(begin + torch.arange(length + 1)) % len(phrase)]
    misheard = torch.rand(count, length + 1, generator=source) < _NOISE_FRACTION
    other = phrase[torch.randint(len(phrase), (count, length + 1), generator=source)]
    heard = torch.where(misheard, other, said)
    return heard[:, :-1].contiguous(), heard[:, 1:].contiguous()
