"""Blocks measured before a run's first step, so that its stages take equal times: one measurement for all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch.distributed as dist
from torch import nn

from hpcbench.config.spec import RunSpec
from hpcbench.errors import HpcbenchError, WorkerError
from hpcbench.parallel.chain import ChainAnswer, MeasuredChain
from hpcbench.parallel.partition import balanced, ranges
from hpcbench.parallel.predict import step_time
from hpcbench.parallel.schedule import Layout
from hpcbench.parallel.strategies.pipedream import delay_of
from hpcbench.results.schema import Predicted
from hpcbench.worker.strategies.base import Place

_AGREED: dict[tuple[Any, ...], MeasuredChain] = {}
"""Of this process's run. ``verify`` trains in another arithmetic, and its reference must have the same stages."""


def is_measured(options: Mapping[str, Any]) -> bool:
    """Whether a run with these options needs ``measure_blocks``."""
    return options["balance"] == "measured" and not options["cuts"]


def measure_blocks(model: nn.Sequential, spec: RunSpec, place: Place) -> MeasuredChain:
    """What rank 0 measures of ``model``'s blocks on its device, or has in its cache. Called by every rank, before any
    of them needs ``measured_blocks``; ``WorkerError`` on all where rank 0 has one.
    """
    if _key(spec) not in _AGREED:
        said = [_answer(model, spec, place)] if place.rank == 0 else [b""]
        if place.world_size > 1:
            group = place.members()
            dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group, device=place.device)
        found = msgspec.json.decode(said[0], type=ChainAnswer)
        if found.chain is None:
            raise WorkerError(f"balance = measured: {found.error}", status="unsupported", hint=found.hint)
        _AGREED[_key(spec)] = found.chain
    return _AGREED[_key(spec)]


def measured_blocks(spec: RunSpec, chunks: int) -> list[range]:
    """The blocks of every chunk, the longest of which is as short as it can be."""
    assert _key(spec) in _AGREED, "stages by a measurement that was not made"
    chain = _AGREED[_key(spec)].chain()
    return ranges(balanced([one.compute_s for one in chain], chunks), len(chain))


def predicted(measured: MeasuredChain, spec: RunSpec, layout: Layout, blocks: list[range]) -> Predicted:
    """A step of the run by its schedule and the measured times."""
    chain = measured.chain()
    delay = delay_of(spec) if spec.strategy == "pipedream" else None
    chunks = [[chain[place] for place in held] for held in blocks]
    found = step_time(spec.strategy, layout, spec.micro_batches, chunks, delay)
    return Predicted(
        step_time_s=found.step_time_s,
        bubble_fraction=found.bubble_fraction,
        cuts=[held.start for held in blocks[1:]],
        stage_times_s=found.stage_times_s,
    )


def _answer(model: nn.Sequential, spec: RunSpec, place: Place) -> bytes:
    # The profiler brings fake tensors along, which take a second to import.
    from hpcbench.worker.chain import measured_chain, request_of
    from hpcbench.worker.pipeline.boundary import skeleton

    try:
        found = ChainAnswer(chain=measured_chain(request_of(spec, place.device), shapes=skeleton(model)))
    except HpcbenchError as error:
        found = ChainAnswer(error=error.message, hint=error.hint)
    return msgspec.json.encode(found)


def _key(spec: RunSpec) -> tuple[Any, ...]:
    return spec.model, spec.dataset, spec.input_size, spec.batch_size, spec.micro_batches
