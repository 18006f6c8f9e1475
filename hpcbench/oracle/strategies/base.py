"""The interface that every strategy's cost implements."""

from __future__ import annotations

from typing import Protocol

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.peak_memory import MemoryBreakdown
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.traffic import Traffic


class Cost(Protocol):
    """One strategy's formulas, for a run and the table of its model's layers. Class methods: they keep nothing."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """What ``rank`` passes to collectives in one steady step with whole batches, equal calls merged."""

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """What ``rank`` holds."""

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: CostModel) -> StepBreakdown:
        """How long a steady step takes the rank that sets the pace, and why."""
