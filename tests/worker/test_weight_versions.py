"""Versions of weights in one process: which a minibatch sees, what its gradient is, how many there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hpcbench.strategies.pipeline.train.pipedream import WeightStash
from hpcbench.strategies.pipeline.weight_versions import Staleness


def make(stages: int, stage: int, **more: bool) -> tuple[nn.Linear, WeightStash, torch.optim.Optimizer]:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    return module, WeightStash(module, Staleness(stages, **more), stage), torch.optim.SGD(module.parameters(), lr=1.0)


def forward(module: nn.Linear, stash: WeightStash, number: int, update: int | None = None) -> Tensor:
    with stash.installed(number, number if update is None else update):
        found: Tensor = module(torch.ones(1, 1)) ** 2
    return found


def update(module: nn.Linear, stash: WeightStash, optimizer: torch.optim.Optimizer) -> None:
    stash.before_update()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("vertical", [False, True])
def test_the_number_of_weight_versions_follows_the_formula(stage: int, vertical: bool) -> None:
    module, stash, optimizer = make(4, stage, vertical_sync=vertical)
    ahead = 3 - stage
    outputs = {number: forward(module, stash, number) for number in range(ahead)}
    peak = 0
    for number in range(8):
        outputs[number + ahead] = forward(module, stash, number + ahead)
        torch.autograd.backward(outputs.pop(number).sum())
        stash.collect(number)
        update(module, stash, optimizer)
        memory = {one.data_ptr() for held in stash._older.values() for one in held} | {module.weight.data_ptr()}
        assert len(memory) == stash.versions
        peak = max(peak, stash.versions)
    assert peak == Staleness(4, vertical).versions_held(stage)


def test_tied_weights_of_a_stage_stay_tied() -> None:
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    second.weight = first.weight
    module = nn.Sequential(first, second)
    nn.init.constant_(first.weight, 3.0)
    stash = WeightStash(module, Staleness(2), 0)
    with stash.installed(0, 0):
        y = module(torch.ones(1, 1))
    torch.autograd.backward(y.sum())
    stash.collect(0)
    assert first.weight is second.weight
    assert first.weight.grad is not None
    assert first.weight.grad.item() == 6.0
