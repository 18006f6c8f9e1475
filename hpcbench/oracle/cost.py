"""What the oracle knows of every strategy: what a rank passes to whom, and what it holds."""

from __future__ import annotations

from typing import Protocol

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.traffic import Traffic


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Live tensor bytes of one rank when it holds most, by what they are."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """What autograd keeps for the backward pass, the micro-batches that are alive together."""
    buffers_bytes: int = 0
    """BatchNorm's statistics."""
    communication_bytes: int = 0
    """Buckets, gathered parameters, halos: copies that exist to be sent or were received."""
    stashed_bytes: int = 0
    """Further versions of the parameters (PipeDream)."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


class Cost(Protocol):
    """One strategy's formulas, for a run and the table of its model's layers. Class methods: they keep nothing."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """What ``rank`` passes to collectives in one steady step with whole batches, equal calls merged."""

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """What ``rank`` holds."""
