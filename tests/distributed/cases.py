"""What the parity tests compare: a run as a strategy does it on real ranks, and as one process must."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.catalog import resolve_runtime
from hpcbench.parallel.datasets import DATASETS
from hpcbench.worker.data.feed import NOWHERE, Source, make_feed
from hpcbench.worker.models.build import build_model
from hpcbench.worker.profiling import Profiled, run_profiled
from hpcbench.worker.reference import Trained, train_full_batch, train_reference
from hpcbench.worker.stop import Stop
from hpcbench.worker.strategies.base import Place

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """``samples`` makes the epoch so short that it ends within the steps.

    ``in_rank_order``: gradients are summed from rank 0 on, as the reference sums its shares, not as gloo's ring does.
    ``late_s``: after the steps others are profiled, in which rank 1 comes so much later to every all_reduce.
    """

    spec: RunSpec
    samples: int
    steps: int = 5
    in_rank_order: bool = False
    source: Source = NOWHERE
    late_s: float | None = None


@dataclass
class OfRank:
    """What one rank of the pool sends back: its parts of the losses, rank 0 also its weights and buffers."""

    losses: list[float]
    counts: list[int]
    differs_from_rank_0: float
    state: dict[str, Tensor] = field(default_factory=dict)
    profiled: Profiled | None = None


@contextlib.contextmanager
def short_epoch(dataset: str, samples: int) -> Iterator[None]:
    """Make an epoch of ``dataset`` that many samples long."""
    whole = DATASETS[dataset]
    DATASETS[dataset] = whole._replace(samples=samples)
    try:
        yield
    finally:
        DATASETS[dataset] = whole


def run_parallel(case: Case, group: dist.ProcessGroup) -> OfRank:
    """Train as the case's strategy does; called on every rank of ``group``."""
    rank = dist.get_rank(group)
    with short_epoch(case.spec.dataset, case.samples):
        feed = make_feed(case.spec, CPU, case.source)
        strategy = resolve_runtime(case.spec.strategy)()
        strategy.setup(build_model(case.spec), case.spec, Place(rank, case.spec.ranks, CPU, group))
        if case.in_rank_order:
            strategy.runner.register_comm_hook(group, sum_in_rank_order)
        losses = [strategy.step(feed, step).item() for step in range(case.steps)]
        counts = [feed.count(step, strategy.replica) for step in range(case.steps)]
    # Running statistics are a rank's own until the next forward pass, so only parameters are alike everywhere.
    worst = 0.0
    for parameter in strategy.module.parameters():
        of_rank_0 = parameter.detach().clone()
        dist.broadcast(of_rank_0, src=dist.get_global_rank(group, 0), group=group)
        worst = max(worst, (of_rank_0 - parameter.detach()).abs().max().item())
    state = {name: tensor.detach().clone() for name, tensor in strategy.module.state_dict().items()}
    profiled = None if case.late_s is None else profile_late(case, strategy, group, case.late_s)
    return OfRank(losses, counts, worst, state if rank == 0 else {}, profiled)


def profile_late(case: Case, strategy: Any, group: dist.ProcessGroup, late_s: float) -> Profiled:
    """The split of further steps, rank 1 being late."""

    def all_reduce(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        if dist.get_rank(state) == 1:
            time.sleep(late_s)
        work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size(state))

    def any_rank(flag: bool) -> bool:
        said = torch.tensor(int(flag))
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group)
        return bool(said.item())

    strategy.runner.register_comm_hook(group, all_reduce)
    return run_profiled(strategy, make_feed(case.spec, CPU), case.spec, CPU, Stop(), any_rank, case.steps)


def sum_in_rank_order(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    """DDP's average of a bucket, with the replicas added one after another."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size(state))]
    dist.all_gather(parts, bucket.buffer(), group=state)
    total = torch.zeros_like(parts[0])
    for part in parts:
        total.add_(part)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(total / len(parts))
    return done


def run_reference(case: Case, backwards: bool = False) -> Trained:
    """The same training in this process, each replica's share by itself; ``backwards`` sums the last replica first."""
    with short_epoch(case.spec.dataset, case.samples):
        feed, model = make_feed(case.spec, CPU, case.source), build_model(case.spec)
        return train_reference(model, case.spec, feed, range(case.steps), backwards)


def run_full_batch(case: Case) -> Trained:
    """The plain run on the whole global batch."""
    with short_epoch(case.spec.dataset, case.samples):
        return train_full_batch(build_model(case.spec), case.spec, make_feed(case.spec, CPU), range(case.steps))
