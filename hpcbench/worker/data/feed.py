"""What a strategy asks for its samples: which ones are a replica's in a step, and how many there truly are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.datasets import DATASETS, input_shape
from hpcbench.parallel.shard import dropped_samples, even_ranges, steps_per_epoch

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

Batch = tuple[Tensor, Tensor]
"""Inputs [samples, *shape] and targets (see ``worker.losses``), on the run's device."""


class Feed(ABC):
    """The run's samples. Any replica's share can be asked for, so that one process can compute what all do."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        dataset = DATASETS[spec.dataset]
        self.shape = input_shape(spec.dataset, spec.input_size)
        self.classes = dataset.outputs
        self.samples = dataset.samples
        self.batch_size = spec.batch_size
        self.replicas = spec.dp_degree
        self.global_batch_size = spec.global_batch_size
        self.seed = spec.seed + spec.repeat
        self.device = device
        self.dtype = torch.float64 if spec.precision == "fp64" else torch.float32
        self.channels_last = spec.channels_last
        self.steps_per_epoch = steps_per_epoch(self.samples, self.global_batch_size, self.replicas)
        self.dropped = dropped_samples(self.samples, self.global_batch_size, self.replicas)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, step within it)."""
        return divmod(step, self.steps_per_epoch)

    def global_count(self, step: int) -> int:
        """Samples that all replicas together take in ``step``: fewer in the last step of an epoch."""
        first = (step % self.steps_per_epoch) * self.global_batch_size
        return min(self.global_batch_size, self.samples - first)

    def share(self, step: int, replica: int) -> range:
        """Positions within the step's batch that are ``replica``'s (``parallel.shard.step_shares``)."""
        return _shares(self.global_count(step), self.replicas)[replica]

    def count(self, step: int, replica: int) -> int:
        """Samples of ``replica`` in ``step``."""
        return len(self.share(step, replica))

    @abstractmethod
    def prepare(self, replica: int) -> None:
        """Do now what would else fall into the first steps."""

    @abstractmethod
    def batch(self, step: int, replica: int) -> Batch:
        """The samples of ``replica`` in ``step``."""

    def forget(self) -> None:  # noqa: B027 - most keep nothing
        """Free what is kept of batches that were made; a batch that is asked for again is the same one."""

    def held_out(self) -> Iterator[Batch] | None:
        """Samples that training never sees; ``None`` where there are no real ones."""
        return None

    def place(self, inputs: Tensor) -> Tensor:
        """``inputs`` in the run's type and memory format (integers keep theirs), on its device."""
        if not inputs.is_floating_point():
            return inputs.to(self.device)
        layout = _CHANNELS_LAST.get(inputs.dim()) if self.channels_last else None
        return inputs.to(self.device, self.dtype).contiguous(memory_format=layout or torch.contiguous_format)


@lru_cache(maxsize=8)
def _shares(count: int, replicas: int) -> list[range]:
    return even_ranges(count, replicas)


def make_feed(spec: RunSpec, device: torch.device) -> Feed:
    """The feed of the run's data set."""
    if DATASETS[spec.dataset].synthetic:
        from hpcbench.worker.data.synthetic import Synthetic

        return Synthetic(spec, device)
    from hpcbench.worker.data.digits import Digits

    return Digits(spec, device)
