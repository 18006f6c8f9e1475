"""The blocks of each pipeline chunk, by `options.cuts` or by balancing time, memory, parameters or block counts; the
file format of a block profile: the measured forward and backward time of every block of a model on one device."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate
from math import prod
from typing import Any

import msgspec

import hpcbench
from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.layer_table import LayerTable, cached_by_identity
from hpcbench.strategies.mesh import even_ranges
from hpcbench.strategies.pipeline import schedules, stage_partition

BLOCK_PROFILE_VERSION = 1
"""Part of a profile's digest; raised when a field's meaning changes, so that cached profiles are measured anew."""


class BlockProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is measured, and the device. ``input_size`` is the data set's own where absent."""

    model: str
    dataset: str
    micro_batch_size: int
    input_size: int | None
    model_options: dict[str, Any]
    precision: str
    channels_last: bool
    device: str


class BlockProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The median times of a model's blocks in order; the loss belongs to the last one."""

    request: BlockProfileRequest
    device_name: str
    torch: str
    threads: int
    """Threads of torch on a cpu."""
    blocks: list[stage_partition.BlockTimes]


def block_profile_digest(request: BlockProfileRequest, device_name: str, torch: str, threads: int) -> str:
    """Return a digest of all that a measurement of a shipped model depends on."""
    inputs = [request, device_name, torch, threads, hpcbench.__version__, BLOCK_PROFILE_VERSION]
    return hashlib.sha256(msgspec.json.encode(inputs, order="deterministic")).hexdigest()[:32]


_OPTIMIZER_STATES = {"adam": 2, "adamw": 2}


def chunk_blocks(
    spec: RunSpec, options: Mapping[str, Any], layout: schedules.PipelineLayout, table: LayerTable
) -> list[range]:
    """Return the blocks of every chunk, from ``options.cuts`` or so that the largest cost of a chunk is smallest.

    ``options`` are all options of the strategy, including defaults.
    """
    if layout.chunks == 1:
        return [range(table.blocks)]
    if options["cuts"]:
        cuts = stage_partition.parse_cuts(options["cuts"])
        assert cuts is not None, "cuts that were not checked"
    elif options["balance"] == "memory":
        cuts = stage_partition.minimax_cuts(
            table.blocks, layout.chunks, chunk_memory_cost(spec, options, layout, table)
        )
    else:
        cuts = _balanced_cuts(table, options["balance"], layout.chunks)
    return stage_partition.block_ranges(cuts, table.blocks)


@cached_by_identity(256)
def _balanced_cuts(table: LayerTable, balance: str, chunks: int) -> tuple[int, ...]:
    return stage_partition.balanced_cuts(stage_partition.block_costs(table, balance), chunks)


def chunk_memory_cost(
    spec: RunSpec, options: Mapping[str, Any], layout: schedules.PipelineLayout, table: LayerTable
) -> Callable[[int, int, int], float]:
    """Return a function of chunk, first block and last block + 1: the chunk's bytes in fp32.

    They are parameters with gradient, optimizer state and weight versions, and the activations of all micro-batches in
    flight, each with a copy of the chunk's input: early stages have more of both.
    """
    blocks = table.rows_by_block()
    input_bytes = [
        stage_partition.FP32_BYTES * prod(rows[0].input_shape) if rows and number else 0
        for number, rows in enumerate(blocks)
    ]
    parameter_sums = [
        0,
        *accumulate(stage_partition.FP32_BYTES * sum(row.parameters for row in rows) for rows in blocks),
    ]
    activation_sums = [0, *accumulate(sum(row.activation_bytes for row in rows) for rows in blocks)]
    fixed_sums = [0, *accumulate(sum(row.activation_fixed_bytes for row in rows) for rows in blocks)]
    samples = max(len(part) for part in even_ranges(spec.batch_size, spec.micro_batches))
    in_flight = peak_micro_batches_in_flight(spec, layout)
    with_activations = [1] * layout.chunks if options.get("recompute") == "always" else in_flight
    optimizer_states = _OPTIMIZER_STATES.get(spec.optimizer, int(spec.momentum > 0))
    staleness = get_strategy(spec.strategy).pipeline.staleness
    versions = [1 if staleness is None else staleness(spec).versions_held(chunk) for chunk in range(layout.chunks)]

    def cost(chunk: int, first: int, last: int) -> float:
        parameters, activations, fixed = (
            sums[last] - sums[first] for sums in (parameter_sums, activation_sums, fixed_sums)
        )
        copies = 1 + optimizer_states + versions[chunk]
        received = in_flight[chunk] * samples * input_bytes[first]
        return copies * parameters + with_activations[chunk] * (samples * activations + fixed) + received

    return cost


def peak_micro_batches_in_flight(spec: RunSpec, layout: schedules.PipelineLayout) -> list[int]:
    """Return, for each chunk, the most micro-batches whose activations a rank keeps at the same time."""
    entry = get_strategy(spec.strategy)
    if entry.pipeline.staleness is not None:
        return [schedules.warmup_forwards(layout, stage) + 1 for stage in range(layout.stages)]
    assert entry.pipeline.schedule is not None, f"{spec.strategy} is not a pipeline"
    peaks = [0] * layout.chunks
    for actions in schedules.schedule_actions(entry.pipeline.schedule, layout, spec.micro_batches):
        live: Counter[int] = Counter()
        for kind, chunk, _ in actions:
            live[chunk] += {schedules.FORWARD: 1, schedules.BACKWARD: -1, schedules.BACKWARD_WEIGHT: -1}.get(kind, 0)
            peaks[chunk] = max(peaks[chunk], live[chunk])
    return peaks
