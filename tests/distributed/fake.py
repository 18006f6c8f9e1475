"""A rank of a world that is not there: what it would pass to collectives among 64 or 1,024 ranks.

torch's fake process group answers every call at once and moves nothing, so numbers are meaningless; shapes are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.catalog import resolve_runtime
from hpcbench.parallel.traffic import Traffic
from hpcbench.worker import groups
from hpcbench.worker.blocks import arranged
from hpcbench.worker.data.feed import make_feed
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategies.base import Place
from hpcbench.worker.traffic import TrafficRecorder

CPU = torch.device("cpu")


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[Place]:
    """This process as ``rank``; it must not be in a process group already."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield Place(rank, world_size, CPU)
    finally:
        groups.forget_groups()
        dist.destroy_process_group()


def fake_traffic(spec: RunSpec, rank: int, warmup_steps: int = 1) -> list[Traffic]:
    """What ``rank`` of the run passes to collectives in the step after ``warmup_steps``."""
    recorder = fake_calls(spec, rank, warmup_steps)
    return recorder.merged()


def fake_calls(spec: RunSpec, rank: int, warmup_steps: int = 1) -> TrafficRecorder:
    """The same, with the order."""
    with fake_world(rank, spec.ranks) as place:
        strategy = resolve_runtime(spec.strategy)()
        strategy.setup(arranged(build_model(spec), spec), spec, place)
        feed = make_feed(spec, CPU)
        for step in range(warmup_steps):
            strategy.step(feed, step)
        recorder = TrafficRecorder()
        with recorder:
            strategy.step(feed, warmup_steps)
        return recorder
