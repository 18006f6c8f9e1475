"""The base class of all data feeds: the samples of each replica in each step, and the number of samples in a step.

An epoch is a permutation of the set. A step takes the next global batch; replicas take contiguous ranges of it, and
micro-batches contiguous ranges of those::

    epoch order   | step 0                        | step 1 ...
    replicas      | replica 0     | replica 1     |
    micro-batches | m 0   | m 1   | m 0   | m 1   |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.mesh import dropped_samples, even_ranges, micro_batch_ranges, steps_per_epoch
from hpcbench.worker.model_execution import storage_dtype
from hpcbench.workloads.datasets import DATASETS, sample_shape

Batch = tuple[Tensor, Tensor]
"""Inputs [n, *sample shape] and targets [n], [n, values] or [n, length], on the run's device."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class DataSource(NamedTuple):
    """The folder of samples that lie in files, and how many processes of this rank may read them."""

    folder: Path | None = None
    workers: int = 1


NO_FILES = DataSource()


class DataFeed(ABC):
    """The samples of a run.

    Any replica's samples are available in any process, so that one process can compute what all ranks compute.

    Args:
        spec: The run.
        device: The device of the batches.
        samples: Samples of one epoch; ``None`` for the data set's own number.

    Raises:
        WorkerError: ``unsupported`` if a global batch is larger than the set in the files.

    Example::

        feed = make_feed(spec, torch.device("cpu"))  # of hpcbench.worker.data.feeds
        inputs, targets = feed.batch(step=0, replica=0)  # [n, *sample shape] and targets
    """

    kind = "synthetic"
    """``synthetic`` or ``real``."""
    storage = "device"
    """Storage that a step takes its samples from: ``device``, ``host`` or ``files``."""
    distinct_samples: int | None = None
    """Number of different samples in an epoch; ``None`` if all are different."""

    def __init__(self, spec: RunSpec, device: torch.device, samples: int | None = None) -> None:
        dataset = DATASETS[spec.dataset]
        self.shape = sample_shape(spec.dataset, spec.input_size)
        self.classes = dataset.outputs
        self.samples = dataset.samples if samples is None else samples
        self.batch_size = spec.batch_size
        self.micro_batches = spec.micro_batches
        self.replicas = spec.dp_degree
        self.global_batch_size = spec.global_batch_size
        self.seed = spec.seed + spec.repeat
        self.device = device
        self.dtype = storage_dtype(spec.precision)
        self.channels_last = spec.channels_last
        # Planning excludes a batch larger than the data set; the files may hold fewer samples than that.
        if self.samples < dataset.samples and self.global_batch_size > self.samples:
            raise unsupported(
                f"global batch {self.global_batch_size} is more than the {self.samples} samples of {spec.dataset} in "
                "its files",
                f"a global batch of {self.samples} or less, or more of the set's files",
            )
        epoch = (self.samples, self.global_batch_size, self.replicas, spec.drop_last)
        self.steps_per_epoch = steps_per_epoch(*epoch)
        self.dropped = dropped_samples(*epoch)

    def global_count(self, step: int) -> int:
        """Return the samples of all replicas in ``step``; the last step of an epoch may have fewer."""
        first = (step % self.steps_per_epoch) * self.global_batch_size
        return min(self.global_batch_size, self.samples - first)

    def replica_range(self, step: int, replica: int) -> range:
        """Return the positions of ``replica``'s samples within the step's global batch."""
        return _even_ranges(self.global_count(step), self.replicas)[replica]

    def replica_count(self, step: int, replica: int) -> int:
        """Return the number of samples of ``replica`` in ``step``."""
        return len(self.replica_range(step, replica))

    def micro_batch_ranges(self, step: int, replica: int) -> list[range]:
        """Return the micro-batches of ``replica`` as positions within its batch; all replicas have the same number."""
        smallest = self.replica_count(step, self.replicas - 1)
        return micro_batch_ranges(self.replica_count(step, replica), smallest, self.batch_size, self.micro_batches)

    def sample_indices(self, step: int, replica: int) -> Tensor:
        """Return the indices [n] within the set of ``replica``'s samples in ``step``."""
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        first, positions = epoch_step * self.global_batch_size, self.replica_range(step, replica)
        return self.epoch_order(epoch)[first + positions.start : first + positions.stop]

    def epoch_order(self, epoch: int) -> Tensor:
        """Return the permutation [samples] of ``epoch``: from the seed, the same on all ranks."""
        return _epoch_permutation(self.samples, self.seed, epoch)

    @abstractmethod
    def prepare(self, replica: int) -> None:
        """Do the one-time work for ``replica`` now, so that it does not fall into the first steps."""

    @abstractmethod
    def batch(self, step: int, replica: int) -> Batch:
        """Return the samples of ``replica`` in ``step``; the same ones at every call."""

    def free(self) -> None:  # noqa: B027 - optional
        """Free cached batches."""

    def held_out(self) -> Iterator[Batch] | None:
        """Iterate over labelled real samples that training does not use; ``None`` if there are none."""
        return None

    def close(self) -> None:  # noqa: B027 - optional
        """Release worker processes and files."""

    def description(self) -> dict[str, Any]:
        """Return the facts that a result records about its samples."""
        return {
            "kind": self.kind,
            "storage": self.storage,
            "epoch_samples": self.samples,
            "distinct_samples": self.samples if self.distinct_samples is None else self.distinct_samples,
        }

    def to_device(self, inputs: Tensor, device: torch.device | None = None) -> Tensor:
        """Return ``inputs`` in the run's dtype and memory format (integers keep theirs) on the run's or ``device``."""
        target = device or self.device
        if not inputs.is_floating_point():
            return inputs.to(target, non_blocking=True)
        layout = _CHANNELS_LAST.get(inputs.dim()) if self.channels_last else None
        # In two steps: the host would convert into memory that is not pinned.
        moved = inputs.to(target, non_blocking=True).to(self.dtype)
        return moved.contiguous(memory_format=layout or torch.contiguous_format)


