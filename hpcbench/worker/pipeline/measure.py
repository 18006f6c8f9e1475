"""One untimed step of a pipeline, action by action."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.strategies.pipeline import STRATEGIES
from hpcbench.results.schema import TimelineSpan
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.pipeline.timeline import Recorder
from hpcbench.worker.strategies.base import Place, Strategy


def run_timeline(
    strategy: Strategy, feed: Feed, spec: RunSpec, place: Place, any_rank: Callable[[bool], bool], step: int
) -> list[TimelineSpan]:
    """The spans of this rank in ``step``; none where the run is no pipeline that begins and ends with a step, or
    profiles nothing.

    A whole batch is taken. The ranks begin together, as closely as a barrier parts them.
    """
    runtime = getattr(strategy, "runtime", None)
    if spec.strategy not in STRATEGIES or spec.profile_steps == 0 or runtime is None or any_rank(False):
        return []
    while feed.global_count(step) < feed.global_batch_size and feed.steps_per_epoch > 1:
        step += 1
    runtime.recorder = recorder = Recorder(place.device)
    try:
        dist.barrier(device_ids=[place.device.index] if place.device.type == "cuda" else None)
        recorder.start()
        strategy.step(feed, step)
    finally:
        runtime.recorder = None
    return [
        TimelineSpan(span.action.kind, span.action.chunk, span.action.micro_batch, span.begin, span.end)
        for span in recorder.spans_s()
    ]
