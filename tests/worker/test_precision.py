"""Arithmetic as far as it shows without a GPU: switches, scaling, memory formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpcbench.strategies.data.train import SingleStrategy
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.model_execution import MixedPrecision, allow_tf32
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


@pytest.mark.parametrize(("allowed", "matmul"), [(True, "tf32"), (False, "ieee")])
def test_tf32_is_set_through_both_of_torchs_interfaces(allowed: bool, matmul: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        allow_tf32(allowed)
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
        assert torch.backends.cudnn.allow_tf32 is allowed
        newer: Any = torch.backends
        assert newer.cuda.matmul.fp32_precision == matmul
        assert (newer.cudnn.conv.fp32_precision == "tf32") is allowed
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def scaled(scale: float) -> MixedPrecision:
    """fp16's scaling with a scaler for the cpu, where autocast to fp16 is not offered."""
    arithmetic = MixedPrecision("fp32", CPU)
    arithmetic._scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return arithmetic


def test_an_update_uses_unscaled_gradients_and_one_that_overflowed_is_left_out() -> None:
    arithmetic, weight = scaled(2.0**10), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    assert arithmetic.notes() == []
    for factor, left in ((1.0, 0.75), (float("inf"), 0.75), (2.0, 0.25)):
        optimizer.zero_grad()
        arithmetic.backward((weight * factor).sum())
        arithmetic.update(optimizer)
        assert weight.grad is not None
        assert weight.grad.tolist() == [factor, factor]
        assert weight.tolist() == [left, left]
    assert arithmetic.notes() == [
        "1 of 3 updates (warm-up included) were left out: a gradient overflowed in fp16, and its scale was lowered"
    ]


def train(arithmetic: MixedPrecision | None, **values: Any) -> SingleStrategy:
    spec = make_spec(batch_size=16, **values)
    strategy, feed = SingleStrategy(), make_feed(spec, CPU)
    torch.manual_seed(0)
    strategy.setup(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), spec, RankContext(0, 1, CPU))
    strategy.arithmetic = arithmetic or strategy.arithmetic
    for step in range(3):
        strategy.step(feed, step)
    return strategy


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_scaling_by_a_power_of_two_changes_no_bit(micro_batches: int) -> None:
    plain, ours = train(None, micro_batches=micro_batches), train(scaled(2.0**10), micro_batches=micro_batches)
    for name, gradient in plain.gradients().items():
        assert torch.equal(ours.gradients()[name], gradient)
    for name, weight in plain.weights().items():
        assert torch.equal(ours.weights()[name], weight)


@pytest.mark.parametrize(
    ("shape", "layout"), [((2, 3, 4, 4), torch.channels_last), ((2, 3, 4, 4, 4), torch.channels_last_3d)]
)
def test_inputs_have_the_memory_format_of_the_run(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    placed = make_feed(make_spec(channels_last=True), CPU).to_device(torch.randn(shape))
    assert placed.is_contiguous(memory_format=layout)
    assert make_feed(make_spec(), CPU).to_device(torch.randn(shape)).is_contiguous()
