"""Convolutions and linear layers of which a rank holds the weights of its channels, and what goes between them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from hpcbench.parallel.channels import Layer, Piece, Split, extents, pieces
from hpcbench.worker.channels.collectives import Shares
from hpcbench.worker.channels.functions import apply
from hpcbench.worker.groups import Group
from hpcbench.worker.strategies.model_parallel import Shard

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Whole = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS = (nn.Dropout,)
_FUNCTIONS = (F.conv1d, F.conv2d, F.conv3d)


class _Geometry(NamedTuple):
    """What a convolution does beside its weights."""

    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    mode: str
    around: list[int]
    """Padding of modes other than zeros, as ``F.pad`` takes it."""


class SplitLayer(nn.Module):
    """A layer as ``split`` has it: what goes in and comes out is whole or split as its ``enter`` and ``leave`` say.

    ``weight`` and ``bias`` are the whole layer's own numbers, sliced.
    """

    shards: dict[str, Shard]
    weight: nn.Parameter

    def __init__(self, whole: Whole, layer: Layer, split: Split, group: Group) -> None:
        super().__init__()
        self.split = split
        self._in = Shares(group, extents(layer.in_channels, group.size, layer.features))
        self._out = Shares(group, extents(layer.out_channels, group.size))
        self.shards = {}
        self._slice(whole, split)
        self._geometry = None if isinstance(whole, nn.Linear) else _geometry(whole)
        self._pieces = self._own_pieces(layer)
        self.train(whole.training)

    def _slice(self, whole: Whole, split: Split) -> None:
        weight, bias = whole.weight.detach(), None if whole.bias is None else whole.bias.detach()
        if split.weight_dim is not None:
            shares = self._in if split.weight_dim else self._out
            self.shards["weight"] = Shard(split.weight_dim, shares.extents)
            weight = weight.narrow(split.weight_dim, shares.own.start, len(shares.own))
        if bias is not None and split.is_bias_split:
            self.shards["bias"] = Shard(0, self._out.extents)
            bias = bias.narrow(0, self._out.own.start, len(self._out.own))
        self.weight = nn.Parameter(weight.clone(), whole.weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), whole.weight.requires_grad)

    def _own_pieces(self, layer: Layer) -> list[Piece]:
        if self.split.by == "filters" and layer.groups > 1:
            return pieces(layer, self._out.own)
        inputs = self._in.own if self.split.by in ("channels", "groups") else range(layer.in_channels)
        outputs = self._out.own if self.split.by in ("filters", "groups") else range(layer.out_channels)
        groups = len(inputs) * layer.groups // layer.in_channels if self.split.by == "groups" else layer.groups
        return [Piece(range(len(inputs)), range(len(outputs)), groups)]

    def forward(self, x: Tensor) -> Tensor:
        """[n, in channels, ...] -> [n, out channels, ...], each the rank's own or all of them."""
        x = apply(x, self.split.enter, self._in)
        # Of what is added up over the group, the bias is a part once.
        late = self.split.by == "channels"
        y = apply(self._compute(x, None if late else self.bias), self.split.leave, self._out)
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


def _geometry(whole: Convolution) -> _Geometry:
    return _Geometry(
        whole.stride, whole.padding, whole.dilation, whole.padding_mode, whole._reversed_padding_repeated_twice
    )


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry, groups: int) -> Tensor:
    function = _FUNCTIONS[x.dim() - 3]
    padding = geometry.padding
    if geometry.mode != "zeros":
        x, padding = F.pad(x, geometry.around, mode=geometry.mode), (0,) * (x.dim() - 2)
    convolved: Tensor = function(x, weight, bias, geometry.stride, padding, geometry.dilation, groups)
    return convolved


class SplitDropout(nn.Module):
    """Dropout of a rank's own channels that drops what the single device would: it draws for all of them."""

    def __init__(self, whole: nn.Dropout, shares: Shares) -> None:
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
        return x * (narrowed_copy(kept, self._shares) * scale)


def narrowed_copy(whole: Tensor, shares: Shares) -> Tensor:
    """This rank's part of ``whole``, which need not stay for it."""
    return whole.narrow(1, shares.own.start, len(shares.own)).clone()


def split_norm(norm: nn.Module, shares: Shares) -> None:
    """Let a BatchNorm keep this rank's channels alone, in place: each channel's statistics are its own affair."""
    assert isinstance(norm, NORMS), "a norm over channels"
    own = slice(shares.own.start, shares.own.stop)
    shards: dict[str, Shard] = {}
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(norm, name)
        if tensor is None:
            continue
        shards[name] = Shard(0, shares.extents)
        part = tensor.detach()[own].clone()
        setattr(norm, name, nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part)
    norm.num_features = len(shares.own)
    norm.shards = shards  # type: ignore[assignment]
