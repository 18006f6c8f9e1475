"""Samples of a dry run: full batches of fake tensors, in fewer micro-batches where a step only makes state."""

from __future__ import annotations

import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.workloads import BATCH_SLOTS, DATASETS, LARGE_SAMPLE_NUMBERS, is_resident
from hpcbench.worker.data.feed import Batch, DataFeed
from hpcbench.worker.dry_run.repeated_passes import SteadyWindow
from hpcbench.worker.layers import zero_batch
from hpcbench.worker.strategies.pipeline.p2p import PREFETCHED_RECEIVES
from hpcbench.worker.strategies.pipeline.strategy import PipelineStrategy

_WINDOWS = (PREFETCHED_RECEIVES, PREFETCHED_RECEIVES + 1)
"""Micro-batches of the last two steps of an asynchronous pipeline: as many receives are posted as in a longer one."""


class FakeFeed(DataFeed):
    """Full batches of the run's shapes, held where the run's own feed holds them."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._spec = spec
        # Every step has a full batch.
        self.samples, self.steps_per_epoch = self.global_batch_size * 2**20, 2**20
        self._is_resident = is_resident(spec.dataset, spec.data)
        self._copies = spec.data != "device" and not self._is_resident
        sample_numbers = torch.Size(self.shape).numel()
        slots = 1 if sample_numbers >= LARGE_SAMPLE_NUMBERS else BATCH_SLOTS
        self.is_held = not self._is_resident and not self._copies
        """Whether batches are made once."""
        self.step_lengths: dict[int, int] = {}
        """Micro-batches of a step, where they are fewer than the run's."""
        self._held: list[Batch] = []
        if self._is_resident:
            count = DATASETS[spec.dataset].samples + DATASETS[spec.dataset].held_out
            self._held = [self._make(count)]
            self._indices = torch.zeros(spec.batch_size, dtype=torch.int64, device=device)
        elif not self._copies:
            self._held = [self._make(spec.batch_size) for _ in range(slots)]

    def prepare(self, replica: int) -> None:
        """All batches exist."""

    def micro_batch_ranges(self, step: int, replica: int) -> list[range]:
        ranges = super().micro_batch_ranges(step, replica)
        return ranges[: self.step_lengths.get(step, len(ranges))]

    def batch(self, step: int, replica: int) -> Batch:
        if self._copies:
            inputs, targets = self._make(self.batch_size)
        else:
            inputs, targets = self._held[step % len(self._held)]
        if self._is_resident:
            inputs, targets = inputs[self._indices], targets[self._indices]
        if step not in self.step_lengths:
            return inputs, targets
        count = self.micro_batch_ranges(step, replica)[-1].stop
        return inputs[:count], targets[:count]

    def _make(self, count: int) -> Batch:
        inputs, targets = zero_batch(self._spec, count)
        if self._copies and self.device != torch.device("cpu"):
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return self.to_device(inputs), targets.to(self.device, non_blocking=True)


def shorten_steps(feed: FakeFeed, strategy: PipelineStrategy) -> SteadyWindow | None:
    """Give the steps before the last one, which only make state and records, few micro-batches.

    The windows of an asynchronous pipeline are equal from the second one on, when all weight versions exist: of those
    two short ones are enough, and what a longer one adds to them is the result.
    """
    runtime, staleness = strategy.runtime, get_strategy(strategy.spec.strategy).staleness
    is_asynchronous = staleness is not None
    double_buffered = staleness is not None and staleness(strategy.spec).double_buffered
    if is_asynchronous and (double_buffered or not feed.is_held or feed.micro_batches <= _WINDOWS[-1]):
        feed.step_lengths = dict.fromkeys(range(1), feed.micro_batches)
        return None
    if is_asynchronous:
        fill = min(feed.micro_batches, runtime.layout.stages)
        feed.step_lengths = dict(enumerate((fill, *_WINDOWS)))
        return SteadyWindow(feed.micro_batches - _WINDOWS[-1])
    # A backward pass that creates gradients, one that adds to them, and one that sends them.
    feed.step_lengths = {0: (3 if runtime.reducers else 2) * max(runtime.layout.stage_sizes)}
    return None
