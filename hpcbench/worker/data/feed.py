"""The base class of all data feeds: the samples of each replica in each step, and the number of samples in a step."""

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
from hpcbench.errors import WorkerError
from hpcbench.parallel.mesh import dropped_samples, even_ranges, micro_batch_ranges, steps_per_epoch
from hpcbench.parallel.workloads import DATASETS, sample_shape


class Minibatch(NamedTuple):
    """One entry of the sequence."""

    step: int
    """Place of its step in the order of steps."""
    place: int
    """Its place within the step."""
    sizes: tuple[int, ...]
    """Its samples on every replica."""

    @property
    def samples(self) -> int:
        """Over all replicas."""
        return sum(self.sizes)


class MinibatchSequence:
    """Steps come in the order that is announced; after the last of them, or without, one number after another."""

    def __init__(self, feed: DataFeed, steps: Iterable[int] = ()) -> None:
        self._feed = feed
        self._steps = list(steps)
        self._shares: list[list[list[range]]] = []
        self._first: list[int] = [0]
        """Number of the first minibatch of every known step, and of the one after."""
        self._batches: dict[tuple[int, int], Batch] = {}

    def step(self, place: int) -> int:
        """The number of the step at ``place`` of the order."""
        if place < len(self._steps):
            return self._steps[place]
        return self._steps[-1] + 1 + place - len(self._steps) if self._steps else place

    def count(self, place: int) -> int:
        """Minibatches of the step at ``place``."""
        self._reach(place)
        return len(self._shares[place][0])

    def first(self, place: int) -> int:
        """Number of the first minibatch of the step at ``place``."""
        self._reach(place)
        return self._first[place]

    def at(self, number: int) -> Minibatch:
        """Minibatch ``number``."""
        while self._first[-1] <= number:
            self._reach(len(self._shares))
        place = bisect_right(self._first, number) - 1
        within = number - self._first[place]
        return Minibatch(place, within, tuple(len(shares[within]) for shares in self._shares[place]))

    def samples(self, place: int) -> int:
        """Global sample count of the step at ``place``."""
        return self._feed.global_count(self.step(place))

    def batch(self, number: int, replica: int) -> Batch:
        """The samples of ``replica``. Steps before that of the last call are forgotten."""
        found = self.at(number)
        key = (found.step, replica)
        if key not in self._batches:
            self._batches = {one: batch for one, batch in self._batches.items() if one[0] >= found.step - 1}
            self._batches[key] = self._feed.batch(self.step(found.step), replica)
        part = self._shares[found.step][replica][found.place]
        inputs, targets = self._batches[key]
        return _slice_rows(inputs, part), _slice_rows(targets, part)

    def _reach(self, place: int) -> None:
        while len(self._shares) <= place:
            step = self.step(len(self._shares))
            shares = [self._feed.micro_shares(step, replica) for replica in range(self._feed.replicas)]
            self._shares.append(shares)
            self._first.append(self._first[-1] + len(shares[0]))


def _slice_rows(tensor: Tensor, part: range) -> Tensor:
    return tensor[part.start : part.stop]


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

Batch = tuple[Tensor, Tensor]
"""Inputs [samples, *shape] and targets (see ``worker.losses``), on the run's device."""


class DataSource(NamedTuple):
    """Where samples that lie in files are, and how many threads of this rank may read them."""

    folder: Path | None = None
    threads: int = 1


NO_FILES = DataSource()


class DataFeed(ABC):
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
        self.shape = sample_shape(spec.dataset, spec.input_size)
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
        return _replica_shares(self.global_count(step), self.replicas)[replica]

    def count(self, step: int, replica: int) -> int:
        """Samples of ``replica`` in ``step``."""
        return len(self.share(step, replica))

    def micro_shares(self, step: int, replica: int) -> list[range]:
        """The micro-batches of ``replica`` in ``step``, as positions within its batch: as many for every replica."""
        smallest = self.count(step, self.replicas - 1)
        return micro_batch_ranges(self.count(step, replica), smallest, self.batch_size, self.micro_batches)

    def chosen(self, step: int, replica: int) -> Tensor:
        """Which samples of the set these are: every epoch has its own order from the seed, the same on all ranks."""
        epoch, position = self.position(step)
        first, share = position * self.global_batch_size, self.share(step, replica)
        return self.epoch_order(epoch)[first + share.start : first + share.stop]

    def epoch_order(self, epoch: int) -> Tensor:
        """All samples of the set, in the order in which ``epoch`` takes them."""
        return _epoch_permutation(self.samples, self.seed, epoch)

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
def _replica_shares(count: int, replicas: int) -> list[range]:
    return even_ranges(count, replicas)


@lru_cache(maxsize=2)
def _epoch_permutation(samples: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def make_feed(spec: RunSpec, device: torch.device, source: DataSource = NO_FILES) -> DataFeed:
    """The feed of the run's data set. ``WorkerError`` (``unsupported``) where its files are not there."""
    if spec.dataset == "digits":
        from hpcbench.worker.data.resident_feed import DigitsFeed

        return DigitsFeed(spec, device)
    if spec.data in ("device", "host"):
        from hpcbench.worker.data.synthetic_feed import SyntheticFeed

        return SyntheticFeed(spec, device)
    if spec.data == "real" and spec.dataset in ("mnist", "cifar10"):
        from hpcbench.worker.data.resident_feed import ArchiveFeed

        return ArchiveFeed(spec, device, source)
    from hpcbench.worker.data.file_feed import FileFeed

    return FileFeed(spec, device, source)
