"""How the strategies ``filter`` and ``channel`` split each layer, and what is sent for it.

Dryden et al. 2019 (*Channel and filter parallelism for large-scale CNN training*, SC), and Nguyen et al.'s ParaDL for
the form in which every rank holds whole activations between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hpcbench.parallel.shard import even_ranges


class Step(NamedTuple):
    """What is done to a tensor before a layer or after it, forward and backward.

    Of the operations that move something, ``all_gather`` and ``reduce_scatter`` are passed parts that are padded to
    the largest one, ``all_reduce`` the whole tensor; ``narrow`` takes the rank's own channels and sends nothing.
    """

    forward: str
    backward: str


KEEP = Step("", "")
REPLICATE = Step("", "all_reduce")
NARROW = Step("narrow", "all_gather")
SUM = Step("all_reduce", "")
GATHER = Step("all_gather", "narrow")
GATHER_SUM = Step("all_gather", "reduce_scatter")
SUM_SCATTER = Step("reduce_scatter", "all_gather")


class Layer(NamedTuple):
    """A convolution or linear layer as far as a split needs it."""

    in_channels: int
    out_channels: int
    groups: int = 1
    features: int = 1
    """Inputs of a linear layer that belong to one channel of what was flattened; it has so many times ``in_channels``.
    """
    is_first: bool = False
    """Its input is the sample: whole on every rank, and without a gradient."""
    is_last: bool = False
    """What comes out is the model's: whole on every rank."""


class Split(NamedTuple):
    """What a rank holds of a layer's weight, and what is sent around the layer.

    ``by`` is the dim of the weight that is split: ``filters`` (the outputs), ``channels`` (the inputs), ``groups``
    (both), or ``""``: the weight is whole.
    """

    by: str
    enter: Step = KEEP
    leave: Step = KEEP

    @property
    def weight_dim(self) -> int | None:
        """The dim of the weight that is split: 0 as the outputs are, 1 as the inputs are."""
        return {"": None, "channels": 1}.get(self.by, 0)

    @property
    def is_bias_split(self) -> bool:
        """Whether a rank holds the biases of its own outputs alone."""
        return self.weight_dim == 0 or self.leave.forward == "reduce_scatter"


class Scheme(NamedTuple):
    """A strategy with its options."""

    strategy: str
    form: str = "sharded"
    """``gathered``: activations are whole between layers; ``sharded``: they are split by channels."""
    split_last: bool = False
    """Whether the last layer is split, too."""


def split_of(layer: Layer, scheme: Scheme, degree: int) -> Split:
    """How ``layer`` is split over ``degree`` ranks."""
    if scheme.form == "gathered":
        return _gathered(layer, scheme, degree)
    if layer.is_last and not scheme.split_last:
        return Split("", KEEP if layer.is_first else GATHER)
    leave = GATHER if layer.is_last else KEEP
    if layer.is_first:
        return Split("filters", REPLICATE, leave)
    if are_aligned(layer, degree):
        return Split("groups", KEEP, leave)
    if scheme.strategy == "filter" or layer.groups > 1:
        return Split("filters", GATHER_SUM, leave)
    return Split("channels", KEEP, SUM if layer.is_last else SUM_SCATTER)


def _gathered(layer: Layer, scheme: Scheme, degree: int) -> Split:
    if (layer.is_last and not scheme.split_last) or (layer.is_first and scheme.strategy == "channel"):
        return Split("")
    if are_aligned(layer, degree):
        return Split("groups", NARROW, GATHER)
    if scheme.strategy == "filter" or layer.groups > 1:
        return Split("filters", REPLICATE, GATHER)
    return Split("channels", NARROW, SUM)


def are_aligned(layer: Layer, degree: int) -> bool:
    """Whether every rank's outputs come from its own inputs alone: the shares' borders are borders of groups."""
    if layer.groups == 1:
        return False
    ins, outs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    ranges = zip(even_ranges(layer.in_channels, degree), even_ranges(layer.out_channels, degree), strict=True)
    return all(a.start % ins == 0 and b.start % outs == 0 and a.start // ins == b.start // outs for a, b in ranges)


def divided(layer: Layer, split: Split) -> list[int]:
    """The numbers of channels that are shared out over the ranks for this layer: none may be below their number."""
    inputs, outputs = [layer.in_channels], [layer.out_channels]
    taken = inputs if split.enter not in (KEEP, REPLICATE) or split.by in ("channels", "groups") else []
    return taken + (outputs if split.leave not in (KEEP, SUM) or split.by in ("filters", "groups") else [])


@lru_cache(maxsize=4096)
def extents(channels: int, degree: int, features: int = 1) -> tuple[int, ...]:
    """Every rank's share of ``channels`` that have ``features`` entries each.

    >>> extents(7, 3, features=2)
    (6, 4, 4)
    """
    return tuple(len(part) * features for part in even_ranges(channels, degree))


class Piece(NamedTuple):
    """Consecutive outputs of a rank that one grouped convolution computes from consecutive inputs of the whole."""

    inputs: range
    outputs: range
    """Within the rank's own."""
    groups: int


def pieces(layer: Layer, outputs: range) -> list[Piece]:
    """The convolutions that compute ``outputs`` (of the whole) of a grouped layer whose groups the range may cut.

    >>> pieces(Layer(4, 8, groups=2), range(2, 8))
    [Piece(inputs=range(0, 2), outputs=range(0, 2), groups=1), Piece(inputs=range(2, 4), outputs=range(2, 6), groups=1)]
    """
    ins, outs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    found: list[Piece] = []
    at = outputs.start
    while at < outputs.stop:
        first = at // outs
        whole = (outputs.stop - at) // outs if at % outs == 0 else 0
        stop = at + whole * outs if whole else min((first + 1) * outs, outputs.stop)
        count = max(whole, 1)
        inputs = range(first * ins, (first + count) * ins)
        found.append(Piece(inputs, range(at - outputs.start, stop - outputs.start), count))
        at = stop
    return found


def largest_degree(layers: Sequence[Layer], scheme: Scheme, most: int) -> int:
    """The largest degree up to ``most`` at which every rank gets a channel of every tensor that is shared out."""
    return next(degree for degree in range(most, 0, -1) if degree == 1 or fits(layers, scheme, degree))


def fits(layers: Sequence[Layer], scheme: Scheme, degree: int) -> bool:
    """Whether every rank gets a channel of every tensor that is shared out."""
    return all(degree <= least for one in layers for least in divided(one, split_of(one, scheme, degree)))
