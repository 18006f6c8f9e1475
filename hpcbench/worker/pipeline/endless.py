"""A pipeline that runs across steps: what was sent ahead waits with its receiver until the step that needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar, overload

from torch import Tensor

from hpcbench.parallel.schedule import FORWARD, Action, Message, received
from hpcbench.worker.losses import sample_losses
from hpcbench.worker.pipeline.runtime import Batch, Runtime

T = TypeVar("T")


class Numbered(Sequence[T]):
    """Entries of an endless sequence: those from number ``first`` on."""

    def __init__(self, first: int, entries: Sequence[T]) -> None:
        self._first, self._entries = first, entries

    @overload
    def __getitem__(self, number: int) -> T: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[T]: ...

    def __getitem__(self, number: int | slice) -> T | Sequence[T]:
        assert isinstance(number, int), "an endless sequence has no slices"
        assert self._first <= number < len(self), f"{number} is not among {self._first} to {len(self) - 1}"
        return self._entries[number - self._first]

    def __len__(self) -> int:
        return self._first + len(self._entries)


@dataclass
class EndlessRuntime(Runtime):
    """Micro-batches are numbered over all steps, and every one's loss has a divisor of its own.

    A stage is one forward pass further than the next one when a step ends. Its output is taken in there and then, so
    that between steps nothing is under way and other collectives may come.
    """

    divisors: Sequence[int] = ()
    """Per micro-batch: the samples of the update that its gradient goes into."""
    shares: Sequence[float] = ()
    """Per micro-batch: what its loss counts in the step's."""
    early: dict[Action, tuple[Tensor, ...]] = field(default_factory=dict)

    def begin(self, ranks: list[list[Action]], batch: Batch) -> None:
        """As the base; what has come early is not expected again."""
        super().begin(ranks, batch)
        needed = {one.micro_batch for one in ranks[self.rank] if one.kind == FORWARD}
        coming = received(ranks, self.layout, self.rank)
        self._ahead: list[Message] = [one for one in coming if one.is_forward and one.action.micro_batch not in needed]

    def end(self) -> Tensor:
        """As the base, once what was sent ahead is here."""
        for message in self._ahead:
            try:
                self.early[message.action] = self.mail.take(message)
            except RuntimeError as error:
                raise self._stuck(f"the result of {message.action} from rank {message.source}", error) from error
        return super().end()

    def _taken(self, source: Action, action: Action) -> tuple[Tensor, ...]:
        return self.early.pop(source) if source in self.early else super()._taken(source, action)

    def _loss_of(self, micro_batch: int, output: Tensor) -> Tensor:
        return sample_losses(output, self._batch.targets[micro_batch]) / self.divisors[micro_batch]

    def _loss_weight(self, micro_batch: int) -> float:
        return self.shares[micro_batch]
