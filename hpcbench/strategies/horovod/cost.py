"""Cost of Horovod (Sergeev and Del Balso 2018): gradients are fused by a background thread."""

from __future__ import annotations

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel, StepBreakdown, step_from_events
from hpcbench.predict.peak_memory import (
    MemoryBreakdown,
    PersistentMemory,
    gradient_rows,
    peak_memory,
)
from hpcbench.predict.tensor_sizes import parameter_bytes
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.data import buckets as data_buckets
from hpcbench.strategies.data.cost import (
    DataParallelCost,
    GradientBucket,
)
from hpcbench.strategies.gradient_buckets import MIB, sum_bytes_at
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.traffic import Traffic

NEGOTIATION_BYTES = 8
"""A bit vector: which gradients are ready (Horovod's response cache)."""


class HorovodCost(DataParallelCost):
    """Gradients are fused by timing: one all_reduce of them all stands for the real ones (their sum is exact)."""

    alike_replicas = True
    exact_traffic = False
    copies_per_gradient = 2

    def traffic(self, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        payload = sum(data_buckets.sent_gradient_bytes(spec, table))
        if spec.dp_degree == 1:
            return []
        return [Traffic(operation="all_reduce", group_size=spec.dp_degree, payload_bytes=payload)]

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return everything, and the fusion buffer, of which gradients touch no more than their own size."""
        sizes = parameter_bytes(spec, table)
        fusion = int(float(options_with_defaults(spec)["fusion_threshold_mb"]) * MIB)
        touched = min(fusion, sum(sizes))
        persistent = PersistentMemory(sum(sizes), sizes, gradient_rows(spec, table), sizes, touched)
        return msgspec.structs.replace(peak_memory(spec, table, persistent), untouched_bytes=fusion - touched)

    def step(self, spec: RunSpec, table: LayerTable, cost_model: CostModel) -> StepBreakdown:
        """Fuse gradients as the background thread finds them, and send them under the backward pass.

        Before each all_reduce the threads of all ranks agree on its gradients, by an all_reduce of a few bytes.
        """
        sizes = data_buckets.sent_gradient_bytes(spec, table)
        fused = data_buckets.fused_buckets(cost_model, spec, table) if spec.dp_degree > 1 else []
        buckets: list[GradientBucket] = [
            (places, [("all_reduce", NEGOTIATION_BYTES), ("all_reduce", sum_bytes_at(sizes, places))])
            for places in fused
        ]
        return step_from_events(cost_model, self._events(table, cost_model, buckets))


COSTS = {
    "horovod": HorovodCost,
}
"""The cost of each strategy."""
