"""Gradients that are added up bucket by bucket are the sums, whatever is ready when."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpcbench.strategies.gradient_buckets import MIB, bucket_payload_bytes
from hpcbench.strategies.mesh import RankMesh
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.distributed.gradient_reducer import GradientReducer
from hpcbench.worker.distributed.process_groups import RankContext, make_axis_groups
from hpcbench.worker.measure.traffic_recorder import TrafficRecorder
from tests.distributed.cases import CPU
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


def over_two_axes(group: dist.ProcessGroup) -> Found:
    """The first layer has replicas along one axis, the others among all four ranks."""
    rank, model = dist.get_rank(group), layers()
    across = make_axis_groups(RankMesh(dp=2, tp=2), RankContext(rank, 4, CPU, group))["dp"]
    first, rest = list(model[0].parameters()), list(model[1:].parameters())
    reducers = [
        GradientReducer(first, across.members(), bucket_cap_mb=1 / MIB),
        GradientReducer(rest, group, bucket_cap_mb=60 / MIB),
    ]
    recorder = TrafficRecorder()
    with recorder:
        model(samples(rank, 0)).square().sum().backward()
        for reducer in reducers:
            reducer.finish()
    parts = [alone(range(one, one + 1), range(1)) for one in range(4)]
    shared = [sum(parts[one][place] for one in across.ranks) for place in range(2)]
    everywhere = [sum(part[place] for part in parts) for place in range(2, len(SIZES))]
    return Found(gradients(model), [torch.as_tensor(one) for one in [*shared, *everywhere]], recorder.calls)


def test_two_groups_do_not_mix_up_their_sums(pool: Pool) -> None:
    for found in pool.call(4, over_two_axes):
        torch.testing.assert_close(found.ours, found.expected, rtol=0, atol=1e-12)
        assert sorted(one.group_size for one in found.calls) == [2, 2, 4, 4]


def strided_layers() -> nn.Sequential:
    """Return layers whose weights lie in memory as channels_last, with a kernel of one point, and in two precisions."""
    torch.manual_seed(2)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1), nn.Flatten())
    model = nn.Sequential(*convolutions, nn.Linear(5, 2))
    model[:3].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[4].double()
    return model


def run_strided(model: nn.Sequential, rank: int) -> None:
    images = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(rank))
    features = model[:4](images.to(memory_format=torch.channels_last))
    model[4](features.double()).square().sum().backward()


class OperatorNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operators that run in here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Views(NamedTuple):
    found: Found
    copies: list[str]
    storages: int
    buckets: int
    strides_are_equal: bool


def reduce_strided(cap_bytes: int, group: dist.ProcessGroup) -> Views:
    """Record the operators of a reduction beside those of the same backward pass without one."""
    rank, model = dist.get_rank(group), strided_layers()
    parameters = list(model.parameters())
    reducer = GradientReducer(parameters, group, bucket_cap_mb=cap_bytes / MIB)
    recorder = TrafficRecorder()
    with reducer.paused():
        run_strided(model, rank)
    with recorder, OperatorNames() as operators:
        reducer.finish()
    written = [name for name in operators.names if name in ("cat", "copy_", "clone", "empty_like", "_to_copy")]
    expected = []
    for one in range(2):
        single = strided_layers()
        run_strided(single, one)
        expected.append(gradients(single))
    sums = [mine + other for mine, other in zip(*expected, strict=True)]
    storages = {one.grad.untyped_storage().data_ptr() for one in parameters if one.grad is not None}
    are_equal = all(one.grad is not None and one.grad.stride() == one.stride() for one in parameters)
    return Views(Found(gradients(model), sums, recorder.calls), written, len(storages), len(recorder.calls), are_equal)


@pytest.mark.parametrize("cap_bytes", [1, 10**6])
def test_reduced_gradients_are_views_of_their_buckets(pool: Pool, cap_bytes: int) -> None:
    """One operator copies a bucket's gradients, none copies sums back; views lie in memory as their parameters."""
    for found, written, storages, buckets, strides_are_equal in pool.call(2, reduce_strided, cap_bytes):
        torch.testing.assert_close(found.ours, found.expected, rtol=1e-6, atol=1e-6)
        assert buckets == storages == (8 if cap_bytes == 1 else 2)
        assert written == ["cat"] * buckets
        assert strides_are_equal
