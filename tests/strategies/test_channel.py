"""The split of layers, as literal tables; limits of every shipped model; reasons of infeasible runs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.channel.channel_split import (
    ALL_GATHER,
    ALL_GATHER_REDUCE_SCATTER,
    ALL_REDUCE_BACKWARD,
    ALL_REDUCE_FORWARD,
    IDENTITY,
    NARROW,
    REDUCE_SCATTER_ALL_GATHER,
    ChannelLayer,
    ChannelLayerSplit,
    ChannelScheme,
    GroupedConvPiece,
    channel_exclusion,
    channel_extents,
    channel_layer_rows,
    channel_split,
    grouped_conv_pieces,
    has_rank_aligned_groups,
    largest_channel_degree,
    splittable_layers,
)
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from tests.layer_tables import table_of

INNER = ChannelLayer(8, 8)
FIRST, LAST = INNER._replace(is_first=True), INNER._replace(is_last=True)
DEPTHWISE, CUT = INNER._replace(groups=8), ChannelLayer(8, 8, groups=2)


Split = ChannelLayerSplit
BY_GROUPS = Split("groups", IDENTITY, IDENTITY)
WHOLE_SUMS = Split("filters", ALL_GATHER_REDUCE_SCATTER, IDENTITY)
FULL_INPUT = Split("filters", ALL_REDUCE_BACKWARD, IDENTITY)
FULL_BOTH = Split("filters", ALL_REDUCE_BACKWARD, ALL_GATHER)
GROUPS_OF_WHOLE = Split("groups", NARROW, ALL_GATHER)


@pytest.mark.parametrize(
    ("form", "layer", "filtered", "channelled"),
    [
        ("sharded", INNER, WHOLE_SUMS, Split("channels", IDENTITY, REDUCE_SCATTER_ALL_GATHER)),
        ("sharded", FIRST, FULL_INPUT, FULL_INPUT),
        ("sharded", LAST, Split("", ALL_GATHER, IDENTITY), Split("", ALL_GATHER, IDENTITY)),
        ("sharded", DEPTHWISE, BY_GROUPS, BY_GROUPS),
        ("sharded", CUT, WHOLE_SUMS, WHOLE_SUMS),
        ("gathered", INNER, FULL_BOTH, Split("channels", NARROW, ALL_REDUCE_FORWARD)),
        ("gathered", FIRST, FULL_BOTH, Split("")),
        ("gathered", LAST, Split(""), Split("")),
        ("gathered", DEPTHWISE, GROUPS_OF_WHOLE, GROUPS_OF_WHOLE),
        ("gathered", CUT, FULL_BOTH, FULL_BOTH),
    ],
)
def test_a_layer_is_split_as_the_table_states(
    form: str, layer: ChannelLayer, filtered: ChannelLayerSplit, channelled: ChannelLayerSplit
) -> None:
    assert channel_split(layer, ChannelScheme("filter", form), 4) == filtered
    assert channel_split(layer, ChannelScheme("channel", form), 4) == channelled


@pytest.mark.parametrize(
    ("strategy", "form", "split"),
    [
        ("filter", "sharded", Split("filters", ALL_GATHER_REDUCE_SCATTER, ALL_GATHER)),
        ("channel", "sharded", Split("channels", IDENTITY, ALL_REDUCE_FORWARD)),
        ("filter", "gathered", FULL_BOTH),
        ("channel", "gathered", Split("channels", NARROW, ALL_REDUCE_FORWARD)),
    ],
)
def test_the_last_layer_is_split_with_its_option(strategy: str, form: str, split: ChannelLayerSplit) -> None:
    assert channel_split(LAST, ChannelScheme(strategy, form, split_last=True), 4) == split


@pytest.mark.parametrize(
    ("layer", "degree", "expected"),
    [
        (ChannelLayer(8, 8), 2, False),
        (ChannelLayer(5, 5, 5), 2, True),
        (ChannelLayer(5, 10, 5), 2, False),  # 3 and 2 groups of inputs, but 5 and 5 outputs
        (ChannelLayer(6, 12, 6), 2, True),
        (ChannelLayer(8, 12, 4), 4, True),
        (ChannelLayer(8, 12, 4), 3, False),
        (ChannelLayer(8, 8, 2), 4, False),
    ],
)
def test_rank_shares_are_aligned_with_groups_or_not(layer: ChannelLayer, degree: int, expected: bool) -> None:
    assert has_rank_aligned_groups(layer, degree) == expected


def test_a_share_of_grouped_channels_is_cut_into_pieces() -> None:
    assert grouped_conv_pieces(ChannelLayer(8, 12, 4), range(2, 11)) == [
        GroupedConvPiece(range(2), range(1), 1),
        GroupedConvPiece(range(2, 6), range(1, 7), 2),
        GroupedConvPiece(range(6, 8), range(7, 9), 1),
    ]
    assert grouped_conv_pieces(ChannelLayer(8, 12, 4), range(4, 5)) == [GroupedConvPiece(range(2, 4), range(1), 1)]


def test_channel_extents_are_even_and_cover_all_channels() -> None:
    assert channel_extents(10, 4) == (3, 3, 2, 2)
    assert channel_extents(5, 2, features=9) == (27, 18)


@pytest.mark.parametrize(
    ("model", "dataset", "filters", "channels"),
    [
        ("vgg16", "imagenet", 64, 64),
        ("resnet50", "imagenet", 64, 64),
        ("resnet18", "digits", 64, 64),
        ("mobilenetv2", "imagenet", 16, 16),
        ("cosmoflow", "cosmoflow", 32, 32),
    ],
)
@pytest.mark.parametrize("form", ["sharded", "gathered"])
def test_the_largest_degree_is_the_fewest_channels_of_a_layer(
    model: str, dataset: str, filters: int, channels: int, form: str
) -> None:
    """ParaDL states 64 for VGG16 and ResNet-50; its channel parallelism leaves out the first layer."""
    table = table_of(model, dataset)
    layers = splittable_layers(table)
    assert largest_channel_degree(layers, ChannelScheme("filter", form), 4096) == filters
    assert largest_channel_degree(layers, ChannelScheme("channel", form), 4096) == channels
    assert largest_channel_degree(layers, ChannelScheme("filter", form, split_last=True), 4096) == min(
        filters, layers[-1].out_channels
    )


def test_flattened_inputs_keep_their_channels() -> None:
    table = table_of("vgg11", "imagenet")
    (first, *_, last) = linear = [one for one in channel_layer_rows(table) if one.row.kind == "Linear"]
    assert first.layer == ChannelLayer(512, 4096, features=49)
    assert (last.layer, last.channels) == (ChannelLayer(4096, 1000, is_last=True), 0)
    assert len(linear) == 3


def spec(**more: Any) -> RunSpec:
    given: dict[str, Any] = {"model": "vgg16", "dataset": "imagenet", "strategy": "filter", "batch_size": 4, **more}
    return RunSpec(**given)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tp_degree": 64}, None),
        ({"tp_degree": 65}, "tp_degree 65, but filter of vgg16 .* the largest tp_degree that works is 64"),
        ({"tp_degree": 12, "options": {"split_last": True}, "dataset": "digits"}, "works is 10$"),
        ({"tp_degree": 32, "strategy": "channel", "model": "mobilenetv2"}, "works is 16$"),
        ({"model": "gpt", "dataset": "tokens"}, "gpt is a transformer: use tensor"),
        ({"model": "vit", "dataset": "digits"}, "vit is a transformer: use tensor"),
        ({"precision": "fp16"}, "use bf16"),
        ({"compile": True}, None),
        ({"model": "mine:make", "tp_degree": 4096}, None),
    ],
)
def test_infeasible_channel_runs_have_a_reason(more: dict[str, Any], reason: str | None) -> None:
    found = channel_exclusion(spec(**more))
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found), found


def point(strategy: str, **more: Any) -> dict[str, Any]:
    return {"model": "vgg16", "dataset": "imagenet", "strategy": strategy, "batch_size": 4, **more}


def test_a_hybrid_shares_the_model_within_a_node() -> None:
    found = resolve_point(point("data_filter", nodes=4, tasks_per_node=2), PartitionLimits("any"))
    assert isinstance(found, RunSpec)
    assert (found.strategy, found.dp_degree, found.tp_degree) == ("filter", 4, 2)
    alone = resolve_point(point("channel", nodes=4, tasks_per_node=2), PartitionLimits("any"))
    assert isinstance(alone, RunSpec)
    assert (alone.dp_degree, alone.tp_degree) == (1, 8)


def test_a_degree_above_the_largest_is_infeasible() -> None:
    found = resolve_point(point("channel", nodes=32, tasks_per_node=4), PartitionLimits("any"))
    assert isinstance(found, InfeasiblePoint)
    assert found.reason.endswith("the largest tp_degree that works is 64")
