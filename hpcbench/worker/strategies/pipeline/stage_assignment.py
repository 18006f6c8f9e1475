"""The assignment of blocks to chunks, the same on every rank: given cuts, a balance by a layer table, or measured
blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import torch.distributed as dist
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.parallel.catalog import get_strategy
from hpcbench.parallel.layer_table import LayerTable, read_shipped_table
from hpcbench.parallel.pipeline.block_profile import BlockProfile, BlockProfileResponse
from hpcbench.parallel.pipeline.schedules import PipelineLayout
from hpcbench.parallel.pipeline.stage_balance import chunk_blocks
from hpcbench.parallel.pipeline.stage_partition import balanced_cuts, block_ranges, parse_cuts
from hpcbench.parallel.pipeline.steady_state import schedule_step_time
from hpcbench.results.schema import PipelinePrediction
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.layers import trace_layer_table
from hpcbench.worker.strategies.pipeline.chunk import copy_to_meta

_MEASURED_CHAINS: dict[tuple[Any, ...], BlockProfile] = {}
"""Of this process's run. ``verify`` trains in another arithmetic, and its reference must have the same stages."""


def is_balance_measured(options: Mapping[str, Any]) -> bool:
    """Whether a run with these options needs ``measure_blocks``."""
    return options["balance"] == "measured" and not options["cuts"]


def measure_blocks(model: nn.Sequential, spec: RunSpec, place: RankContext) -> BlockProfile:
    """What rank 0 measures of ``model``'s blocks on its device, or has in its cache. Called by every rank, before any
    of them needs ``balance_measured_blocks``; ``WorkerError`` on all where rank 0 has one.
    """
    if _chain_key(spec) not in _MEASURED_CHAINS:
        said = [_measure_chain_answer(model, spec, place)] if place.rank == 0 else [b""]
        if place.world_size > 1:
            group = place.members()
            dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group, device=place.device)
        found = msgspec.json.decode(said[0], type=BlockProfileResponse)
        if found.chain is None:
            raise WorkerError(f"balance = measured: {found.error}", status="unsupported", hint=found.hint)
        _MEASURED_CHAINS[_chain_key(spec)] = found.chain
    return _MEASURED_CHAINS[_chain_key(spec)]


def balance_measured_blocks(spec: RunSpec, chunks: int) -> list[range]:
    """The blocks of every chunk, the longest of which is as short as it can be."""
    assert _chain_key(spec) in _MEASURED_CHAINS, "stages by a measurement that was not made"
    chain = _MEASURED_CHAINS[_chain_key(spec)].chain()
    return block_ranges(balanced_cuts([one.compute_s for one in chain], chunks), len(chain))


def predict_step(
    measured: BlockProfile, spec: RunSpec, layout: PipelineLayout, blocks: list[range]
) -> PipelinePrediction:
    """A step of the run by its schedule and the measured times."""
    chain = measured.chain()
    staleness = get_strategy(spec.strategy).staleness
    delay = None if staleness is None else staleness(spec)
    chunks = [[chain[place] for place in held] for held in blocks]
    found = schedule_step_time(spec.strategy, layout, spec.micro_batches, chunks, delay)
    return PipelinePrediction(
        step_time_s=found.step_time_s,
        bubble_fraction=found.bubble_fraction,
        cuts=[held.start for held in blocks[1:]],
        stage_times_s=found.stage_times_s,
    )


def _measure_chain_answer(model: nn.Sequential, spec: RunSpec, place: RankContext) -> bytes:
    # The profiler brings fake tensors along, which take a second to import.
    from hpcbench.worker.block_times import block_profile_request, profile_blocks
    from hpcbench.worker.strategies.pipeline.chunk import copy_to_meta

    try:
        found = BlockProfileResponse(
            chain=profile_blocks(block_profile_request(spec, place.device), shapes=copy_to_meta(model))
        )
    except HpcbenchError as error:
        found = BlockProfileResponse(error=error.message, hint=error.hint)
    return msgspec.json.encode(found)


def _chain_key(spec: RunSpec) -> tuple[Any, ...]:
    return spec.model, spec.dataset, spec.input_size, spec.batch_size, spec.micro_batches


def assign_blocks(
    model: nn.Sequential, spec: RunSpec, options: Mapping[str, Any], layout: PipelineLayout
) -> list[range]:
    """The blocks of every chunk, as ``options.cuts`` or ``options.balance`` say.

    ``WorkerError`` where a balance needs a table of layers and fake tensors cannot give one.
    """
    chunks = layout.chunks
    if chunks == 1:
        return [range(len(model))]
    if options["cuts"]:
        return block_ranges(parse_cuts(options["cuts"]) or (), len(model))
    if options["balance"] == "measured":
        return balance_measured_blocks(spec, chunks)
    if options["balance"] == "blocks":
        return block_ranges(balanced_cuts([1] * len(model), chunks), len(model))
    return chunk_blocks(spec, options, layout, _layer_table(model, spec))


def _layer_table(model: nn.Sequential, spec: RunSpec) -> LayerTable:
    shipped = read_shipped_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
    if shipped is not None and shipped.blocks == len(model):
        return shipped
    plain = nn.Sequential(OrderedDict(copy_to_meta(model).named_children())).float()
    return trace_layer_table(plain, spec)
