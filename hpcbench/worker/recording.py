"""One step under the traffic recorder, after the profiled ones: what this rank passes to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.traffic import Traffic
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.stop import Stop
from hpcbench.worker.strategies.base import Strategy
from hpcbench.worker.timers import synchronize
from hpcbench.worker.traffic import TrafficRecorder


class Recorded(NamedTuple):
    """What came of the step; the run is as good without."""

    calls: list[Traffic]
    warnings: list[str]


def run_recorded(
    strategy: Strategy, feed: Feed, spec: RunSpec, device: torch.device, stop: Stop, any_rank: Callable[[bool], bool],
    first: int,
) -> Recorded:  # fmt: skip
    """The first step with a whole batch from number ``first`` on, all ranks together, where steps are profiled at all.

    None on a lone rank, in a compiled model (it would be compiled anew under a recorder), and for a strategy that talks
    past the recorder (``traffic_is_seen``). A rank that is told to stop leaves it out on all ranks.
    """
    seen = getattr(strategy, "traffic_is_seen", True)
    if spec.profile_steps == 0 or spec.ranks == 1 or spec.compile or not seen or any_rank(stop.due()):
        return Recorded([], [])
    whole = feed.global_count(first) == feed.global_batch_size
    if not whole:
        # Made all the same: a pipeline that runs across steps has begun it.
        strategy.step(feed, first)
    recorder = TrafficRecorder()
    with recorder:
        strategy.step(feed, first if whole else first + 1)
    synchronize(device)
    if recorder.unknown:
        names = ", ".join(sorted(recorder.unknown))
        return Recorded([], [f"no record of the traffic: nothing is known of torch's {names}"])
    return Recorded(recorder.merged(), [])
