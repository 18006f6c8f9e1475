"""The strategies `filter` and `channel`: registry entries, limits, and the split and communication of each layer.
Dryden et al. 2019 (*Channel and filter parallelism for large-scale CNN training*, SC), and ParaDL (Kahira et al.
2021) for the layout with whole activations between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.layer_table import LayerRow, LayerTable, cached_by_identity, read_shipped_table
from hpcbench.strategies.mesh import even_ranges


class BoundaryOps(NamedTuple):
    """The operations on a tensor before a layer or after it, forward and backward.

    Of the operations that move something, ``all_gather`` and ``reduce_scatter`` are passed parts that are padded to
    the largest one, ``all_reduce`` the whole tensor; ``narrow`` takes the rank's own channels and sends nothing.
    """

    forward: str
    backward: str


IDENTITY = BoundaryOps("", "")
ALL_REDUCE_BACKWARD = BoundaryOps("", "all_reduce")
NARROW = BoundaryOps("narrow", "all_gather")
ALL_REDUCE_FORWARD = BoundaryOps("all_reduce", "")
ALL_GATHER = BoundaryOps("all_gather", "narrow")
ALL_GATHER_REDUCE_SCATTER = BoundaryOps("all_gather", "reduce_scatter")
REDUCE_SCATTER_ALL_GATHER = BoundaryOps("reduce_scatter", "all_gather")


class ChannelLayer(NamedTuple):
    """A convolution or linear layer as far as a split needs it."""

    in_channels: int
    out_channels: int
    groups: int = 1
    features: int = 1
    """Inputs of a linear layer that belong to one channel of the flattened activations."""
    is_first: bool = False
    """Its input is the sample: whole on every rank, and without a gradient."""
    is_last: bool = False
    """Its output is the model's: whole on every rank."""


class ChannelLayerSplit(NamedTuple):
    """The part of a layer's weight that a rank holds, and the communication around the layer.

    ``by`` is the dim of the weight that is split: ``filters`` (the outputs), ``channels`` (the inputs), ``groups``
    (both), or ``""``: the weight is whole.
    """

    by: str
    enter: BoundaryOps = IDENTITY
    leave: BoundaryOps = IDENTITY

    @property
    def weight_dim(self) -> int | None:
        """The dim of the weight that is split: 0 as the outputs are, 1 as the inputs are."""
        return {"": None, "channels": 1}.get(self.by, 0)

    @property
    def is_bias_split(self) -> bool:
        """Whether a rank holds the biases of its own outputs alone."""
        return self.weight_dim == 0 or self.leave.forward == "reduce_scatter"


class ChannelScheme(NamedTuple):
    """A strategy with its options."""

    strategy: str
    form: str = "sharded"
    """``gathered``: activations are whole between layers; ``sharded``: they are split by channels."""
    split_last: bool = False
    """Whether the last layer is split, too."""


def channel_split(layer: ChannelLayer, scheme: ChannelScheme, degree: int) -> ChannelLayerSplit:
    """Return the split of ``layer`` over ``degree`` ranks."""
    if scheme.form == "gathered":
        return _gathered_split(layer, scheme, degree)
    if layer.is_last and not scheme.split_last:
        return ChannelLayerSplit("", IDENTITY if layer.is_first else ALL_GATHER)
    leave = ALL_GATHER if layer.is_last else IDENTITY
    if layer.is_first:
        return ChannelLayerSplit("filters", ALL_REDUCE_BACKWARD, leave)
    if has_rank_aligned_groups(layer, degree):
        return ChannelLayerSplit("groups", IDENTITY, leave)
    if scheme.strategy == "filter" or layer.groups > 1:
        return ChannelLayerSplit("filters", ALL_GATHER_REDUCE_SCATTER, leave)
    return ChannelLayerSplit("channels", IDENTITY, ALL_REDUCE_FORWARD if layer.is_last else REDUCE_SCATTER_ALL_GATHER)


