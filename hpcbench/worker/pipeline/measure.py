"""What is done with a pipeline beside its steps: it is watched, and one untimed step is told action by action."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.strategies.pipeline import STRATEGIES
from hpcbench.results.schema import TimelineSpan
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.pipeline.timeline import Recorder
from hpcbench.worker.pipeline.watchdog import SHARE, watched
from hpcbench.worker.stop import Stop
from hpcbench.worker.strategies.base import Place, Strategy


def watch_pipeline(
    strategy: Strategy, place: Place, abandon: Callable[[BaseException], None]
) -> AbstractContextManager[None]:
    """On cuda, ``abandon`` the run from a thread when the schedule is stuck. Elsewhere, and for whatever is no
    pipeline, nothing is to be watched."""
    runtime = getattr(strategy, "runtime", None)
    if runtime is None or place.device.type != "cuda":
        return nullcontext()
    return watched(runtime.progress, runtime.state, SHARE * place.wait_s, abandon)


def run_timeline(
    strategy: Strategy, feed: Feed, spec: RunSpec, place: Place, stop: Stop, any_rank: Callable[[bool], bool], step: int
) -> list[TimelineSpan]:
    """The spans of this rank in ``step``; none where the run is no pipeline of single steps, or profiles nothing.

    A whole batch is taken. A rank that is told to stop leaves it out on all of them. The ranks begin
    together, as closely as a barrier parts them.
    """
    runtime = getattr(strategy, "runtime", None)
    if spec.profile_steps == 0 or runtime is None or spec.strategy not in STRATEGIES or any_rank(stop.due()):
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
