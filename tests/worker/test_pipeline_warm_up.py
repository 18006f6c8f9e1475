"""Chunks that run once before the first step leave no trace, and send no gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.pipeline.train.chunk import ActivationMetaCache, ModelChunk
from hpcbench.strategies.pipeline.train.pipeline_strategy import run_chunks_once
from hpcbench.worker.model_execution import MixedPrecision

CPU = torch.device("cpu")


class Reducer:
    """Notes whether gradients become ready while it is not paused."""

    def __init__(self, module: nn.Module) -> None:
        self.is_paused = False
        self.sent = 0
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _ready(self, _parameter: torch.Tensor) -> None:
        self.sent += not self.is_paused


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_warmed_up_chunks_keep_weights_statistics_and_random_state(splits: bool, recompute: bool) -> None:
    spec = RunSpec(model="vgg11", dataset="digits", strategy="gpipe", batch_size=7, micro_batches=2, precision="fp64")
    first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU(inplace=True), nn.Flatten())
    model = nn.Sequential(first, nn.Sequential(nn.BatchNorm1d(144), nn.Dropout(), nn.Linear(144, 10))).double()
    boundaries = ActivationMetaCache(model, [range(1), range(1, 2)], spec, CPU)
    before, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    reducer, shapes = Reducer(model), list[torch.Size]()
    first.register_forward_pre_hook(lambda _module, inputs: shapes.append(inputs[0].shape))
    chunks = {number: ModelChunk(module, splits) for number, module in enumerate(model)}
    arithmetic = MixedPrecision("fp64", CPU)
    run_chunks_once(chunks, boundaries, spec, arithmetic, [reducer], recompute)  # type: ignore[list-item]
    assert {shape[0] for shape in shapes} == {4}, "not the larger one of two micro-batches"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (reducer.sent, reducer.is_paused) == (0, False)
    assert not any(chunk._in_flight or chunk._deferred for chunk in chunks.values())
