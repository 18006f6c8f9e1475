"""Spatial parallelism: halos, statistics, the switch and gradients, for one rank. ``docs/formulas.md`` derives them."""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.spatial_calls import around, gradient_buckets
from hpcbench.oracle.spatial_live import peak
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.spatial import step_of_parts
from hpcbench.oracle.tensors import parameter_bytes
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.mesh import Mesh
from hpcbench.parallel.spatial import Split
from hpcbench.parallel.spatial_limits import split_of
from hpcbench.parallel.traffic import Traffic, merged


class Spatial:
    """One replica's ranks share every sample; with replicas ParaDL's data+spatial."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Halos of this rank, by neighbour; collectives are the same on all ranks."""
        sizes, split = parameter_bytes(spec, table), _split(spec, table)
        calls: list[Traffic] = []
        if split is not None:
            place = Mesh.of(spec).coordinates(rank).sp
            for number in range(split.end + 1):
                calls += around(spec, split, number, place).calls(spec.activation_checkpointing)
        calls *= spec.micro_batches
        for places, ranks in gradient_buckets(spec, table, split):
            payload = sum(sizes[one] for one in places)
            calls.append(Traffic(operation="all_reduce", group_size=ranks, payload_bytes=payload))
        return merged(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """All weights, and a part of what the cut layers keep. Half precision is counted as fp32."""
        split = _split(spec, table)
        reduced = [places for places, _ in gradient_buckets(spec, table, split)]
        return peak(spec, table, split, Mesh.of(spec).coordinates(rank).sp, reduced)

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """A rank with neighbours on all sides, and one on another node where there are several, sets the pace."""
        return step_of_parts(clock, spec, table, _split(spec, table))


def _split(spec: RunSpec, table: LayerTable) -> Split | None:
    return split_of(spec, table) if spec.sp_degree > 1 else None
