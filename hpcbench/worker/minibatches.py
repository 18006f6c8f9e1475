"""A run's micro-batches as one endless sequence over its steps, for pipelines that do not end with a step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from hpcbench.worker.data.feed import Batch, Feed


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


class Minibatches:
    """Steps come in the order that is announced; after the last of them, or without, one number after another."""

    def __init__(self, feed: Feed, steps: Iterable[int] = ()) -> None:
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
        return _cut(inputs, part), _cut(targets, part)

    def _reach(self, place: int) -> None:
        while len(self._shares) <= place:
            step = self.step(len(self._shares))
            shares = [self._feed.micro_shares(step, replica) for replica in range(self._feed.replicas)]
            self._shares.append(shares)
            self._first.append(self._first[-1] + len(shares[0]))


def _cut(tensor: Tensor, part: range) -> Tensor:
    return tensor[part.start : part.stop]
