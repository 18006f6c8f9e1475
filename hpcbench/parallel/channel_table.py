"""A model's layers as ``filter`` and ``channel`` split them, from its layer table alone."""

from __future__ import annotations

from typing import NamedTuple

from hpcbench.parallel import layers
from hpcbench.parallel.channels import Layer, Scheme, Split, split_of
from hpcbench.parallel.memo import once_per


class Row(NamedTuple):
    """A row of the table: ``layer`` where it is one that can be split."""

    row: layers.Layer
    layer: Layer | None
    channels: int
    """Of what comes out, as far as ranks may share them: 0 before the first layer and behind the last."""

    def split(self, scheme: Scheme, degree: int) -> Split | None:
        """See ``split_of``; ``None`` for what is no layer."""
        return None if self.layer is None else split_of(self.layer, scheme, degree)


@once_per(32)
def rows(table: layers.LayerTable) -> tuple[Row, ...]:
    """Every row of ``table`` with the channels that it has to do with.

    What was flattened keeps the channels that it had before. The first layer is the one that takes the sample.
    """
    places = [place for place, row in enumerate(table.layers) if is_layer(row)]
    found: list[Row] = []
    channels = 0
    for place, row in enumerate(table.layers):
        layer = None
        if is_layer(row):
            layer = _layer(row, channels, place == places[0], place == places[-1])
            channels = 0 if layer.is_last else layer.out_channels
        elif channels and len(row.output_shape) > 1:
            channels = row.output_shape[0]
        found.append(Row(row, layer, channels))
    return tuple(found)


def split_layers(table: layers.LayerTable) -> list[Layer]:
    """The convolutions and linear layers, in the order of execution."""
    return [one.layer for one in rows(table) if one.layer is not None]


def is_layer(row: layers.Layer) -> bool:
    """Whether a row is one of those whose channels are shared out."""
    return row.kind in ("Conv1d", "Conv2d", "Conv3d", "Linear")


def has_attention(table: layers.LayerTable) -> bool:
    """Whether the model is a transformer."""
    return any("heads" in row.attributes or "num_heads" in row.attributes for row in table.layers)


def _layer(row: layers.Layer, channels: int, is_first: bool, is_last: bool) -> Layer:
    attributes = row.attributes
    if "out_features" in attributes:
        inputs = attributes["in_features"]
        before = channels if channels and inputs % channels == 0 else inputs
        return Layer(before, attributes["out_features"], 1, inputs // before, is_first, is_last)
    ins, outs, groups = (attributes[name] for name in ("in_channels", "out_channels", "groups"))
    return Layer(ins, outs, groups, is_first=is_first, is_last=is_last)
