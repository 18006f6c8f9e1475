"""A rank of a world that is not there: what it would pass to collectives among 64 or 1,024 ranks.

torch's fake process group answers every call at once and moves nothing, so numbers are meaningless; shapes are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.data.train import DdpStrategy
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed import process_groups
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.traffic_recorder import TrafficRecorder
from hpcbench.worker.model_execution import wrap_blocks
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime

CPU = torch.device("cpu")


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[RankContext]:
    """This process as ``rank``; it must not be in a process group already."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield RankContext(rank, world_size, CPU)
    finally:
        process_groups.clear_group_cache()
        dist.destroy_process_group()


def at_once(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """Reduce a bucket as DDP does, by a call that the fake world supports."""
    dist.all_reduce(bucket.buffer(), group=state)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def fake_calls(spec: RunSpec, rank: int, warmup_steps: int = 1) -> TrafficRecorder:
    """Return the calls of collectives by ``rank`` in the step after ``warmup_steps``, in their order."""
    with fake_world(rank, spec.ranks) as place:
        strategy = resolve_runtime(spec.strategy)()
        strategy.setup(wrap_blocks(build_model(spec), spec), spec, place)
        if isinstance(strategy, DdpStrategy):
            strategy.runner.register_comm_hook(dist.group.WORLD, at_once)
        feed = make_feed(spec, CPU)
        for step in range(warmup_steps):
            strategy.step(feed, step)
        recorder = TrafficRecorder()
        with recorder:
            strategy.step(feed, warmup_steps)
        return recorder