_even_ranges = lru_cache(maxsize=8)(even_ranges)


@lru_cache(maxsize=2)
def _epoch_permutation(samples: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


class Minibatch(NamedTuple):
    """One entry of a ``MinibatchSequence``."""

    step: int
    """Index of its step in the order of steps."""
    place: int
    """Its index within the step."""
    sizes: tuple[int, ...]
    """Its samples on every replica."""

    @property
    def samples(self) -> int:
        """Samples of all replicas."""
        return sum(self.sizes)


class MinibatchSequence:
    """The micro-batches of all steps, numbered consecutively, for a pipeline that runs across steps.

    Steps come in the order that was announced; after the last of them, or without any, numbers count on. Methods take
    the index of a step in this order, not its number.
    """

    def __init__(self, feed: DataFeed, steps: Iterable[int] = ()) -> None:
        self._feed = feed
        self._steps = list(steps)
        self._ranges: list[list[list[range]]] = []
        """Ranges of samples by step, replica and micro-batch."""
        self._first: list[int] = [0]
        """Number of the first minibatch of every step so far, and of the step after."""
        self._batches: dict[tuple[int, int], Batch] = {}

    def step(self, index: int) -> int:
        """Return the number of step ``index``."""
        if index < len(self._steps):
            return self._steps[index]
        return self._steps[-1] + 1 + index - len(self._steps) if self._steps else index

    def count(self, index: int) -> int:
        """Return the number of minibatches of step ``index``."""
        self._extend_to(index)
        return len(self._ranges[index][0])

    def first(self, index: int) -> int:
        """Return the number of the first minibatch of step ``index``."""
        self._extend_to(index)
        return self._first[index]

    def at(self, number: int) -> Minibatch:
        """Return minibatch ``number``."""
        while self._first[-1] <= number:
            self._extend_to(len(self._ranges))
        step = bisect_right(self._first, number) - 1
        place = number - self._first[step]
        return Minibatch(step, place, tuple(len(ranges[place]) for ranges in self._ranges[step]))

    def samples(self, index: int) -> int:
        """Return the global sample count of step ``index``."""
        return self._feed.global_count(self.step(index))

    def batch(self, number: int, replica: int) -> Batch:
        """Return the samples of minibatch ``number`` on ``replica``.

        Batches of the last two steps are cached.
        """
        step, place, _ = self.at(number)
        if (step, replica) not in self._batches:
            self._batches = {key: batch for key, batch in self._batches.items() if key[0] >= step - 1}
            self._batches[step, replica] = self._feed.batch(self.step(step), replica)
        samples = self._ranges[step][replica][place]
        inputs, targets = self._batches[step, replica]
        return inputs[samples.start : samples.stop], targets[samples.start : samples.stop]

    def _extend_to(self, index: int) -> None:
        while len(self._ranges) <= index:
            step = self.step(len(self._ranges))
            ranges = [self._feed.micro_batch_ranges(step, replica) for replica in range(self._feed.replicas)]
            self._ranges.append(ranges)
            self._first.append(self._first[-1] + len(ranges[0]))
