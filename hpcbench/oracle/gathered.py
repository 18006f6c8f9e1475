"""Sharded parameters that are whole while they are used: how much of them is there when."""

from __future__ import annotations

from typing import NamedTuple

from hpcbench.parallel.buckets import total
from hpcbench.parallel.gradients import first_rows, sharded_units
from hpcbench.parallel.layers import LayerTable


class Units(NamedTuple):
    """What is gathered together, as places of tensors, and which rows of the table use it."""

    apart: list[list[int]]
    """A unit a block, ascending."""
    root: list[int]
    """There from the first forward to the last backward pass."""
    first_row: list[int]
    """Of each unit of ``apart``, in the forward pass."""

    @classmethod
    def of(cls, table: LayerTable) -> Units:
        """The units of a model."""
        *apart, root = sharded_units(table)
        rows = first_rows(table)
        blocks = [table.layers[rows[unit[0]]].block for unit in apart]
        starts = [next(row for row, one in enumerate(table.layers) if one.block == block) for block in blocks]
        return cls(apart, root, starts)

    def running(self, row: int) -> int:
        """Which of ``apart`` runs backwards in ``row``, or ran last; -1 before the first block that has one."""
        return sum(start <= row for start in self.first_row) - 1

    def made_at(self, tensors: int) -> list[int]:
        """Of every tensor, the row in which its shard's gradient is there: that before its unit, which has ended."""
        found = [0] * tensors
        for unit, start in zip(self.apart, self.first_row, strict=True):
            for place in unit:
                found[place] = max(start - 1, 0)
        return found


class Gathered(NamedTuple):
    """Bytes of each whole tensor: as it is used, as its gradient comes out, and as that is reduced."""

    parameters: list[int]
    gradients: list[int]
    reduced: list[int]
    prefetched: int
    """Units that are whole before it is their turn."""
    reduces_behind: bool
    """Whether a unit is reduced while the next one runs; otherwise that one waits."""
    accumulates: bool
    """Whether earlier micro-batches have left whole gradients."""

    def by_row(self, table: LayerTable) -> list[int]:
        """What is there while each row runs backwards."""
        units, rows = Units.of(table), first_rows(table)
        found = []
        for row in range(len(table.layers)):
            place = units.running(row)
            running = units.apart[place] if place >= 0 else []
            waiting = [one for unit in units.apart[max(place - self.prefetched, 0) : max(place, 0)] for one in unit]
            done = [one for one in running if rows[one] >= row]
            there = total(self.parameters, [*units.root, *running, *waiting]) + total(self.gradients, units.root)
            if self.accumulates:
                there += sum(total(self.gradients, unit) for unit in units.apart[: place + 1])
            else:
                there += total(self.gradients, done)
            if self.reduces_behind:
                there += total(self.reduced, units.apart[place + 1]) if place + 1 < len(units.apart) else 0
            found.append(there)
        for place, (unit, start) in enumerate(zip(units.apart, units.first_row, strict=True)):
            # When the unit has ended, and the row before it has not begun.
            row = max(start - 1, 0)
            waiting = [one for other in units.apart[max(place - self.prefetched, 0) : place] for one in other]
            whole = sum(total(each, unit) for each in (self.parameters, self.gradients, self.reduced))
            found[row] = max(found[row], total(self.parameters, [*units.root, *waiting]) + whole)
        return found
