"""Split convolutions and linear layers compute what the whole one computes, in fp64: output and all gradients."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.strategies.channel.channel_split import ChannelLayer, ChannelScheme, channel_extents, channel_split
from hpcbench.strategies.channel.train.layers import ChannelSplitDropout, ChannelSplitLayer
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_parallel_layers import TensorSharding, gather_shards
from tests.distributed.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.strategy("filter", "channel")]

BOUND = 1e-12


class Shape(NamedTuple):
    """A layer and the extents of what it is given; a linear layer has none."""

    ins: int
    outs: int
    size: tuple[int, ...] = (9, 8)
    kernel: int = 3
    stride: int = 1
    padding: Any = 1
    dilation: int = 1
    groups: int = 1
    bias: bool = True
    mode: str = "zeros"
    features: int = 1

    def make(self) -> nn.Conv2d | nn.Conv3d | nn.Linear:
        if not self.size:
            return nn.Linear(self.ins * self.features, self.outs, bias=self.bias).double()
        kind: Any = {2: nn.Conv2d, 3: nn.Conv3d}[len(self.size)]
        made: nn.Conv2d | nn.Conv3d = kind(
            self.ins,
            self.outs,
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.bias,
            self.mode,
        ).double()
        return made


KERNELS = [
    Shape(5, 6, kernel=kernel, stride=stride, padding=kernel // 2)
    for kernel, stride in itertools.product((1, 3, 5, 7), (1, 2))
]
OTHERS = [
    Shape(5, 6, padding=0, bias=False),
    Shape(6, 5, dilation=2, padding=2),
    Shape(5, 7, padding="same", dilation=2),
    Shape(5, 7, padding=1, mode="reflect"),
    Shape(4, 5, size=(5, 4, 6), padding=1),
    Shape(6, 4, size=(5, 6, 4), stride=2, padding=1, bias=False),
    Shape(4, 4, size=(5, 6, 4), kernel=1, padding=0),
    Shape(7, 6, size=()),
    Shape(5, 6, size=(), features=4, bias=False),
]
GROUPED = [
    Shape(6, 6, groups=6),
    Shape(5, 10, groups=5, bias=False),
    Shape(8, 12, groups=4, stride=2),
    Shape(6, 9, groups=3),
    Shape(8, 6, groups=2),
    Shape(4, 8, size=(4, 4, 4), groups=2),
]
PLACES = [{}, {"is_first": True}, {"is_last": True}, {"is_last": True, "is_first": True}]


def largest(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return 0.0
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()


def differences(
    shape: Shape, scheme: ChannelScheme, place: dict[str, bool], group: dist.ProcessGroup
) -> dict[str, float]:
    """Return the differences of one layer with the split of its position."""
    torch.manual_seed(1)
    size, whole = dist.get_world_size(group), shape.make()
    ours = RankGroup(tuple(range(size)), dist.get_rank(group), group)
    layer = ChannelLayer(shape.ins, shape.outs, shape.groups, shape.features, **place)
    split = channel_split(layer, scheme, size)
    part = ChannelSplitLayer(whole, layer, split, ours)
    x = torch.randn(3, shape.ins * shape.features, *shape.size, dtype=torch.float64, requires_grad=not layer.is_first)
    expected = whole(x)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    shares_in = TensorSharding(1, channel_extents(shape.ins, size, shape.features))
    shares_out = TensorSharding(1, channel_extents(shape.outs, size))
    is_sharded = scheme.form == "sharded"
    is_in_split, is_out_split = is_sharded and not layer.is_first, is_sharded and not layer.is_last
    own = (shares_in.narrow(x, ours.place) if is_in_split else x).detach().clone().requires_grad_(not layer.is_first)
    y = part(own)
    (y * (shares_out.narrow(weights, ours.place) if is_out_split else weights)).sum().backward()
    assert y.shape == (shares_out.narrow(expected, ours.place) if is_out_split else expected).shape

    def everything(name: str, tensor: Tensor | None) -> Tensor | None:
        shard = part.shards.get(name)
        return tensor if shard is None or tensor is None else gather_shards(tensor, shard, ours)

    gradient = own.grad if not is_in_split or own.grad is None else gather_shards(own.grad, shares_in, ours)
    found = {
        "output": largest(
            gather_shards(y.detach(), shares_out, ours) if is_out_split else y.detach(), expected.detach()
        ),
        "input": largest(gradient, x.grad),
        "weight": largest(everything("weight", part.weight.grad), whole.weight.grad),
        "weight itself": largest(everything("weight", part.weight.detach()), whole.weight.detach()),
    }
    if whole.bias is not None:
        assert part.bias is not None
        found["bias"] = largest(everything("bias", part.bias.grad), whole.bias.grad)
    return {f"{shape} {scheme} {place} {name}": value for name, value in found.items()}


def all_differences(shapes: list[Shape], group: dist.ProcessGroup) -> dict[str, float]:
    found: dict[str, float] = {}
    for strategy, form, split_last in itertools.product(("filter", "channel"), ("gathered", "sharded"), (False, True)):
        for shape, place in itertools.product(shapes, PLACES):
            if shape.features > 1 and place.get("is_first"):
                continue
            if split_last and not place.get("is_last"):
                continue
            found |= differences(shape, ChannelScheme(strategy, form, split_last), place, group)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shapes", [KERNELS, OTHERS, GROUPED], ids=["kernels", "others", "grouped"])
def test_layers_equal_the_whole_one(pool: Pool, shapes: list[Shape], ranks: int) -> None:
    for found in pool.call(ranks, all_differences, shapes):
        assert len(found) > 20 * len(shapes)
        assert {name: value for name, value in found.items() if not value <= BOUND} == {}


def dropped(group: dist.ProcessGroup) -> Tensor:
    ours = RankGroup(tuple(range(dist.get_world_size(group))), dist.get_rank(group), group)
    shares = TensorSharding(1, channel_extents(7, ours.size, 3))
    torch.manual_seed(3)
    dropout = ChannelSplitDropout(nn.Dropout(0.4), shares, ours.place)
    return gather_shards(dropout(shares.narrow(torch.ones(5, 21), ours.place)), shares, ours)


def test_dropout_drops_what_one_device_would(pool: Pool) -> None:
    torch.manual_seed(3)
    expected = nn.Dropout(0.4)(torch.ones(5, 21))
    assert 0 < (expected == 0).sum() < expected.numel()
    for found in pool.call(4, dropped):
        assert torch.equal(found, expected)
