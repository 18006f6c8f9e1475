"""Loops beside the tool's: they train the same, and the library's model is timm's where it is installed."""

from __future__ import annotations

import copy
from typing import Any

import torch

from benchmarks.gpu_day.training_loops import (
    plain_step,
)
from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import DataParallelStrategy
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


def loop_spec(**values: Any) -> RunSpec:
    return make_spec(**{"strategy": "single", "batch_size": 2, **values})


def make_strategy(spec: RunSpec) -> DataParallelStrategy:
    strategy = DataParallelStrategy()
    strategy.setup(build_model(spec), spec, RankContext(0, 1, CPU))
    return strategy


def test_the_hand_written_loop_trains_as_the_tool_does() -> None:
    spec = loop_spec(precision="fp64", weight_decay=0.1)
    feed, strategy = make_feed(spec, CPU), make_strategy(spec)
    model = copy.deepcopy(strategy.module)
    step = plain_step(model, spec, CPU, [feed.batch(number, 0) for number in range(3)])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(3):
        step(number)
        strategy.step(feed, number)
    after = model.state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    for name, tensor in strategy.weights().items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-9, atol=1e-9)
