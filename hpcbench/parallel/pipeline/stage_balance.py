"""The blocks of each pipeline chunk, by `options.cuts` or by balancing time, memory, parameters or block counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.mesh import even_ranges
from hpcbench.parallel.pipeline.schedules import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    PipelineLayout,
    schedule_actions,
    warmup_forwards,
)
from hpcbench.parallel.pipeline.stage_partition import (
    FP32_BYTES,
    balanced_cuts,
    block_costs,
    block_ranges,
    minimax_cuts,
    parse_cuts,
)

_OPTIMIZER_STATES = {"adam": 2, "adamw": 2}


def chunk_blocks(spec: RunSpec, options: Mapping[str, Any], layout: PipelineLayout, table: LayerTable) -> list[range]:
    """Return the blocks of every chunk, from ``options.cuts`` or so that the largest cost of a chunk is smallest.

    ``options`` are all options of the strategy, including defaults.
    """
    if layout.chunks == 1:
        return [range(table.blocks)]
    if options["cuts"]:
        cuts = parse_cuts(options["cuts"])
        assert cuts is not None, "cuts that were not checked"
    elif options["balance"] == "memory":
        cuts = minimax_cuts(table.blocks, layout.chunks, chunk_memory_cost(spec, options, layout, table))
    else:
        cuts = _cached_balanced_cuts(tuple(block_costs(table, options["balance"])), layout.chunks)
    return block_ranges(cuts, table.blocks)


_cached_balanced_cuts = lru_cache(maxsize=256)(balanced_cuts)


def chunk_memory_cost(
    spec: RunSpec, options: Mapping[str, Any], layout: PipelineLayout, table: LayerTable
) -> Callable[[int, int, int], float]:
    """Return a function of chunk, first block and last block + 1: the chunk's bytes in fp32.

    They are parameters with gradient, optimizer state and weight versions, and the activations of all micro-batches in
    flight, each with a copy of the chunk's input: early stages have more of both.
    """
    blocks = table.rows_by_block()
    input_bytes = [
        FP32_BYTES * prod(rows[0].input_shape) if rows and number else 0 for number, rows in enumerate(blocks)
    ]
    parameter_sums = [0, *accumulate(FP32_BYTES * sum(row.parameters for row in rows) for rows in blocks)]
    activation_sums = [0, *accumulate(sum(row.activation_bytes for row in rows) for rows in blocks)]
    fixed_sums = [0, *accumulate(sum(row.activation_fixed_bytes for row in rows) for rows in blocks)]
    samples = max(len(part) for part in even_ranges(spec.batch_size, spec.micro_batches))
    in_flight = peak_micro_batches_in_flight(spec, layout)
    with_activations = [1] * layout.chunks if options.get("recompute") == "always" else in_flight
    optimizer_states = _OPTIMIZER_STATES.get(spec.optimizer, int(spec.momentum > 0))
    staleness = get_strategy(spec.strategy).staleness
    versions = [1 if staleness is None else staleness(spec).versions_held(chunk) for chunk in range(layout.chunks)]

    def cost(chunk: int, first: int, last: int) -> float:
        parameters, activations, fixed = (
            sums[last] - sums[first] for sums in (parameter_sums, activation_sums, fixed_sums)
        )
        copies = 1 + optimizer_states + versions[chunk]
        received = in_flight[chunk] * samples * input_bytes[first]
        return copies * parameters + with_activations[chunk] * (samples * activations + fixed) + received

    return cost


def peak_micro_batches_in_flight(spec: RunSpec, layout: PipelineLayout) -> list[int]:
    """Return, for each chunk, the most micro-batches whose activations a rank keeps at the same time."""
    entry = get_strategy(spec.strategy)
    if entry.staleness is not None:
        return [warmup_forwards(layout, stage) + 1 for stage in range(layout.stages)]
    assert entry.schedule is not None, f"{spec.strategy} is no pipeline"
    peaks = [0] * layout.chunks
    for actions in schedule_actions(entry.schedule, layout, spec.micro_batches):
        live: Counter[int] = Counter()
        for kind, chunk, _ in actions:
            live[chunk] += {FORWARD: 1, BACKWARD: -1, BACKWARD_WEIGHT: -1}.get(kind, 0)
            peaks[chunk] = max(peaks[chunk], live[chunk])
    return peaks
