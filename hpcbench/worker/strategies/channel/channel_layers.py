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
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.parallel.strategies.channel import (
    BoundaryOps,
    ChannelLayer,
    ChannelLayerSplit,
    GroupedConvPiece,
    channel_extents,
    grouped_conv_pieces,
)
from hpcbench.worker.distributed.process_groups import RankGroup
from hpcbench.worker.strategies.model_parallel import (
    TensorSharding,
    cast_for_autocast,
    gather_shards,
    reduce_scatter_shards,
)


class ChannelShards(NamedTuple):
    """The channels of a tensor that each rank of a group holds: ``extents`` in the group's order."""

    group: RankGroup
    extents: tuple[int, ...]

    @property
    def own(self) -> range:
        """This rank's channels."""
        start = sum(self.extents[: self.group.place])
        return range(start, start + self.extents[self.group.place])

    def narrow(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return a view of this rank's channels of ``tensor``."""
        return tensor.narrow(dim, self.own.start, len(self.own))


def all_gather_channels(part: Tensor, shards: ChannelShards) -> Tensor:
    """Return the whole tensor [n, channels, ...] from every rank's part. Collective."""
    return gather_shards(part, TensorSharding(1, shards.extents), shards.group)


def all_reduce_copy(tensor: Tensor, shards: ChannelShards) -> Tensor:
    """Return the sum of all ranks' ``tensor``, which stays unchanged. Collective."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=shards.group.members())
    return total


def reduce_scatter_channels(tensor: Tensor, shards: ChannelShards) -> Tensor:
    """Return this rank's part of the sum of all ranks' ``tensor`` [n, channels, ...]. Collective."""
    return reduce_scatter_shards(tensor, TensorSharding(1, shards.extents), shards.group).contiguous()


_OPERATIONS: dict[str, Callable[[Tensor, ChannelShards], Tensor]] = {
    # A new tensor object: autograd would mistake the input itself for the output.
    "": lambda tensor, _shards: tensor.view_as(tensor),
    "narrow": lambda tensor, shards: shards.narrow(tensor),
    "all_gather": all_gather_channels,
    "all_reduce": all_reduce_copy,
    "reduce_scatter": reduce_scatter_channels,
}


class _ChannelCollective(torch.autograd.Function):
    """One operation of ``_OPERATIONS`` forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, step: BoundaryOps, shards: ChannelShards) -> Tensor:
        ctx.step, ctx.shards = step, shards
        return _OPERATIONS[step.forward](tensor, shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return _OPERATIONS[ctx.step.backward](gradient, ctx.shards), None, None


def apply_collective(tensor: Tensor, step: BoundaryOps, shards: ChannelShards | None) -> Tensor:
    """Apply the forward operation of ``step``, and its backward operation to the gradient.

    ``shards`` are the channels on the side where the tensor is split.
    """
    if shards is None or not (step.forward or step.backward):
        return tensor
    result: Tensor = _ChannelCollective.apply(cast_for_autocast(tensor), step, shards)  # type: ignore[no-untyped-call]
    return result


ConvolutionLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d
SplittableLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS = (nn.Dropout,)


class _ConvolutionSettings(NamedTuple):
    """The arguments of a convolution beside its tensors."""

    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    mode: str
    pad: list[int]
    """Padding of modes other than zeros, as ``F.pad`` takes it."""

    @classmethod
    def of(cls, layer: ConvolutionLayer) -> _ConvolutionSettings:
        """Return the settings of ``layer``."""
        return cls(
            layer.stride, layer.padding, layer.dilation, layer.padding_mode, layer._reversed_padding_repeated_twice
        )


def _convolve(settings: _ConvolutionSettings, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    padding = settings.padding
    if settings.mode != "zeros":
        x, padding = F.pad(x, settings.pad, mode=settings.mode), (0,) * (x.dim() - 2)
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    convolved: Tensor = function(x, weight, bias, settings.stride, padding, settings.dilation, groups)
    return convolved


class ChannelSplitLayer(nn.Module):
    """This rank's part of a layer; ``split`` determines whether its input and output are whole or split.

    ``weight`` and ``bias`` are slices of the whole layer's.
    """

    shards: dict[str, TensorSharding]
    weight: nn.Parameter

    def __init__(self, whole: SplittableLayer, layer: ChannelLayer, split: ChannelLayerSplit, group: RankGroup) -> None:
        super().__init__()
        self.split = split
        self._in = ChannelShards(group, channel_extents(layer.in_channels, group.size, layer.features))
        self._out = ChannelShards(group, channel_extents(layer.out_channels, group.size))
        self.shards = {}
        weight, bias = whole.weight.detach(), None if whole.bias is None else whole.bias.detach()
        if split.weight_dim is not None:
            shards = self._in if split.weight_dim else self._out
            self.shards["weight"] = TensorSharding(split.weight_dim, shards.extents)
            weight = shards.narrow(weight, split.weight_dim)
        if bias is not None and split.is_bias_split:
            self.shards["bias"] = TensorSharding(0, self._out.extents)
            bias = self._out.narrow(bias, 0)
        self.weight = nn.Parameter(weight.clone(), whole.weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), whole.weight.requires_grad)
        self._convolve = None if isinstance(whole, nn.Linear) else partial(_convolve, _ConvolutionSettings.of(whole))
        self._pieces = self._own_pieces(layer)
        self.train(whole.training)

    def _own_pieces(self, layer: ChannelLayer) -> list[GroupedConvPiece]:
        if self.split.by == "filters" and layer.groups > 1:
            return grouped_conv_pieces(layer, self._out.own)
        inputs = self._in.own if self.split.by in ("channels", "groups") else range(layer.in_channels)
        outputs = self._out.own if self.split.by in ("filters", "groups") else range(layer.out_channels)
        groups = len(inputs) * layer.groups // layer.in_channels if self.split.by == "groups" else layer.groups
        return [GroupedConvPiece(range(len(inputs)), range(len(outputs)), groups)]

    def forward(self, x: Tensor) -> Tensor:
        """[n, in channels, ...] -> [n, out channels, ...]; on each side the rank's own channels or all of them."""
        x = apply_collective(x, self.split.enter, self._in)
        # The bias is added once to the sum over the group.
        is_bias_last = self.split.by == "channels"
        y = apply_collective(self._compute(x, None if is_bias_last else self.bias), self.split.leave, self._out)
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

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, split by {self.split.by or 'nothing'}"


class ChannelSplitDropout(nn.Module):
    """Dropout of a rank's own channels with the single device's mask: every rank draws the mask of all channels."""

    def __init__(self, dropout: nn.Dropout, shards: ChannelShards) -> None:
        super().__init__()
        self.p = dropout.p
        self._shards = shards
        self.train(dropout.training)

    def forward(self, x: Tensor) -> Tensor:
        """[n, own channels, ...] -> the same shape."""
        if not self.training or self.p == 0.0:
            return x
        channels = sum(self._shards.extents)
        mask = x.new_empty(x.shape[0], channels, *x.shape[2:]).bernoulli_(1 - self.p)
        scale = 0.0 if self.p == 1.0 else 1 / (1 - self.p)
        return x * (self._shards.narrow(mask).clone() * scale)


def split_batch_norm(norm: nn.Module, shards: ChannelShards) -> None:
    """Reduce a BatchNorm to this rank's channels, in place. Statistics are per channel and need no communication."""
    assert isinstance(norm, NORMS), "a norm over channels"
    shardings: dict[str, TensorSharding] = {}
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(norm, name)
        if tensor is None:
            continue
        shardings[name] = TensorSharding(0, shards.extents)
        part = shards.narrow(tensor.detach(), 0).clone()
        setattr(norm, name, nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part)
    norm.num_features = len(shards.own)
    vars(norm)["shards"] = shardings
