"""Delayed gradients learn as well as synchronous ones: handwritten digits, the same samples and seeds."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.worker.training_loop import held_out_accuracy
from hpcbench.worker.verification.reference import train_reference
from tests.distributed.cases import CPU
from tests.distributed.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.strategy("pipedream")]

EPOCHS, SEEDS, LEARNING_RATE = 8, range(3), 0.02


def network(seed: int) -> nn.Sequential:
    """Four blocks with BatchNorm for images of 8x8."""
    torch.manual_seed(seed)
    convolutions = [
        nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(pool))
        for inner, outer, pool in [(1, 16, 1), (16, 16, 2), (16, 32, 2)]
    ]
    return nn.Sequential(*convolutions, nn.Sequential(nn.Flatten(), nn.Linear(128, 10)))


def spec_of(strategy: str, stages: int, learning_rate: float, seed: int, options: dict[str, Any]) -> RunSpec:
    cuts = {"cuts": {2: "2", 4: "1,2,3"}[stages]}
    return RunSpec(
        model="vgg11", dataset="digits", strategy=strategy, tasks_per_node=stages, pp_degree=stages, batch_size=32,
        micro_batches=4, learning_rate=learning_rate, momentum=0.9, seed=seed, options={**cuts, **options},
    )  # fmt: skip


@cache
def synchronous() -> float:
    """The mean accuracy of what all synchronous pipelines compute, in one process."""
    found = []
    for seed in SEEDS:
        spec = spec_of("1f1b", 2, LEARNING_RATE, seed, {})
        model, feed = network(seed), make_feed(spec, CPU)
        train_reference(model, spec, feed, range(EPOCHS * feed.steps_per_epoch))
        found.append(held_out_accuracy(model, feed) or 0.0)
    return fmean(found)


def learnt(spec: RunSpec, group: dist.ProcessGroup) -> float:
    strategy, feed = resolve_runtime(spec.strategy)(), make_feed(spec, CPU)
    strategy.setup(network(spec.seed), spec, RankContext(dist.get_rank(group), spec.ranks, CPU, group))
    for step in range(EPOCHS * feed.steps_per_epoch):
        strategy.step(feed, step)
    return held_out_accuracy(strategy.module, feed) or 0.0


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stages", "options"), [(2, {}), (4, {}), (4, {"vertical_sync": True}), (4, {"weight_versions": "2bw"})]
)
def test_delayed_gradients_reach_the_accuracy_of_synchronous_training(
    pool: Pool, stages: int, options: dict[str, Any]
) -> None:
    """An update of a quarter of the samples takes a quarter of the learning rate (Goyal et al. 2017, section 2.1)."""
    rate = LEARNING_RATE / (1 if options.get("weight_versions") == "2bw" else 4)
    found = [pool.call(stages, learnt, spec_of("pipedream", stages, rate, seed, options))[0] for seed in SEEDS]
    assert synchronous() > 0.95
    assert fmean(found) > synchronous() - 0.01, (found, synchronous())
