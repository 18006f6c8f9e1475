"""Split convolutions and linear layers compute what the whole one computes, in fp64: output and all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcbench.strategies.channel.channel_split import channel_extents
from hpcbench.strategies.channel.train.layers import ChannelSplitDropout
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_parallel_layers import TensorSharding, gather_shards
from tests.distributed.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.strategy("filter", "channel")]


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
