"""The interface that every strategy's cost implements."""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.cost_model import CostModel
from hpcbench.oracle.peak_memory import MemoryBreakdown
from hpcbench.oracle.step_time import StepBreakdown
from hpcbench.parallel.catalog import get_strategy, load_object
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.traffic import Traffic


@runtime_checkable
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


def resolve_cost(key: str) -> type[Cost]:
    """Import the cost class of strategy ``key``.

    ``tests/test_seams.py`` checks every class of the registry against ``Cost``, statically and when it runs.
    """
    reference = get_strategy(key).cost
    assert reference is not None, f"{key} has no cost"
    return cast(type[Cost], load_object(reference))
