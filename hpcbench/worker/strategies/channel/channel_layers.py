"""Convolutions, linear layers, BatchNorm and dropout of which each rank holds some channels, and their collectives.

A rank's part has shape [n, own channels, ...], the whole [n, channels, ...]. Parts may be uneven; collectives send
parts
padded to the largest, because gloo accepts equal parts only. Each collective has its adjoint in the backward pass. A
gradient of a replicated tensor is summed over the group only where each rank computed its own part of what follows."""

from __future__ import annotations

from collections.abc import Callable
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
from hpcbench.worker.strategies.model_parallel import TensorSharding

# torch 2.13 renamed them and warns of the older names.
_all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ChannelShards(NamedTuple):
    """Which channels of a tensor each rank of a group has: ``extents`` in the group's order."""

    group: RankGroup
    extents: tuple[int, ...]

    @property
    def own(self) -> range:
        """This rank's channels."""
        start = sum(self.extents[: self.group.place])
        return range(start, start + self.extents[self.group.place])

    @property
    def is_even(self) -> bool:
        """Whether all ranks have as many."""
        return min(self.extents) == max(self.extents)


def view_own_channels(whole: Tensor, shares: ChannelShards) -> Tensor:
    """This rank's part of ``whole``, a view."""
    return whole.narrow(1, shares.own.start, len(shares.own))


def all_gather_channels(part: Tensor, shares: ChannelShards) -> Tensor:
    """The whole, from everybody's part."""
    size, widest = shares.group.size, max(shares.extents)
    shape = [part.shape[0], widest, *part.shape[2:]]
    padded = part.contiguous()
    if part.shape[1] < widest:
        padded = part.new_zeros(shape)
        padded.narrow(1, 0, part.shape[1]).copy_(part)
    # Of shape [ranks, n, channels, ...]: the ranks' parts lie side by side only after they were copied together.
    gathered = part.new_empty([size * shape[0], *shape[1:]])
    _all_gather_into_tensor(gathered, padded, group=shares.group.members())
    return torch.cat(
        [one.narrow(1, 0, extent) for one, extent in zip(gathered.chunk(size), shares.extents, strict=True)], dim=1
    )


def all_reduce_copy(whole: Tensor, shares: ChannelShards) -> Tensor:
    """The sum of everybody's ``whole``."""
    total = whole.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=shares.group.members())
    return total


def reduce_scatter_channels(whole: Tensor, shares: ChannelShards) -> Tensor:
    """This rank's part of the sum of everybody's ``whole``."""
    size, widest = shares.group.size, max(shares.extents)
    shape = [whole.shape[0], widest, *whole.shape[2:]]
    make = whole.new_empty if shares.is_even else whole.new_zeros
    parts = make([size * shape[0], *shape[1:]])
    for place, part in zip(parts.chunk(size), torch.split(whole, list(shares.extents), dim=1), strict=True):
        place.narrow(1, 0, part.shape[1]).copy_(part)
    own = whole.new_empty(shape)
    _reduce_scatter_tensor(own, parts, group=shares.group.members())
    return own if shares.is_even else own.narrow(1, 0, len(shares.own)).contiguous()


_OPERATIONS: dict[str, Callable[[Tensor, ChannelShards], Tensor]] = {
    # An output of its own, or autograd would take the input itself for it.
    "": lambda tensor, _shares: tensor.view_as(tensor),
    "narrow": view_own_channels,
    "all_gather": all_gather_channels,
    "all_reduce": all_reduce_copy,
    "reduce_scatter": reduce_scatter_channels,
}


