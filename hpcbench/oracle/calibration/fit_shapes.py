"""Measured times of a sweep's own shapes, from runs of ``probe_blocks`` and ``probe_messages``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import hypot
from statistics import fmean, median
from typing import Any

from hpcbench.oracle.calibration.calibration_runs import CalibrationRun, disturbed_spread, runs_of_strategy
from hpcbench.oracle.calibration.fit_kernels import MIN_COMPUTE_SPREAD, part_share
from hpcbench.oracle.calibration.fit_overheads import fit_comm_slowdown, fit_overlap
from hpcbench.oracle.cost_model import kernel_conditions, row_kernels, update_kernels
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.measured_shapes import (
    KernelConditions,
    MeasuredCuts,
    MeasuredKernel,
    MeasuredMessage,
    MeasuredOverlap,
    MeasuredShapes,
    workload_key,
)
from hpcbench.parallel.layer_table import LayerRow
from hpcbench.parallel.roofline import Kernel, RooflineModel
from hpcbench.parallel.strategies.probes import PROBE_BLOCKS, PROBE_MESSAGES
from hpcbench.parallel.traffic import MessageShape
from hpcbench.parallel.workloads import is_custom_model
from hpcbench.results.probe_records import BlockProbe, ProbeResults

_BUSY_RATIO = 1.15
"""Passing time over processor time, from which there is a note."""


def fit_shapes(machine: Machine, runs: Sequence[CalibrationRun], sweep: str) -> MeasuredShapes:
    """Return the shapes that usable ``runs`` measured, with their uncertainty.

    Args:
        machine: the profile's: its links, and its kernel times by which a block's time is divided among its rows.
        runs: those of other strategies are ignored.
        sweep: the name of the sweep that they were made for.
    """
    kernels, cuts, spreads = list[MeasuredKernel](), list[MeasuredCuts](), list[float]()
    for run in runs_of_strategy(runs, PROBE_BLOCKS):
        probe = run.result.probe
        if probe is None or not probe.blocks or probe.pass_s is None:
            continue
        conditions = _conditions(run, probe)
        kernels += _kernels_of_run(machine, run, probe, conditions)
        cuts += [
            MeasuredCuts(workload_key(run.spec), run.spec.batch_size, conditions, parts)
            for parts in sorted({part.parts for part in probe.kernels} - {1})
        ]
        spreads.append(median(block.spread for block in probe.blocks))
    messages, scatters = list[MeasuredMessage](), list[float]()
    for run in runs_of_strategy(runs, PROBE_MESSAGES):
        for call in run.result.probe.collectives if run.result.probe else ():
            rivals = call.groups if call.nodes > 1 else 1
            shape = MessageShape(call.operation, call.ranks, call.ranks // call.nodes, rivals, call.payload_bytes)
            tasks = run.spec.tasks_per_node
            messages.append(MeasuredMessage(shape=shape, tasks_per_node=tasks, seconds=call.seconds))
            scatters.append(call.spread)
    # Ranks of a step wait for the one that shares its core with other work, those of probes do not. Others use most
    # where the fewest ranks keep them from the cores.
    ranks_per_node = {run.spec.tasks_per_node for run in runs}
    alike = ([run.result.warnings for run in runs if run.spec.tasks_per_node == ranks] for ranks in ranks_per_node)
    # The 90 % interval then includes a machine that is as busy.
    outside = max(map(disturbed_spread, alike), default=0.0)
    return MeasuredShapes(
        kernels=kernels,
        messages=messages,
        overlaps=_fit_overlaps(runs),
        cuts=cuts,
        compute_spread=max(MIN_COMPUTE_SPREAD, hypot(median(spreads or [0.0]), outside)),
        comm_spread=max(MIN_COMPUTE_SPREAD, hypot(median(scatters or [0.0]), outside)),
        sweeps=[sweep],
        links=(machine.comm.intra_node, machine.comm.inter_node),
        # That of a user's own model includes the file of the model.
        environment_digests=sorted(
            {run.result.environment_digest or "" for run in runs if not is_custom_model(run.result.spec.model)} - {""}
        ),
    )


def _fit_overlaps(runs: Sequence[CalibrationRun]) -> list[MeasuredOverlap]:
    """Return the slowdowns of passes and collectives under each other."""
    return [
        MeasuredOverlap(
            workload=workload_key(run.spec), samples=run.spec.batch_size, nodes=run.spec.nodes,
            tasks_per_node=run.spec.tasks_per_node, operation=overlap.operation, slowdown=fit_overlap([overlap]),
            comm_slowdown=fit_comm_slowdown([overlap]),
        )
        for run in runs_of_strategy(runs, PROBE_BLOCKS)
        for overlap in (run.result.probe.overlaps if run.result.probe else ())
    ]  # fmt: skip


def wall_ratio(probe: ProbeResults) -> float:
    """Return the time that passed in a pass through all blocks, over the times of the blocks."""
    blocks_s = sum(block.forward_s + (block.backward_s or 0.0) for block in probe.blocks)
    return (probe.pass_s or 0.0) / blocks_s if blocks_s else 1.0


def busy_notes(runs: Sequence[CalibrationRun]) -> list[str]:
    """Return a note where more time passed in blocks than processors or devices worked."""
    ratios = [wall_ratio(run.result.probe) for run in runs_of_strategy(runs, PROBE_BLOCKS) if run.result.probe]
    worst = max(ratios, default=1.0)
    if worst < _BUSY_RATIO:
        return []
    return [
        f"a pass through the blocks took up to {worst:.2f} times the processors' own time, as a CPU quota, the host of "
        "an accelerator or the work of others makes it; the prices include it"
    ]


def _conditions(run: CalibrationRun, probe: ProbeResults) -> KernelConditions:
    return kernel_conditions(run.spec)._replace(accumulates=any(block.accumulates for block in probe.blocks))


def _kernels_of_run(
    machine: Machine, run: CalibrationRun, probe: ProbeResults, conditions: KernelConditions
) -> list[MeasuredKernel]:
    held = wall_ratio(probe)
    whole_s = _row_times(machine, run, probe.blocks, held)
    samples = run.spec.batch_size
    kernels = [
        MeasuredKernel(kernel=kernel, samples=samples, conditions=conditions, seconds=seconds)
        for kernel, seconds in whole_s.items()
    ]
    kernels += [
        MeasuredKernel(kernel=kernel, samples=part_samples, conditions=conditions, seconds=seconds, is_part=True)
        for (kernel, part_samples), seconds in _cut_row_times(run, probe, whole_s).items()
    ]
    for update in probe.updates:
        kernels += [
            MeasuredKernel(kernel=kernel, samples=1, conditions=conditions, seconds=update.seconds * held)
            for kernel in update_kernels(run.spec, [update.parameter_bytes])
        ]
    return kernels


def _row_times(machine: Machine, run: CalibrationRun, blocks: Sequence[BlockProbe], wall: float) -> dict[Kernel, float]:
    """Divide each block's time among its rows, in proportion to their kernels on ``machine``.

    A kernel of several blocks gets the mean, so that all rows together take what all blocks did.
    """
    roofline = RooflineModel.of(machine.compute)
    seconds_by_kernel: dict[Kernel, list[float]] = defaultdict(list)
    for block in blocks:
        rows = [row for row in run.table.layers if row.block == block.block]
        passes = [row_kernels(run.spec, row, block.samples) for row in rows]
        for direction, block_s in ((0, block.forward_s), (1, block.backward_s or 0.0)):
            own_s = {number: roofline.seconds(both[direction]) for number, both in enumerate(passes)}
            total_s = sum(own_s.values())
            for number, seconds in own_s.items():
                if seconds:
                    seconds_by_kernel[passes[number][direction]].append(block_s * wall * seconds / total_s)
    return {kernel: fmean(seconds) for kernel, seconds in seconds_by_kernel.items()}


def _cut_row_times(
    run: CalibrationRun, probe: ProbeResults, whole_s: Mapping[Kernel, float]
) -> dict[tuple[Kernel, int], float]:
    """Return the times of parts of rows: that of the whole row in its block, times the ratio of both called alone.

    The key is the kernel with its samples. Of equal layers one was called, for all of them.
    """
    probed_rows = {(row.name, row.kind): row for row in reversed(run.table.layers)}
    alike: dict[tuple[Any, ...], list[LayerRow]] = defaultdict(list)
    for row in run.table.layers:
        alike[_layer_key(row)].append(row)
    whole_probes = {(probed.row, probed.kind): probed for probed in probe.kernels if probed.split == "whole"}
    seconds_by_cut: dict[tuple[Kernel, int], list[float]] = defaultdict(list)
    for part in probe.kernels:
        probed_row, whole_probe = probed_rows.get((part.row, part.kind)), whole_probes.get((part.row, part.kind))
        if part.split == "whole" or probed_row is None or whole_probe is None:
            continue
        ratios = (part.forward_s / whole_probe.forward_s, (part.backward_s or 0.0) / (whole_probe.backward_s or 1.0))
        for row in alike[_layer_key(probed_row)]:
            kernels = row_kernels(run.spec, row, whole_probe.samples)
            cuts = row_kernels(run.spec, row, part.samples, part_share(part.split, part.parts))
            for kernel, cut, ratio in zip(kernels, cuts, ratios, strict=True):
                if kernel in whole_s and ratio > 0:
                    seconds_by_cut[cut, part.samples].append(whole_s[kernel] * ratio)
    return {key: fmean(seconds) for key, seconds in seconds_by_cut.items()}


def _layer_key(row: LayerRow) -> tuple[Any, ...]:
    return row.kind, tuple(row.input_shape), tuple(row.output_shape), row.parameters, row.forward_flops
