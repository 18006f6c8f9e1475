"""The assignment of blocks to chunks, the same on every rank.

It follows given cuts, a layer table, or measured block times::

    blocks   0 1 2 | 3 4 | 5 6 | 7 8 9        cuts = "3, 5, 7"
    chunks   0       1     2     3
    rank     0       1     0     1            two virtual stages (interleaved_1f1b)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError, unsupported
from hpcbench.results.schema import PipelinePrediction
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.layer_table import read_shipped_table
from hpcbench.strategies.pipeline.schedule_simulator import schedule_step_time
from hpcbench.strategies.pipeline.schedules import PipelineLayout
from hpcbench.strategies.pipeline.stage_balance import BlockProfile, chunk_blocks
from hpcbench.strategies.pipeline.stage_partition import balanced_cuts, block_ranges, parse_cuts
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.layers import trace_layer_table
from hpcbench.worker.models.build import copy_to_meta

_BLOCK_PROFILES: dict[tuple[Any, ...], BlockProfile] = {}
"""Profiles of this process's run. ``verify`` trains in another precision, and its reference needs the same stages."""


def _profile_key(spec: RunSpec) -> tuple[Any, ...]:
    return spec.model, spec.dataset, spec.input_size, spec.batch_size, spec.micro_batches


def measure_blocks(
    model: nn.Sequential, spec: RunSpec, options: Mapping[str, Any], context: RankContext
) -> BlockProfile | None:
    """Return the times of the model's blocks, measured by rank 0 on its device or read from its cache.

    ``None`` if the strategy's ``options`` balance the stages by something else.
    Collective; must precede ``assign_blocks`` of a run whose balance is measured.

    Raises:
        WorkerError: ``unsupported``, on all ranks, if rank 0 cannot measure the model.
    """
    if options["balance"] != "measured" or options["cuts"]:
        return None
    key = _profile_key(spec)
    if key not in _BLOCK_PROFILES:
        responses: list[Any] = [_profile_blocks(model, spec, context) if context.rank == 0 else None]
        if context.world_size > 1:
            group = context.members()
            dist.broadcast_object_list(responses, dist.get_global_rank(group, 0), group=group, device=context.device)
        profile, error, hint = responses[0]
        if profile is None:
            raise unsupported(f"balance = measured: {error}", hint)
        _BLOCK_PROFILES[key] = profile
    return _BLOCK_PROFILES[key]


def _profile_blocks(
    model: nn.Sequential, spec: RunSpec, context: RankContext
) -> tuple[BlockProfile | None, str, str | None]:
    """Return the profile, or why there is none and a hint."""
    # The profiler imports fake tensors, which take a second.
    from hpcbench.worker.block_times import profile_blocks

    try:
        return profile_blocks(spec, context.device, copy_to_meta(model)), "", None
    except HpcbenchError as error:
        return None, error.message, error.hint


def predict_step(
    profile: BlockProfile, spec: RunSpec, layout: PipelineLayout, blocks: list[range]
) -> PipelinePrediction:
    """Predict a step of the run from its schedule and the measured block times.

    Args:
        profile: Measured times of the model's blocks.
        spec: The run.
        layout: The pipeline's stages and chunks.
        blocks: The blocks of every chunk.
    """
    staleness = get_strategy(spec.strategy).pipeline.staleness
    chunks = [[profile.blocks[block] for block in chunk] for chunk in blocks]
    step = schedule_step_time(
        spec.strategy, layout, spec.micro_batches, chunks, None if staleness is None else staleness(spec)
    )
    return PipelinePrediction(cuts=[chunk.start for chunk in blocks[1:]], **step._asdict())


def assign_blocks(
    model: nn.Sequential, spec: RunSpec, options: Mapping[str, Any], layout: PipelineLayout
) -> list[range]:
    """Return the blocks of every chunk, by ``options["cuts"]`` or ``options["balance"]``.

    Args:
        model: The whole model.
        spec: The run.
        options: The strategy's options with defaults.
        layout: The pipeline's stages and chunks.

    Raises:
        WorkerError: A layer table is needed and the model cannot run with fake tensors.
    """
    blocks, chunks = len(model), layout.chunks
    if chunks == 1:
        return [range(blocks)]
    if options["cuts"]:
        return block_ranges(parse_cuts(options["cuts"]) or (), blocks)
    if options["balance"] == "measured":
        assert _profile_key(spec) in _BLOCK_PROFILES, "stages by a measurement that was not made"
        times = [block.compute_s for block in _BLOCK_PROFILES[_profile_key(spec)].blocks]
        return block_ranges(balanced_cuts(times, chunks), len(times))
    if options["balance"] == "blocks":
        return block_ranges(balanced_cuts([1] * blocks, chunks), blocks)
    table = read_shipped_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
    if table is None or table.blocks != blocks:
        plain = nn.Sequential(OrderedDict(copy_to_meta(model).named_children())).float()
        table = trace_layer_table(plain, spec)
    return chunk_blocks(spec, options, layout, table)
