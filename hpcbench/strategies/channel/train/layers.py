"""Convolutions, linear layers, BatchNorm and dropout of which each rank holds some channels, and their collectives.

A rank's part has shape [n, own channels, ...], the whole [n, channels, ...]::

    channels   0 1 2 | 3 4 5 | 6 7
               rank 0  rank 1  rank 2

Parts may be uneven; collectives move padded parts, because gloo accepts equal parts only. Each collective has its
adjoint in the backward pass. A gradient of a replicated tensor is summed over the group only where each rank computed
its own part of the layers that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.strategies.channel.channel_split import (
    ChannelLayer,
    ChannelLayerSplit,
    GroupedConvPiece,
    channel_extents,
    grouped_conv_pieces,
)
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.model_parallel_layers import TensorSharding, apply_collective, cast_for_autocast, own_shard

ConvolutionLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d
SplittableLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS = (nn.Dropout,)


def _convolution_of(layer: ConvolutionLayer) -> Callable[..., Tensor]:
    """Return the operation of ``layer`` as a function of input, weight, bias and number of groups."""
    function: Any = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}[type(layer)]
    stride, dilation, mode = layer.stride, layer.dilation, layer.padding_mode
    padding, pad = layer.padding if mode == "zeros" else 0, layer._reversed_padding_repeated_twice

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        padded = x if mode == "zeros" else F.pad(x, pad, mode=mode)
        convolved: Tensor = function(padded, weight, bias, stride, padding, dilation, groups)
        return convolved

    return convolve


class ChannelSplitLayer(nn.Module):
    """This rank's part of a layer; ``split`` determines whether its input and output are whole or split.

    ``weight`` and ``bias`` are slices of the whole layer's.
    """

    def __init__(self, whole: SplittableLayer, layer: ChannelLayer, split: ChannelLayerSplit, group: RankGroup) -> None:
        super().__init__()
        self.split = split
        self._group = group
        self._in = TensorSharding(1, channel_extents(layer.in_channels, group.size, layer.features))
        self._out = TensorSharding(1, channel_extents(layer.out_channels, group.size))
        self.shards: dict[str, TensorSharding] = {}
        if split.weight_dim is not None:
            extents = (self._in if split.weight_dim else self._out).extents
            self.shards["weight"] = TensorSharding(split.weight_dim, extents)
        if whole.bias is not None and split.is_bias_split:
            self.shards["bias"] = TensorSharding(0, self._out.extents)
        self.weight = own_shard(whole.weight, self.shards.get("weight"), group.place)
        self.bias = None if whole.bias is None else own_shard(whole.bias, self.shards.get("bias"), group.place)
        self._convolve = None if isinstance(whole, nn.Linear) else _convolution_of(whole)
        self._pieces = self._own_pieces(layer)
        self.train(whole.training)

    def _own_pieces(self, layer: ChannelLayer) -> list[GroupedConvPiece]:
        rank = self._group.place
        if self.split.by == "filters" and layer.groups > 1:
            return grouped_conv_pieces(layer, self._out.range_of(rank))
        inputs = self._in.range_of(rank) if self.split.by in ("channels", "groups") else range(layer.in_channels)
        outputs = self._out.range_of(rank) if self.split.by in ("filters", "groups") else range(layer.out_channels)
        groups = len(inputs) * layer.groups // layer.in_channels if self.split.by == "groups" else layer.groups
        return [GroupedConvPiece(range(len(inputs)), range(len(outputs)), groups)]

    def forward(self, x: Tensor) -> Tensor:
        """[n, in channels, ...] -> [n, out channels, ...]; on each side the rank's own channels or all of them."""
        x = apply_collective(cast_for_autocast(x), self.split.enter, self._in, self._group)
        # The bias is added once to the sum over the group.
        is_bias_last = self.split.by == "channels"
        y = self._compute(x, None if is_bias_last else self.bias)
        y = apply_collective(y, self.split.leave, self._out, self._group)
        if self.bias is None or not is_bias_last:
            return y
        return y + self.bias.to(y.dtype).view(-1, *(1 for _ in y.shape[2:]))

    def _compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._convolve is None:
            return F.linear(x, self.weight, bias)
        if len(self._pieces) == 1 and len(self._pieces[0].inputs) == x.shape[1]:
            return self._convolve(x, self.weight, bias, self._pieces[0].groups)
        parts = []
        for piece in self._pieces:
            outputs = slice(piece.outputs.start, piece.outputs.stop)
            inputs = x[:, piece.inputs.start : piece.inputs.stop]
            piece_bias = None if bias is None else bias[outputs]
            parts.append(self._convolve(inputs, self.weight[outputs], piece_bias, piece.groups))
        return torch.cat(parts, dim=1)


class ChannelSplitDropout(nn.Module):
    """Dropout of a rank's own channels with the single device's mask: every rank draws the mask of all channels."""

    def __init__(self, dropout: nn.Dropout, sharding: TensorSharding, rank: int) -> None:
        super().__init__()
        self.p = dropout.p
        self._sharding, self._rank = sharding, rank
        self.train(dropout.training)

    def forward(self, x: Tensor) -> Tensor:
        """[n, own channels, ...] -> the same shape."""
        if not self.training or self.p == 0.0:
            return x
        mask = x.new_empty(x.shape[0], sum(self._sharding.extents), *x.shape[2:]).bernoulli_(1 - self.p)
        scale = 0.0 if self.p == 1.0 else 1 / (1 - self.p)
        return x * (self._sharding.narrow(mask, self._rank).clone() * scale)


def split_batch_norm(norm: nn.Module, extents: tuple[int, ...], rank: int) -> None:
    """Reduce a BatchNorm to this rank's channels, in place. Statistics are per channel and need no communication."""
    assert isinstance(norm, NORMS), "a norm over channels"
    tensors = {name: getattr(norm, name) for name in ("weight", "bias", "running_mean", "running_var")}
    shards = {name: TensorSharding(0, extents) for name, tensor in tensors.items() if tensor is not None}
    for name, sharding in shards.items():
        setattr(norm, name, own_shard(tensors[name], sharding, rank))
    norm.num_features = extents[rank]
    vars(norm)["shards"] = shards
