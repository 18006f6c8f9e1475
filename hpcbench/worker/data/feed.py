"""What a strategy asks for its samples: which ones are a replica's in a step, and how many there truly are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.datasets import DATASETS, input_shape
from hpcbench.parallel.shard import dropped_samples, even_ranges, micro_shares, steps_per_epoch

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

Batch = tuple[Tensor, Tensor]
"""Inputs [samples, *shape] and targets (see ``worker.losses``), on the run's device."""


class Source(NamedTuple):
    """Where samples that lie in files are, and how many threads of this rank may read them."""

    folder: Path | None = None
    threads: int = 1


NOWHERE = Source()


class Feed(ABC):
    """The run's samples. Any replica's share can be asked for, so that one process can compute what all do.

    ``samples`` is one epoch, where it is not what the data set says.
    """

    kind = "synthetic"
    """``synthetic`` or ``real``."""
    storage = "device"
    """Where a step takes its samples from: ``device``, ``host`` or ``files``."""
    distinct_samples: int | None = None
    """Different ones in an epoch; ``None`` where all of them are."""

    def __init__(self, spec: RunSpec, device: torch.device, samples: int | None = None) -> None:
        dataset = DATASETS[spec.dataset]
        self.shape = input_shape(spec.dataset, spec.input_size)
        self.classes = dataset.outputs
        self.samples = dataset.samples if samples is None else samples
        self.batch_size = spec.batch_size
        self.micro_batches = spec.micro_batches
        self.replicas = spec.dp_degree
        self.global_batch_size = spec.global_batch_size
        self.seed = spec.seed + spec.repeat
        self.device = device
        self.dtype = torch.float64 if spec.precision == "fp64" else torch.float32
        self.channels_last = spec.channels_last
        # That a batch is more than the whole set is dropped before a run begins; files may hold less than that.
        if self.samples < dataset.samples and self.global_batch_size > self.samples:
            raise WorkerError(
                f"global batch {self.global_batch_size} is more than the {self.samples} samples of "
                f"{spec.dataset} in its files",
                status="unsupported",
                hint=f"a global batch of {self.samples} or less, or more of the set's files",
            )
        whole = (self.samples, self.global_batch_size, self.replicas, spec.drop_last)
        self.steps_per_epoch = steps_per_epoch(*whole)
        self.dropped = dropped_samples(*whole)

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

    def micro_shares(self, step: int, replica: int) -> list[range]:
        """The micro-batches of ``replica`` in ``step``, as positions within its batch: as many for every replica."""
        smallest = self.count(step, self.replicas - 1)
        return micro_shares(self.count(step, replica), smallest, self.batch_size, self.micro_batches)

    def chosen(self, step: int, replica: int) -> Tensor:
        """Which samples of the set these are: every epoch has its own order from the seed, the same on all ranks."""
        epoch, position = self.position(step)
        first, share = position * self.global_batch_size, self.share(step, replica)
        return self.epoch_order(epoch)[first + share.start : first + share.stop]

    def epoch_order(self, epoch: int) -> Tensor:
        """All samples of the set, in the order in which ``epoch`` takes them."""
        return _order(self.samples, self.seed, epoch)

    @abstractmethod
    def prepare(self, replica: int) -> None:
        """Do now what would else fall into the first steps."""

    @abstractmethod
    def batch(self, step: int, replica: int) -> Batch:
        """The samples of ``replica`` in ``step``."""

    def forget(self) -> None:  # noqa: B027 - most keep nothing
        """Free what is kept of batches that were made; a batch that is asked for again is the same one."""

    def held_out(self) -> Iterator[Batch] | None:
        """Samples that training never sees; ``None`` where there are no real ones with a class each."""
        return None

    def close(self) -> None:  # noqa: B027 - most feeds hold nothing
        """Let go of threads and files."""

    def described(self) -> dict[str, Any]:
        """What a result says about the samples, so that made-up and real, resident and loaded ones are told apart."""
        return {
            "kind": self.kind,
            "storage": self.storage,
            "epoch_samples": self.samples,
            "distinct_samples": self.samples if self.distinct_samples is None else self.distinct_samples,
        }

    def place(self, inputs: Tensor, device: torch.device | None = None) -> Tensor:
        """``inputs`` in the run's type and memory format (integers keep theirs), on its device or on ``device``."""
        where = device or self.device
        if not inputs.is_floating_point():
            return inputs.to(where, non_blocking=True)
        layout = _CHANNELS_LAST.get(inputs.dim()) if self.channels_last else None
        moved = inputs.to(where, self.dtype, non_blocking=True)
        return moved.contiguous(memory_format=layout or torch.contiguous_format)


@lru_cache(maxsize=8)
def _shares(count: int, replicas: int) -> list[range]:
    return even_ranges(count, replicas)


@lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def make_feed(spec: RunSpec, device: torch.device, source: Source = NOWHERE) -> Feed:
    """The feed of the run's data set. ``WorkerError`` (``unsupported``) where its files are not there."""
    if spec.dataset == "digits":
        from hpcbench.worker.data.digits import Digits

        return Digits(spec, device)
    if spec.data in ("device", "host"):
        from hpcbench.worker.data.synthetic import Synthetic

        return Synthetic(spec, device)
    if spec.data == "real" and spec.dataset in ("mnist", "cifar10"):
        from hpcbench.worker.data.archives import Archive

        return Archive(spec, device, source)
    from hpcbench.worker.data.files import Files

    return Files(spec, device, source)
