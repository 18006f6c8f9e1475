"""Costs of fairscale's OSS, ShardedDataParallel and FullyShardedDataParallel (Rajbhandari et al. 2020)."""

from __future__ import annotations

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.peak_memory import (
    MemoryBreakdown,
    PersistentMemory,
    gradient_rows,
    peak_memory,
)
from hpcbench.predict.placement import place_subgroups
from hpcbench.predict.tensor_sizes import (
    buffer_bytes,
    element_bytes,
    element_count,
    parameter_bytes,
)
from hpcbench.strategies.catalog import options_with_defaults
from hpcbench.strategies.data import buckets as data_buckets
from hpcbench.strategies.data.cost import DataParallelCost, GradientBucket, ReplicaCall
from hpcbench.strategies.gradient_buckets import fsdp_units, gradient_ready_order
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.sharded.cost import ShardedCost, ShardingPlan, ShardingUnit, Zero1Cost, sharded_memory


class FairscaleOssCost(Zero1Cost):
    """ZeRO-1 with one broadcast an owner, begun together."""

    owners_largest_first = False
    has_distinct_roots = True

    def after_update(self, spec: RunSpec, table: LayerTable) -> list[ReplicaCall]:
        """Return a broadcast from each owner to all; ``broadcast_fp16`` halves them."""
        is_half = bool(options_with_defaults(spec)["broadcast_fp16"])
        sent = data_buckets.owned_bytes_by_replica(spec, table, half=is_half)
        return [("broadcast", size) for size in sent]


class FairscaleSddpCost(DataParallelCost):
    """Gradients are reduced to their owners, who broadcast updated parameters (ZeRO-2)."""

    operators_per_call = 0
    copies_per_gradient = 2
    has_distinct_roots = True

    def before(self, spec: RunSpec, table: LayerTable) -> list[ReplicaCall]:
        """Return a broadcast of every buffer."""
        return [("broadcast", size) for size in buffer_bytes(spec, table)]

    def buckets(self, spec: RunSpec, table: LayerTable) -> list[GradientBucket]:
        """Return a bucket an owner, and tensors that did not fit into it, each as soon as its gradients are there."""
        order = gradient_ready_order(table, spec.precision)
        numbers = {place: number for number, place in enumerate(order)}
        reductions = data_buckets.sddp_reductions(spec, table)
        reductions.sort(key=lambda reduction: max((numbers[place] for place in reduction[0]), default=len(order)))
        return [(places, [("reduce", size)]) for places, size in reductions]

    def after_update(self, spec: RunSpec, table: LayerTable) -> list[ReplicaCall]:
        return [("broadcast", size) for size in data_buckets.owned_bytes_by_replica(spec, table)]

    def updated(self, spec: RunSpec, table: LayerTable, rank: int) -> list[int]:
        return data_buckets.rank_owned_bytes(spec, table, rank)

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return the peak: gradients in buckets stay on every rank, others on their owner once all are reduced."""
        sizes, owned = parameter_bytes(spec, table), data_buckets.rank_owned_bytes(spec, table, rank)
        filled, single = data_buckets.sddp_buckets(spec, table)
        gradients, rows, waiting = list(sizes), gradient_rows(spec, table), [0] * (len(table.layers) + 1)
        for bucket in filled:
            for place in bucket:
                rows[place] = len(table.layers)
        for place in single:
            gradients[place] = owned[place]
            waiting[rows[place]] += sizes[place] - owned[place]
        in_flight = [sum(waiting[row:]) for row in range(len(table.layers))]
        return peak_memory(spec, table, PersistentMemory(sum(sizes), gradients, rows, owned), in_flight)


class FairscaleFsdpCost(ShardedCost):
    """fairscale's FullyShardedDataParallel: a unit is flat, cut into equal parts and padded at its end."""

    def plan(self, spec: RunSpec, table: LayerTable) -> ShardingPlan:
        """Gather each unit when its turn comes.

        Gathered parameters outlive a micro-batch whose gradients are not reduced; so does the root's unit within a
        step. Without ``reshard_after_forward`` every unit is gathered once a step.
        """
        regathers = bool(options_with_defaults(spec)["reshard_after_forward"])
        number_bytes = element_bytes(spec, table.parameter_tensors[0])
        parts, places = fairscale_shard_elements(spec, table), fsdp_units(table)
        units = [
            ShardingUnit(
                unit_places,
                [part * number_bytes for part in unit_parts],
                [part * number_bytes * spec.dp_degree for part in unit_parts],
                is_gathered_once=number == len(parts) - 1,
            )
            for number, (unit_places, unit_parts) in enumerate(zip(places, parts, strict=True))
            if unit_places
        ]
        within, across = place_subgroups(spec, "dp", spec.dp_degree)
        updated = [part * number_bytes for unit_parts in parts for part in unit_parts]
        return ShardingPlan(units, within, across, regathers, regathers, False, updated)

    def memory(self, spec: RunSpec, table: LayerTable, rank: int) -> MemoryBreakdown:
        """Return shards and the whole tensors of the running unit, without the next one."""
        sizes = parameter_bytes(spec, table)
        shards = [
            -(-element_count(tensor) // spec.dp_degree) * element_bytes(spec, tensor)
            for tensor in table.parameter_tensors
        ]
        is_flat = bool(options_with_defaults(spec)["flatten_parameters"])
        return sharded_memory(spec, table, shards, sizes, sizes, is_ahead=False, is_flat=is_flat)


def fairscale_shard_elements(spec: RunSpec, table: LayerTable) -> list[list[int]]:
    """Return the numbers of one rank's part of each flat tensor, by unit; the last unit is the root's, maybe empty."""
    is_flat = options_with_defaults(spec)["flatten_parameters"]
    parts = []
    for places in fsdp_units(table):
        counts = [element_count(table.parameter_tensors[place]) for place in places]
        flat = [sum(counts)] if is_flat and counts else counts
        parts.append([-(-count // spec.dp_degree) for count in flat])
    return parts


COSTS = {
    "fairscale_oss": FairscaleOssCost,
    "fairscale_sddp": FairscaleSddpCost,
    "fairscale_fsdp": FairscaleFsdpCost,
}
"""The cost of each strategy."""
