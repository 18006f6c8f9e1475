"""One chunk by itself: what it makes of what it receives."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hpcbench.strategies.pipeline.train.chunk import ModelChunk, activation_meta_of, backward_from
from hpcbench.strategies.pipeline.train.stage_module import slice_chunks


@pytest.mark.parametrize("recompute", [False, True])
def test_a_chunk_that_begins_in_place_leaves_what_it_received(recompute: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)))
    received = torch.randn(3, 4)
    expected = received.clone().requires_grad_()
    model[1](expected * 1).sum().backward()
    chunk = ModelChunk(slice_chunks(model, [range(1), range(1, 2)], [1])[1], splits=False)
    inputs = (received.clone(),)
    chunk.forward(0, inputs, activation_meta_of(received), recompute, nullcontext(), None)
    (gradient,) = chunk.backward(0, lambda outputs: backward_from(outputs, (torch.ones(3, 4),)))
    assert torch.equal(inputs[0], received)
    assert expected.grad is not None
    assert torch.equal(gradient, expected.grad)
