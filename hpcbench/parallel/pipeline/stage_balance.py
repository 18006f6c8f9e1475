"""The blocks of each pipeline chunk, chosen by `options.cuts` or by balancing time, memory, parameters or block
counts.
"""

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
    """The blocks of every chunk: cut as ``options.cuts`` says, or else so that the largest cost of a chunk is smallest.

    ``options`` are all of the strategy's, defaults filled in.
    """
    if layout.chunks == 1:
        return [range(table.blocks)]
    if options["cuts"]:
        chosen = parse_cuts(options["cuts"])
        assert chosen is not None, "cuts that were not checked"
        return block_ranges(chosen, table.blocks)
    if options["balance"] == "memory":
        return block_ranges(
            minimax_cuts(table.blocks, layout.chunks, chunk_memory_cost(spec, options, layout, table)), table.blocks
        )
    return block_ranges(
        _cached_balanced_cuts(tuple(block_costs(table, options["balance"])), layout.chunks), table.blocks
    )


_cached_balanced_cuts = lru_cache(maxsize=256)(balanced_cuts)


def chunk_memory_cost(
    spec: RunSpec, options: Mapping[str, Any], layout: PipelineLayout, table: LayerTable
) -> Callable[[int, int, int], float]:
    """What a chunk holds, in fp32, as a function of its number, first block and last block + 1.

    Parameters with gradient, optimizer state and stashed versions, and the activations of as many micro-batches as are
    under way there, each with a copy of what was received: early stages have more of both.
    """
    parameters, activations, fixed = [0] * table.blocks, [0] * table.blocks, [0] * table.blocks
    received: dict[int, int] = {}
    for layer in table.layers:
        block = min(layer.block, table.blocks - 1)
        received.setdefault(block, FP32_BYTES * prod(layer.input_shape) if block else 0)
        parameters[block] += FP32_BYTES * layer.parameters
        activations[block] += layer.activation_bytes
        fixed[block] += layer.activation_fixed_bytes
    sums = [[0, *accumulate(one)] for one in (parameters, activations, fixed)]
    samples = max(len(part) for part in even_ranges(spec.batch_size, spec.micro_batches))
    alive = peak_micro_batches_in_flight(spec, layout)
    whole = [1] * layout.chunks if options.get("recompute") == "always" else alive
    states = _OPTIMIZER_STATES.get(spec.optimizer, int(spec.momentum > 0))
    copies = [1 + states + versions for versions in _weight_versions_held(spec, layout)]

    def cost(chunk: int, first: int, last: int) -> float:
        weights, kept, once = (one[last] - one[first] for one in sums)
        arrived = alive[chunk] * samples * received.get(first, 0)
        return copies[chunk] * weights + whole[chunk] * (samples * kept + once) + arrived

    return cost


def peak_micro_batches_in_flight(spec: RunSpec, layout: PipelineLayout) -> list[int]:
    """Of each chunk, the most micro-batches whose activations a rank keeps at the same time."""
    entry = get_strategy(spec.strategy)
    if entry.staleness is not None:
        return [warmup_forwards(layout, stage) + 1 for stage in range(layout.stages)]
    assert entry.schedule is not None, f"{spec.strategy} is no pipeline"
    most = [0] * layout.chunks
    for own in schedule_actions(entry.schedule, layout, spec.micro_batches):
        kept: Counter[int] = Counter()
        for kind, chunk, _ in own:
            kept[chunk] += {FORWARD: 1, BACKWARD: -1, BACKWARD_WEIGHT: -1}.get(kind, 0)
            most[chunk] = max(most[chunk], kept[chunk])
    return most


def _weight_versions_held(spec: RunSpec, layout: PipelineLayout) -> list[int]:
    """Versions of its weights that each chunk holds."""
    staleness = get_strategy(spec.strategy).staleness
    if staleness is None:
        return [1] * layout.chunks
    return [staleness(spec).held(stage) for stage in range(layout.stages)]
