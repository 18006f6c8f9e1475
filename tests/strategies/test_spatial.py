"""The end of the cut part of a model, and points that spatial parallelism refuses before submission."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.strategies.layer_table import LayerRow, LayerTable
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.strategies.spatial.spatial_split import parse_spatial_grid, spatial_split
from tests.layer_tables import table_of


@pytest.mark.parametrize(
    ("model", "dataset", "grid", "first_whole", "extents", "by_mean"),
    [
        ("resnet50", "imagenet", (2, 2), "17.0", (7, 7), True),
        ("resnet50", "imagenet", (8, 1), "14.conv1", (14, 14), False),  # whole blocks: the stage of 7x7 is not cut
        ("resnet18", "digits", (2, 1), "7.conv1", (2, 2), False),
        ("vgg16", "imagenet", (4, 1), "31.0", (7, 7), False),  # a pool to 7x7 is none that can be cut
        ("vgg16", "imagenet", (8, 1), "30", (14, 14), False),
        ("mobilenetv2", "imagenet", (8, 1), "14.conv.1.0", (14, 14), False),  # inside a chain of layers
        ("cosmoflow", "cosmoflow", (2, 2, 1), "5.0", (4, 4, 4), False),
        ("cosmoflow", "cosmoflow", (8, 1, 1), "4.2", (8, 8, 8), False),
    ],
)
def test_spatial_split_ends_at_the_first_whole_layer(
    model: str, dataset: str, grid: tuple[int, ...], first_whole: str, extents: tuple[int, ...], by_mean: bool
) -> None:
    found = spatial_split(table_of(model, dataset), grid)
    assert (found.rows[found.end].name, found.extents, found.by_mean) == (first_whole, extents, by_mean)


def test_parameters_belong_to_the_part_that_uses_them() -> None:
    found = spatial_split(table_of("resnet50", "imagenet"), (8, 1))
    assert [found.is_cut(name) for name in ("0.0.weight", "13.bn3.bias", "14.conv1.weight", "17.2.bias")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_the_option_until_ends_the_spatial_split_earlier() -> None:
    assert spatial_split(table_of("resnet50", "imagenet"), (4, 1), until=3).block == 3
    with pytest.raises(ConfigError, match=r"blocks until 16 cannot be cut: .*extent of 7 in dim 0, fewer than 8 ranks"):
        spatial_split(table_of("resnet50", "imagenet"), (8, 1), until=16)


def changed(rows: dict[str, dict[str, Any]]) -> LayerTable:
    whole = table_of("resnet18", "imagenet")
    layers = [msgspec.structs.replace(row, **rows.get(row.name, {})) for row in whole.layers]
    return msgspec.structs.replace(whole, layers=layers)


@pytest.mark.parametrize(
    ("rows", "block"),
    [
        ({"3.conv2": {"kind": "MyLayer"}}, 3),  # unknown: it may mix positions
        ({"3": {"parameters": 5}}, 3),  # a block with numbers of its own
        ({"3.conv2": {"input_shape": [128, 14, 14]}}, 3),  # something around the layers made other extents
        ({"3": {"output_shape": [128]}}, 3),  # a block that ends without positions
        ({"5.conv1": {"kind": "ConvTranspose2d"}}, 5),
    ],
)
def test_a_block_that_cannot_be_split_ends_the_spatial_split(rows: dict[str, dict[str, Any]], block: int) -> None:
    found = spatial_split(changed(rows), (2, 1))
    assert found.block == block
    assert found.begins_block


def test_layers_that_are_called_twice_are_not_cut() -> None:
    whole = table_of("vgg16", "imagenet")
    again: list[LayerRow] = [*whole.layers[:8], msgspec.structs.replace(whole.layers[7], block=8), *whole.layers[8:]]
    assert spatial_split(msgspec.structs.replace(whole, layers=again), (2, 1)).end == 8


@pytest.mark.parametrize(
    ("text", "degree", "dims", "expected"),
    [("", 4, 2, (4, 1)), ("4", 4, 3, (4, 1, 1)), ("2x2", 4, 2, (2, 2)), ("1x2x3", 6, 3, (1, 2, 3))],
)
def test_a_spatial_grid_is_parsed_or_chosen_from_the_degree(
    text: str, degree: int, dims: int, expected: tuple[int, ...]
) -> None:
    assert parse_spatial_grid(text, degree, dims) == expected


@pytest.mark.parametrize(
    ("text", "degree", "reason"),
    [
        ("2by2", 4, "none: numbers with x between them"),
        ("0x4", 4, "none: numbers"),
        ("2x3", 4, "of 6 ranks, sp_degree is 4"),
        ("1x2x2", 4, "3 dims, the samples have 2"),
    ],
)
def test_invalid_spatial_grids_are_refused(text: str, degree: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_spatial_grid(text, degree, 2)


def resolved(**point: Any) -> RunSpec | InfeasiblePoint:
    given = {"model": "resnet18", "dataset": "imagenet", "strategy": "spatial", "batch_size": 4, "tasks_per_node": 4}
    return resolve_point({**given, **point}, PartitionLimits("test"))


def test_the_degrees_of_a_spatial_hybrid_follow_the_devices() -> None:
    hybrid = resolved(strategy="data_spatial", nodes=3)
    assert isinstance(hybrid, RunSpec)
    assert (hybrid.strategy, hybrid.sp_degree, hybrid.dp_degree) == ("spatial", 4, 3)


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        ({"model": "gpt", "dataset": "tokens"}, "cuts images and volumes; tokens holds tokens"),
        ({"model": "vit", "dataset": "cifar10"}, "vit is a transformer: use tensor"),
        ({"compile": True}, "compile = false is right"),
        ({"precision": "fp16"}, "use bf16"),
        ({"options": {"grid": "3x2"}}, "'3x2' is of 6 ranks, sp_degree is 4"),
        ({"options": {"until": -1}}, "until -1 is not a number of blocks"),
        (
            {"dataset": "digits", "tasks_per_node": 9},
            "extent of 8 in dim 0, fewer than the 9 ranks of the grid; 8 is the",
        ),
        (
            {"options": {"until": 9}, "tasks_per_node": 16},
            "has an extent of 14 in dim 0, fewer than 16 ranks; sp_degree 7 is the largest that works",
        ),
        ({"tasks_per_node": 113}, "extent of 112 in dim 0, fewer than 113 ranks; sp_degree 112 is the largest"),
    ],
)
def test_infeasible_spatial_points_have_a_reason(point: dict[str, Any], reason: str) -> None:
    found = resolved(**point)
    assert isinstance(found, InfeasiblePoint)
    assert reason in found.reason