class _ChannelCollective(torch.autograd.Function):
    """One operation forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, step: BoundaryOps, shares: ChannelShards) -> Tensor:
        ctx.step, ctx.shares = step, shares
        return _OPERATIONS[step.forward](tensor, shares)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return _OPERATIONS[ctx.step.backward](gradient, ctx.shares), None, None


def apply_collective(tensor: Tensor, step: BoundaryOps, shares: ChannelShards | None) -> Tensor:
    """``tensor`` after ``step``; ``shares`` says whose channels are whose, on the side where they are split."""
    if shares is None or not (step.forward or step.backward):
        return tensor
    moved: Tensor = _ChannelCollective.apply(_cast_for_autocast(tensor), step, shares)  # type: ignore[no-untyped-call]
    return moved


def _cast_for_autocast(tensor: Tensor) -> Tensor:
    """Under autocast in the type that a convolution would turn it into anyway: half the bytes are sent."""
    kind = tensor.device.type
    if tensor.is_floating_point() and torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


ConvolutionLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d
SplittableLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS = (nn.Dropout,)
_CONVOLUTION_FUNCTIONS = (F.conv1d, F.conv2d, F.conv3d)


class _ConvolutionSettings(NamedTuple):
    """What a convolution does beside its weights."""

    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    mode: str
    around: list[int]
    """Padding of modes other than zeros, as ``F.pad`` takes it."""


class ChannelSplitLayer(nn.Module):
    """A layer as ``split`` has it: what goes in and comes out is whole or split as its ``enter`` and ``leave`` say.

    ``weight`` and ``bias`` are the whole layer's own numbers, sliced.
    """

    shards: dict[str, TensorSharding]
    weight: nn.Parameter

    def __init__(self, whole: SplittableLayer, layer: ChannelLayer, split: ChannelLayerSplit, group: RankGroup) -> None:
        super().__init__()
        self.split = split
        self._in = ChannelShards(group, channel_extents(layer.in_channels, group.size, layer.features))
        self._out = ChannelShards(group, channel_extents(layer.out_channels, group.size))
        self.shards = {}
        self._slice(whole, split)
        self._geometry = None if isinstance(whole, nn.Linear) else _convolution_settings(whole)
        self._pieces = self._own_pieces(layer)
        self.train(whole.training)

    def _slice(self, whole: SplittableLayer, split: ChannelLayerSplit) -> None:
        weight, bias = whole.weight.detach(), None if whole.bias is None else whole.bias.detach()
        if split.weight_dim is not None:
            shares = self._in if split.weight_dim else self._out
            self.shards["weight"] = TensorSharding(split.weight_dim, shares.extents)
            weight = weight.narrow(split.weight_dim, shares.own.start, len(shares.own))
        if bias is not None and split.is_bias_split:
            self.shards["bias"] = TensorSharding(0, self._out.extents)
            bias = bias.narrow(0, self._out.own.start, len(self._out.own))
        self.weight = nn.Parameter(weight.clone(), whole.weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), whole.weight.requires_grad)

    def _own_pieces(self, layer: ChannelLayer) -> list[GroupedConvPiece]:
        if self.split.by == "filters" and layer.groups > 1:
            return grouped_conv_pieces(layer, self._out.own)
        inputs = self._in.own if self.split.by in ("channels", "groups") else range(layer.in_channels)
        outputs = self._out.own if self.split.by in ("filters", "groups") else range(layer.out_channels)
        groups = len(inputs) * layer.groups // layer.in_channels if self.split.by == "groups" else layer.groups
        return [GroupedConvPiece(range(len(inputs)), range(len(outputs)), groups)]

    def forward(self, x: Tensor) -> Tensor:
        """[n, in channels, ...] -> [n, out channels, ...], each the rank's own or all of them."""
        x = apply_collective(x, self.split.enter, self._in)
        # Of what is added up over the group, the bias is a part once.
        late = self.split.by == "channels"
        y = apply_collective(self._compute(x, None if late else self.bias), self.split.leave, self._out)
        if self.bias is None or not late:
            return y
        return y + self.bias.to(y.dtype).view(-1, *(1 for _ in y.shape[2:]))

    def _compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._geometry is None:
            return F.linear(x, self.weight, bias)
        if len(self._pieces) == 1 and len(self._pieces[0].inputs) == x.shape[1]:
            return _convolve(x, self.weight, bias, self._geometry, self._pieces[0].groups)
        parts = []
        for piece in self._pieces:
            outputs = slice(piece.outputs.start, piece.outputs.stop)
            inputs = x[:, piece.inputs.start : piece.inputs.stop]
            own_bias = None if bias is None else bias[outputs]
            parts.append(_convolve(inputs, self.weight[outputs], own_bias, self._geometry, piece.groups))
        return torch.cat(parts, dim=1)

    def extra_repr(self) -> str:
        """What is split, and how large the rank's part is."""
        return f"{tuple(self.weight.shape)}, split by {self.split.by or 'nothing'}"


def _convolution_settings(whole: ConvolutionLayer) -> _ConvolutionSettings:
    return _ConvolutionSettings(
        whole.stride, whole.padding, whole.dilation, whole.padding_mode, whole._reversed_padding_repeated_twice
    )


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _ConvolutionSettings, groups: int) -> Tensor:
    function = _CONVOLUTION_FUNCTIONS[x.dim() - 3]
    padding = geometry.padding
    if geometry.mode != "zeros":
        x, padding = F.pad(x, geometry.around, mode=geometry.mode), (0,) * (x.dim() - 2)
    convolved: Tensor = function(x, weight, bias, geometry.stride, padding, geometry.dilation, groups)
    return convolved


class ChannelSplitDropout(nn.Module):
    """Dropout of a rank's own channels that drops what the single device would: it draws for all of them."""

    def __init__(self, whole: nn.Dropout, shares: ChannelShards) -> None:
        super().__init__()
        self.p = whole.p
        self._shares = shares
        self.train(whole.training)

    def forward(self, x: Tensor) -> Tensor:
        """[n, own channels, ...], of the same shape."""
        if not self.training or self.p == 0.0:
            return x
        channels = sum(self._shares.extents)
        kept = x.new_empty(x.shape[0], channels, *x.shape[2:]).bernoulli_(1 - self.p)
        scale = 0.0 if self.p == 1.0 else 1 / (1 - self.p)
        return x * (copy_own_channels(kept, self._shares) * scale)


def copy_own_channels(whole: Tensor, shares: ChannelShards) -> Tensor:
    """This rank's part of ``whole``, which need not stay for it."""
    return whole.narrow(1, shares.own.start, len(shares.own)).clone()


def split_batch_norm(norm: nn.Module, shares: ChannelShards) -> None:
    """Let a BatchNorm keep this rank's channels alone, in place: each channel's statistics are its own affair."""
    assert isinstance(norm, NORMS), "a norm over channels"
    own = slice(shares.own.start, shares.own.stop)
    shards: dict[str, TensorSharding] = {}
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(norm, name)
        if tensor is None:
            continue
        shards[name] = TensorSharding(0, shares.extents)
        part = tensor.detach()[own].clone()
        setattr(norm, name, nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part)
    norm.num_features = len(shares.own)
    norm.shards = shards  # type: ignore[assignment]
