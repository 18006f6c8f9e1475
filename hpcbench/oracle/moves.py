"""What is done to the tensors around a row of the table, and what of it is passed to others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hpcbench.parallel.traffic import Traffic


class Move(NamedTuple):
    """One operation on a tensor of one micro-batch."""

    operation: str
    copied_bytes: int
    """Of the tensor that is laid together, taken apart, narrowed or kept beside the sum; 0 where it stays in place."""
    traffic: Traffic | None
    """``None`` where nothing is sent."""


class Around(NamedTuple):
    """The operations around one row of the table, once a micro-batch, each in this order."""

    enter: list[Move]
    leave: list[Move]
    leave_backward: list[Move]
    enter_backward: list[Move]
    is_left_again: bool
    """Whether a block that is computed again comes as far as behind this row."""

    def calls(self, recomputes: bool) -> Iterator[Traffic]:
        """What is passed in all."""
        moves = [*self.enter, *self.leave, *self.leave_backward, *self.enter_backward]
        if recomputes:
            moves += self.again
        yield from (one.traffic for one in moves if one.traffic is not None)

    @property
    def again(self) -> list[Move]:
        """Of a row that is computed again."""
        return [*self.enter, *(self.leave if self.is_left_again else ())]


NOTHING = Around([], [], [], [], is_left_again=False)
