"""What the oracle knows of every strategy: what a rank passes to whom, and what it holds."""

from __future__ import annotations

from typing import Protocol

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.step import StepTime
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.traffic import Traffic


class Cost(Protocol):
    """One strategy's formulas, for a run and the table of its model's layers. Class methods: they keep nothing."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """What ``rank`` passes to collectives in one steady step with whole batches, equal calls merged."""

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """What ``rank`` holds."""

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """How long a steady step takes the rank that sets the pace, and why."""
