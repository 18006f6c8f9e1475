"""Gradients that are added up bucket by bucket are the sums, whatever is ready when."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.strategies.gradient_buckets import MIB, bucket_payload_bytes
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.measure.traffic_recorder import TrafficRecorder
from tests.distributed.pool import Pool

pytestmark = pytest.mark.slow

WIDTHS = (5, 4, 3, 2)


class Found(NamedTuple):
    ours: list[Tensor]
    expected: list[Tensor]
    calls: list[Traffic]


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    pairs = itertools.pairwise(WIDTHS)
    return nn.Sequential(*(nn.Linear(a, b).double() for a, b in pairs))


def samples(rank: int, part: int) -> Tensor:
    return torch.randn(6, WIDTHS[0], dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + part))


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad.clone() if one.grad is not None else torch.zeros_like(one) for one in model.parameters()]


def alone(ranks: range, parts: range) -> list[Tensor]:
    """Return the gradients of one process on the samples of all ``ranks``."""
    model = layers()
    for rank in ranks:
        for part in parts:
            model(samples(rank, part)).square().sum().backward()
    return gradients(model)


def accumulate(cap_bytes: int, group: dist.ProcessGroup) -> list[Found]:
    """Two steps of three micro-batches each; only the last one of each step sends."""
    rank, model = dist.get_rank(group), layers()
    reducer = GradientReducer(list(model.parameters()), group, bucket_cap_mb=cap_bytes / MIB)
    found = []
    for step in range(2):
        recorder = TrafficRecorder()
        model.zero_grad()
        with recorder:
            with reducer.paused():
                for part in range(2):
                    model(samples(rank, 3 * step + part)).square().sum().backward()
            assert recorder.calls == []
            model(samples(rank, 3 * step + 2)).square().sum().backward()
            reducer.finish()
        expected = alone(range(dist.get_world_size(group)), range(3 * step, 3 * step + 3))
        found.append(Found(gradients(model), expected, recorder.calls))
    return found


SIZES = [8 * one.numel() for one in layers().parameters()]


@pytest.mark.parametrize("cap_bytes", [1, 60, 10**6])
@pytest.mark.parametrize("ranks", [2, 4])
def test_accumulated_gradients_are_reduced_once_per_bucket(pool: Pool, ranks: int, cap_bytes: int) -> None:
    payloads = bucket_payload_bytes(SIZES, cap_bytes)
    assert len(payloads) == {1: 6, 60: 3, 10**6: 1}[cap_bytes]
    for steps in pool.call(ranks, accumulate, cap_bytes):
        for found in steps:
            torch.testing.assert_close(found.ours, found.expected, rtol=0, atol=1e-12)
            assert [one.payload_bytes for one in found.calls] == payloads
            assert {(one.operation, one.group_size) for one in found.calls} == {("all_reduce", ranks)}


def partly_used(group: dist.ProcessGroup) -> Found:
    """The middle layer gets a gradient on rank 1 alone, the first parameter of all on none."""
    rank, model = dist.get_rank(group), layers()
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    reducer = GradientReducer([unused, *model.parameters()], group, bucket_cap_mb=60 / MIB)
    recorder = TrafficRecorder()
    with recorder:
        out = model[0](samples(rank, 0))
        out = model[1](out) if rank == 1 else out[:, : WIDTHS[2]]
        model[2](out).square().sum().backward()
        reducer.finish()
    single = layers()
    for one in range(2):
        out = single[0](samples(one, 0))
        out = single[1](out) if one == 1 else out[:, : WIDTHS[2]]
        single[2](out).square().sum().backward()
    # A gradient of zeros would let an optimizer decay it.
    assert unused.grad is None
    return Found(gradients(model), gradients(single), recorder.calls)


def test_a_parameter_without_a_gradient_counts_as_zero(pool: Pool) -> None:
    """All ranks send the same buckets, whoever has something to put into them."""
    one, other = pool.call(2, partly_used)
    for found in (one, other):
        torch.testing.assert_close(found.ours, found.expected, rtol=0, atol=1e-12)
    assert one.calls == other.calls
