"""How layers are split, as literal tables; limits of every shipped model; what excludes a run."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.channel_limits import excluded
from hpcbench.parallel.channel_table import rows, split_layers
from hpcbench.parallel.channels import (
    GATHER,
    GATHER_SUM,
    KEEP,
    NARROW,
    REPLICATE,
    SUM,
    SUM_SCATTER,
    Layer,
    Piece,
    Scheme,
    Split,
    are_aligned,
    extents,
    largest_degree,
    pieces,
    split_of,
)
from hpcbench.parallel.layers import read_table
from hpcbench.parallel.resolve import Dropped, Limits, resolve

INNER = Layer(8, 8)
FIRST, LAST = INNER._replace(is_first=True), INNER._replace(is_last=True)
DEPTHWISE, CUT = INNER._replace(groups=8), Layer(8, 8, groups=2)


@pytest.mark.parametrize(
    ("layer", "filtered", "channelled"),
    [
        (INNER, Split("filters", GATHER_SUM, KEEP), Split("channels", KEEP, SUM_SCATTER)),
        (FIRST, Split("filters", REPLICATE, KEEP), Split("filters", REPLICATE, KEEP)),
        (LAST, Split("", GATHER, KEEP), Split("", GATHER, KEEP)),
        (DEPTHWISE, Split("groups", KEEP, KEEP), Split("groups", KEEP, KEEP)),
        (CUT, Split("filters", GATHER_SUM, KEEP), Split("filters", GATHER_SUM, KEEP)),
    ],
)
def test_sharded(layer: Layer, filtered: Split, channelled: Split) -> None:
    assert split_of(layer, Scheme("filter"), 4) == filtered
    assert split_of(layer, Scheme("channel"), 4) == channelled


@pytest.mark.parametrize(
    ("layer", "filtered", "channelled"),
    [
        (INNER, Split("filters", REPLICATE, GATHER), Split("channels", NARROW, SUM)),
        (FIRST, Split("filters", REPLICATE, GATHER), Split("")),
        (LAST, Split(""), Split("")),
        (DEPTHWISE, Split("groups", NARROW, GATHER), Split("groups", NARROW, GATHER)),
        (CUT, Split("filters", REPLICATE, GATHER), Split("filters", REPLICATE, GATHER)),
    ],
)
def test_gathered(layer: Layer, filtered: Split, channelled: Split) -> None:
    assert split_of(layer, Scheme("filter", "gathered"), 4) == filtered
    assert split_of(layer, Scheme("channel", "gathered"), 4) == channelled


@pytest.mark.parametrize(
    ("scheme", "split"),
    [
        (Scheme("filter", "sharded", split_last=True), Split("filters", GATHER_SUM, GATHER)),
        (Scheme("channel", "sharded", split_last=True), Split("channels", KEEP, SUM)),
        (Scheme("filter", "gathered", split_last=True), Split("filters", REPLICATE, GATHER)),
        (Scheme("channel", "gathered", split_last=True), Split("channels", NARROW, SUM)),
    ],
)
def test_a_last_layer_that_is_split(scheme: Scheme, split: Split) -> None:
    assert split_of(LAST, scheme, 4) == split


@pytest.mark.parametrize(
    ("layer", "degree", "expected"),
    [
        (Layer(8, 8), 2, False),
        (Layer(5, 5, 5), 2, True),
        (Layer(5, 10, 5), 2, False),  # 3 and 2 groups of inputs, but 5 and 5 outputs
        (Layer(6, 12, 6), 2, True),
        (Layer(8, 12, 4), 4, True),
        (Layer(8, 12, 4), 3, False),
        (Layer(8, 8, 2), 4, False),
    ],
)
def test_shares_that_fall_on_the_borders_of_groups(layer: Layer, degree: int, expected: bool) -> None:
    assert are_aligned(layer, degree) == expected


def test_pieces_of_groups_that_are_cut() -> None:
    assert pieces(Layer(8, 12, 4), range(2, 11)) == [
        Piece(range(2), range(1), 1),
        Piece(range(2, 6), range(1, 7), 2),
        Piece(range(6, 8), range(7, 9), 1),
    ]
    assert pieces(Layer(8, 12, 4), range(4, 5)) == [Piece(range(2, 4), range(1), 1)]


def test_extents() -> None:
    assert extents(10, 4) == (3, 3, 2, 2)
    assert extents(5, 2, features=9) == (27, 18)


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
def test_the_largest_degrees(model: str, dataset: str, filters: int, channels: int, form: str) -> None:
    """ParaDL states 64 for VGG16 and ResNet-50; its channel parallelism leaves out the first layer."""
    table = read_table(model, dataset)
    assert table is not None
    layers = split_layers(table)
    assert largest_degree(layers, Scheme("filter", form), 4096) == filters
    assert largest_degree(layers, Scheme("channel", form), 4096) == channels
    assert largest_degree(layers, Scheme("filter", form, split_last=True), 4096) == min(
        filters, layers[-1].out_channels
    )


def test_what_was_flattened_keeps_its_channels() -> None:
    table = read_table("vgg11", "imagenet")
    assert table is not None
    (first, *_, last) = linear = [one for one in rows(table) if one.row.kind == "Linear"]
    assert first.layer == Layer(512, 4096, features=49)
    assert (last.layer, last.channels) == (Layer(4096, 1000, is_last=True), 0)
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
        ({"compile": True}, "compile = false"),
        ({"model": "mine:make", "tp_degree": 4096}, None),
    ],
)
def test_what_excludes_a_run(more: dict[str, Any], reason: str | None) -> None:
    found = excluded(spec(**more))
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found), found


def point(strategy: str, **more: Any) -> dict[str, Any]:
    return {"model": "vgg16", "dataset": "imagenet", "strategy": strategy, "batch_size": 4, **more}


def test_a_hybrid_shares_the_model_within_a_node() -> None:
    found = resolve(point("data_filter", nodes=4, tasks_per_node=2), Limits("any"))
    assert isinstance(found, RunSpec)
    assert (found.strategy, found.dp_degree, found.tp_degree) == ("filter", 4, 2)
    alone = resolve(point("channel", nodes=4, tasks_per_node=2), Limits("any"))
    assert isinstance(alone, RunSpec)
    assert (alone.dp_degree, alone.tp_degree) == (1, 8)


def test_too_many_ranks_are_dropped() -> None:
    found = resolve(point("channel", nodes=32, tasks_per_node=4), Limits("any"))
    assert isinstance(found, Dropped)
    assert found.reason.endswith("the largest tp_degree that works is 64")
