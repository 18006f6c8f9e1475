"""Synthetic learnable samples in a data set's shape, resident on the device or on the host."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.workloads import DATASETS
from hpcbench.worker.data.feed import Batch, DataFeed
from hpcbench.worker.data.sample_generator import NOISE_FRACTION, PATTERN_EDGE, PHRASE_LENGTH

BATCH_SLOTS = 2
"""Distinct batches per replica; step k takes batch k % BATCH_SLOTS. Memory does not grow with the world size."""
LARGE_SAMPLE_NUMBERS = 2**26
"""Values in a sample (256 MiB in fp32) from which a replica has a single batch: drawing another takes a minute."""
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