def _gathered_split(layer: ChannelLayer, scheme: ChannelScheme, degree: int) -> ChannelLayerSplit:
    if (layer.is_last and not scheme.split_last) or (layer.is_first and scheme.strategy == "channel"):
        return ChannelLayerSplit("")
    if has_rank_aligned_groups(layer, degree):
        return ChannelLayerSplit("groups", NARROW, ALL_GATHER)
    if scheme.strategy == "filter" or layer.groups > 1:
        return ChannelLayerSplit("filters", ALL_REDUCE_BACKWARD, ALL_GATHER)
    return ChannelLayerSplit("channels", NARROW, ALL_REDUCE_FORWARD)


def has_rank_aligned_groups(layer: ChannelLayer, degree: int) -> bool:
    """Whether every rank's outputs come from its own inputs alone: the shares' borders are borders of groups."""
    if layer.groups == 1:
        return False
    ins, outs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    ranges = zip(even_ranges(layer.in_channels, degree), even_ranges(layer.out_channels, degree), strict=True)
    return all(a.start % ins == 0 and b.start % outs == 0 and a.start // ins == b.start // outs for a, b in ranges)


def divided_channels(layer: ChannelLayer, split: ChannelLayerSplit) -> list[int]:
    """The numbers of channels that are shared out over the ranks for this layer: none may be below their number."""
    are_inputs_split = split.enter not in (IDENTITY, ALL_REDUCE_BACKWARD) or split.by in ("channels", "groups")
    are_outputs_split = split.leave not in (IDENTITY, ALL_REDUCE_FORWARD) or split.by in ("filters", "groups")
    return [layer.in_channels] * are_inputs_split + [layer.out_channels] * are_outputs_split


@lru_cache(maxsize=4096)
def channel_extents(channels: int, degree: int, features: int = 1) -> tuple[int, ...]:
    """Every rank's share of ``channels`` that have ``features`` entries each.

    >>> channel_extents(7, 3, features=2)
    (6, 4, 4)
    """
    return tuple(len(part) * features for part in even_ranges(channels, degree))


class GroupedConvPiece(NamedTuple):
    """Consecutive outputs of a rank that one grouped convolution computes from consecutive inputs of the whole."""

    inputs: range
    outputs: range
    """Within the rank's own."""
    groups: int


def grouped_conv_pieces(layer: ChannelLayer, outputs: range) -> list[GroupedConvPiece]:
    """The convolutions that compute ``outputs`` (of the whole) of a grouped layer whose groups the range may cut.

    >>> grouped_conv_pieces(ChannelLayer(4, 8, groups=2), range(2, 8))
    [GroupedConvPiece(inputs=range(0, 2), outputs=range(0, 2), groups=1),
     GroupedConvPiece(inputs=range(2, 4), outputs=range(2, 6), groups=1)]
    """
    ins, outs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    pieces: list[GroupedConvPiece] = []
    start = outputs.start
    while start < outputs.stop:
        first = start // outs
        groups = max((outputs.stop - start) // outs, 1) if start % outs == 0 else 1
        stop = min((first + groups) * outs, outputs.stop)
        inputs = range(first * ins, (first + groups) * ins)
        pieces.append(GroupedConvPiece(inputs, range(start - outputs.start, stop - outputs.start), groups))
        start = stop
    return pieces


def largest_channel_degree(layers: Sequence[ChannelLayer], scheme: ChannelScheme, most: int) -> int:
    """The largest degree up to ``most`` at which every rank gets a channel of every tensor that is shared out."""
    return next(degree for degree in range(most, 0, -1) if degree == 1 or fits_degree(layers, scheme, degree))


def fits_degree(layers: Sequence[ChannelLayer], scheme: ChannelScheme, degree: int) -> bool:
    """Whether every rank gets a channel of every tensor that is shared out."""
    splits = ((layer, channel_split(layer, scheme, degree)) for layer in layers)
    return all(degree <= channels for layer, split in splits for channels in divided_channels(layer, split))


class ChannelRow(NamedTuple):
    """A row of the table: ``layer`` where it is one that can be split."""

    row: LayerRow
    layer: ChannelLayer | None
    channels: int
    """Channels of the output that ranks may share; 0 before the first layer and after the last one."""

    def split(self, scheme: ChannelScheme, degree: int) -> ChannelLayerSplit | None:
        """Return ``channel_split`` of the layer; ``None`` for a row that is no layer."""
        return None if self.layer is None else channel_split(self.layer, scheme, degree)


@cached_by_identity(32)
def channel_layer_rows(table: LayerTable) -> tuple[ChannelRow, ...]:
    """Every row of ``table`` with the channels that it has to do with.

    What was flattened keeps the channels that it had before. The first layer is the one that takes the sample.
    """
    splittable = [index for index, row in enumerate(table.layers) if is_splittable(row)]
    rows: list[ChannelRow] = []
    channels = 0
    for index, row in enumerate(table.layers):
        layer = None
        if is_splittable(row):
            layer = _channel_layer(row, channels, index == splittable[0], index == splittable[-1])
            channels = 0 if layer.is_last else layer.out_channels
        elif channels and len(row.output_shape) > 1:
            channels = row.output_shape[0]
        rows.append(ChannelRow(row, layer, channels))
    return tuple(rows)


def splittable_layers(table: LayerTable) -> list[ChannelLayer]:
    """The convolutions and linear layers, in the order of execution."""
    return [layer for _, layer, _ in channel_layer_rows(table) if layer is not None]


def is_splittable(row: LayerRow) -> bool:
    """Whether a row is one of those whose channels are shared out."""
    return row.kind in ("Conv1d", "Conv2d", "Conv3d", "Linear")


def _channel_layer(row: LayerRow, channels: int, is_first: bool, is_last: bool) -> ChannelLayer:
    attributes = row.attributes
    if "out_features" in attributes:
        inputs = attributes["in_features"]
        before = channels if channels and inputs % channels == 0 else inputs
        return ChannelLayer(before, attributes["out_features"], 1, inputs // before, is_first, is_last)
    ins, outs, groups = (attributes[name] for name in ("in_channels", "out_channels", "groups"))
    return ChannelLayer(ins, outs, groups, is_first=is_first, is_last=is_last)


def channel_scheme(spec: RunSpec) -> ChannelScheme:
    """The strategy of the run with its options."""
    return ChannelScheme(
        spec.strategy, str(spec.options.get("form", "sharded")), bool(spec.options.get("split_last", False))
    )


def channel_exclusion(spec: RunSpec) -> str | None:
    """Return the reason why the run is infeasible; the worker examines a user's own model."""
    if spec.precision == "fp16":
        return f"{spec.strategy} with fp16 would need a loss scale that all shards agree on: use bf16"
    # Channels depend neither on the input's size nor on the options of the shipped models.
    table = read_shipped_table(spec.model, spec.dataset)
    return None if table is None else channel_table_exclusion(spec, table)


def channel_table_exclusion(spec: RunSpec, table: LayerTable) -> str | None:
    """Return the reason why the model of ``table`` cannot be split as the run asks for."""
    if table.is_transformer:
        return (
            f"{spec.strategy} splits convolutions and what lies between them; {spec.model} is a transformer: use tensor"
        )
    layers, scheme = splittable_layers(table), channel_scheme(spec)
    if fits_degree(layers, scheme, spec.tp_degree):
        return None
    most = largest_channel_degree(layers, scheme, spec.tp_degree)
    return (
        f"tp_degree {spec.tp_degree}, but {spec.strategy} of {spec.model} needs a channel of every layer for every "
        f"rank: the largest tp_degree that works is {most}"
    )
