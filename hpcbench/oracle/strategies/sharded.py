"""Data parallelism whose parameters are sharded (ZeRO-3, Rajbhandari et al. 2020): torch's FSDP2 and fairscale's."""

from __future__ import annotations

from math import prod

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.gathered import Gathered, Units
from hpcbench.oracle.live import Kept, held_at_peak
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.placement import parts_of
from hpcbench.oracle.step import StepTime
from hpcbench.oracle.steps.gathered import Plan, Unit, step_of_shards
from hpcbench.oracle.tensors import FP32_BYTES, HALF_BYTES, element_bytes, elements, parameter_bytes
from hpcbench.parallel.catalog import chosen_options
from hpcbench.parallel.gradients import sharded_units
from hpcbench.parallel.layers import LayerTable, TensorShape
from hpcbench.parallel.traffic import Traffic, calls_in, merged


class Fsdp:
    """torch's ``fully_shard`` (Zhao et al. 2023): tensors are cut along their first dim, a unit's shards travel as one.

    The last shards of a tensor may be shorter or empty; what is sent is as long as the first.
    """

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """Gathered before the forward and the backward pass of every micro-batch, reduced in the step's last."""
        options = chosen_options(spec)
        degree = shard_degree(spec)
        within, across = calls_in(degree), calls_in(spec.dp_degree // degree)
        gathers = spec.micro_batches * (2 if options["reshard_after_forward"] else 1)
        calls = []
        for unit in filled_units(table):
            shard = sum(shard_elements(tensor, degree) for tensor in unit)
            wide = element_bytes(spec, unit[0])
            used = HALF_BYTES if options["mixed_precision"] else wide
            summed = FP32_BYTES if options["mixed_precision"] else wide
            if degree > 1:
                calls += [within("all_gather", shard * used)] * gathers
                calls.append(within("reduce_scatter", shard * degree * summed))
            if degree < spec.dp_degree:
                calls.append(across("all_reduce", shard * summed))
        return merged(calls)

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """A shard of everything; of the unit that runs its parameters, its gradients and what is reduced of them.

        The next unit's parameters are there already; without ``reshard_after_forward`` those of all units to come.
        """
        options, degree = chosen_options(spec), shard_degree(spec)
        shards = [shard_elements(one, degree) * element_bytes(spec, one) for one in table.parameter_tensors]
        half = bool(options["mixed_precision"])
        whole = [shard_elements(one, degree) * degree for one in table.parameter_tensors]
        used = [count * (HALF_BYTES if half else element_bytes(spec, table.parameter_tensors[0])) for count in whole]
        summed = [count * (FP32_BYTES if half else element_bytes(spec, table.parameter_tensors[0])) for count in whole]
        gathered = Gathered(
            used, used, summed, 1 if options["reshard_after_forward"] else len(whole), True, spec.micro_batches > 1
        )
        made_at = Units.of(table).made_at(len(shards))
        return held_at_peak(spec, table, Kept(sum(shards), shards, made_at, shards), gathered.by_row(table))

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """The next unit is gathered while one computes; gradients are reduced under the backward pass."""
        options, degree = chosen_options(spec), shard_degree(spec)
        within, across = parts_of(spec, "dp", degree)
        half = bool(options["mixed_precision"])
        units = []
        for places in (places for places in sharded_units(table) if places):
            tensors = [table.parameter_tensors[place] for place in places]
            shard = sum(shard_elements(tensor, degree) for tensor in tensors)
            wide = element_bytes(spec, tensors[0])
            summed = shard * (FP32_BYTES if half else wide)
            units.append(
                Unit(
                    places,
                    [shard * (HALF_BYTES if half else wide)] if degree > 1 else [],
                    [summed * degree] if degree > 1 else [],
                    [summed] if degree < spec.dp_degree else [],
                )
            )
        updated = [shard_elements(one, degree) * element_bytes(spec, one) for one in table.parameter_tensors]
        regathers = bool(options["reshard_after_forward"])
        return step_of_shards(clock, spec, table, units, Plan(within, across, regathers, True, True, updated))


class FairscaleFsdp:
    """fairscale's FullyShardedDataParallel: a unit is flat, cut into equal parts and padded at its end."""

    @classmethod
    def traffic(cls, spec: RunSpec, table: LayerTable, rank: int) -> list[Traffic]:
        """As ``Fsdp``, but gathered parameters outlive a micro-batch whose gradients are not reduced.

        So does the root's unit within a step. Without ``reshard_after_forward`` every unit is gathered once a step.
        """
        options = chosen_options(spec)
        call = calls_in(spec.dp_degree)
        *blocks, root = fairscale_parts(spec, table)
        wide = element_bytes(spec, table.parameter_tensors[0])
        gathers = 2 * spec.micro_batches if options["reshard_after_forward"] else 1
        apart = [part for block in blocks for part in block]
        return merged(
            [
                *(call("all_gather", part * wide) for part in apart for _ in range(gathers)),
                *(call("all_gather", part * wide) for part in root),
                *(call("reduce_scatter", part * wide * spec.dp_degree) for part in [*apart, *root]),
            ]
        )

    @classmethod
    def memory(cls, spec: RunSpec, table: LayerTable, rank: int) -> Memory:
        """As ``Fsdp``, without the next unit."""
        options = chosen_options(spec)
        sizes = parameter_bytes(spec, table)
        shards = [-(-elements(one) // spec.dp_degree) * element_bytes(spec, one) for one in table.parameter_tensors]
        gathered = Gathered(
            sizes, sizes, sizes, 0 if options["reshard_after_forward"] else len(sizes), False, spec.micro_batches > 1
        )
        made_at = Units.of(table).made_at(len(shards))
        return held_at_peak(spec, table, Kept(sum(shards), shards, made_at, shards), gathered.by_row(table))

    @classmethod
    def step(cls, spec: RunSpec, table: LayerTable, clock: Clock) -> StepTime:
        """Each unit is gathered when its turn comes."""
        regathers = bool(chosen_options(spec)["reshard_after_forward"])
        wide = element_bytes(spec, table.parameter_tensors[0])
        parts, places = fairscale_parts(spec, table), sharded_units(table)
        units = [
            Unit(
                own,
                [part * wide for part in sizes],
                [part * wide * spec.dp_degree for part in sizes],
                stays=number == len(parts) - 1,
            )
            for number, (own, sizes) in enumerate(zip(places, parts, strict=True))
            if own
        ]
        whole, alone = parts_of(spec, "dp", spec.dp_degree)
        updated = [part * wide for sizes in parts for part in sizes]
        return step_of_shards(clock, spec, table, units, Plan(whole, alone, regathers, regathers, False, updated))


def shard_degree(spec: RunSpec) -> int:
    """Ranks that hold one copy of the parameters together."""
    return int(chosen_options(spec)["shard_degree"]) or spec.dp_degree


def filled_units(table: LayerTable) -> list[list[TensorShape]]:
    """Tensors that are gathered together, the root's last where it has any."""
    return [[table.parameter_tensors[place] for place in places] for places in sharded_units(table) if places]


def shard_elements(tensor: TensorShape, degree: int) -> int:
    """Of one rank's part of ``tensor``, padding included."""
    return -(-tensor.shape[0] // degree) * prod(tensor.shape[1:])


def fairscale_parts(spec: RunSpec, table: LayerTable) -> list[list[int]]:
    """Elements of one rank's part of each flat tensor, unit by unit; the last unit is the root's, perhaps empty."""
    flat = chosen_options(spec)["flatten_parameters"]
    parts = []
    for places in sharded_units(table):
        counts = [elements(table.parameter_tensors[place]) for place in places]
        whole = [sum(counts)] if flat and counts else counts
        parts.append([-(-count // spec.dp_degree) for count in whole])
    return parts
