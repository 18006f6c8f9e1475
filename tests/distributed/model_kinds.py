"""Small models of one kind each, with what ``verify`` must judge rightly: buffers that are no numbers, parameters
without a gradient, weights that two layers share, and memory in another order.

A user's own model, as ``model = "model_kinds:build"``. Blocks, so that two stages cut it and shared weights lie on both::

    conv    convolution | convolution | mean of positions | special | linear
    tokens  patches | transformer block | special | transformer block | mean of tokens and linear
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcbench.worker.models.transformer import TransformerBlock

WIDTH = 8


class Masked(nn.Module):
    """A linear layer below its diagonal, by a mask; another mask is added to scores, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        lower = torch.ones(WIDTH, WIDTH).tril().bool()
        self.register_buffer("mask", lower)
        self.register_buffer("added", torch.zeros(WIDTH, WIDTH).masked_fill(~lower, float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.masked_fill(~self.get_buffer("mask"), 0.0)
        scores = (self.linear.weight + self.get_buffer("added")).softmax(-1)
        return F.linear(x, weight + scores, self.linear.bias)


class Positions(nn.Module):
    """Adds a vector that is looked up by ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("ids", torch.arange(WIDTH - 1, -1, -1))
        self.register_buffer("small", torch.full((3,), -128, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[self.get_buffer("ids")]


class Counted(nn.Module):
    """Counts its training passes, as BatchNorm does before it; the second one averages over them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("passes").add_(1)
        return self.norms(x.flatten(0, -2)).view_as(x)  # type: ignore[no-any-return]


class Spare(nn.Linear):
    """Has a parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.rand(WIDTH))


class Transposed(nn.Module):
    """Multiplies by a weight and by its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH // 2, WIDTH) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.weight.t())


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, width] -> [n, width]."""
        return x.mean(1)


class ToTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """[n, width, rows, columns] -> [n, tokens, width]."""
        return x.flatten(2).transpose(1, 2)


SPECIAL: dict[str, type[nn.Module]] = {
    "bool buffer": Masked, "int buffer": Positions, "counter": Counted, "unused": Spare, "transposed": Transposed,
}  # fmt: skip


def _frozen(first: nn.Module, second: nn.Module) -> None:
    """Freeze all before the second layer, and of that the bias."""
    first.requires_grad_(False)
    _layer(second).bias.requires_grad_(False)


def _shared(first: nn.Module, second: nn.Module) -> None:
    _layer(second).weight = _layer(first).weight


def _strided(first: nn.Module, _second: nn.Module) -> None:
    weight = _layer(first).weight
    weight.data = weight.data.transpose(0, 1).contiguous().transpose(0, 1)


CHANGED: dict[str, Any] = {"frozen": _frozen, "shared": _shared, "strided": _strided}
KINDS = (*SPECIAL, *CHANGED)


def _layer(block: nn.Module) -> Any:
    if isinstance(block, TransformerBlock):
        return block.mlp.up
    return next(module for module in block.modules() if isinstance(module, nn.Conv2d))


def build(in_shape: tuple[int, ...], outputs: int, kind: str, tokens: bool) -> nn.Sequential:
    """[n, *in_shape] -> [n, outputs]."""
    special = SPECIAL[kind]() if kind in SPECIAL else nn.Linear(WIDTH, WIDTH)
    first: nn.Module
    second: nn.Module
    if tokens:
        patches = nn.Sequential(nn.Conv2d(in_shape[0], WIDTH, 2, stride=2), ToTokens())
        first, second = (TransformerBlock(WIDTH, 2, causal=False, dropout=0.0) for _ in range(2))
        model = nn.Sequential(patches, first, special, second, nn.Sequential(Pooled(), nn.Linear(WIDTH, outputs)))
    else:
        begin = nn.Sequential(nn.Conv2d(in_shape[0], WIDTH, 3, padding=1), nn.ReLU())
        first, second = (nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()) for _ in range(2))
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model = nn.Sequential(begin, first, second, pool, special, nn.Linear(WIDTH, outputs))
    if kind in CHANGED:
        CHANGED[kind](first, second)
        if kind == "frozen":
            model[0].requires_grad_(False)
    return model
