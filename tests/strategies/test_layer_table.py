from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hpcbench.errors import ConfigError
from hpcbench.strategies.layer_table import (
    LayerTable,
    TensorShape,
    decode_layer_table,
    encode_layer_table,
    read_shipped_table,
    shipped_table_path,
)
from hpcbench.strategies.resolve import InfeasiblePoint, shipped_model_dataset_pairs, single_device_run
from tests.layer_tables import layer, table_of

TABLE = LayerTable(
    model="m",
    dataset="digits",
    input_size=8,
    blocks=1,
    parameter_tensors=[TensorShape("0.weight", [2, 3])],
    buffers=[],
    layers=[
        layer("0", parameters=6, forward_flops=12, backward_flops=24, activation_bytes=40, activation_fixed_bytes=1),
        layer("1", parameters=2, forward_flops=1, backward_flops=2, activation_bytes=50),
    ],
)


def test_the_totals_of_a_layer_table_are_sums() -> None:
    totals = TABLE.totals()
    assert (totals.parameters, totals.forward_flops, totals.backward_flops) == (8, 13, 26)
    assert (totals.activation_bytes, totals.activation_fixed_bytes) == (90, 1)
    assert (totals.largest_activation, totals.largest_parameters) == ("1", "0")
    assert TABLE.flops_per_sample() == 39


def test_a_table_is_read_as_it_was_written() -> None:
    data = encode_layer_table(TABLE)
    assert decode_layer_table(data, "here") == TABLE
    assert data.count(b"\n") < 25, "a line for each layer"


def blocks_of(names: list[str]) -> LayerTable:
    """A table with one layer for each name, in the block that the name begins with."""
    rows = [layer(name, parameters=6) for name in names]
    rows = [msgspec.structs.replace(row, block=number) for number, row in enumerate(rows)]
    tensors = [TensorShape(f"{name}.weight", [2, 3]) for name in names]
    end = msgspec.structs.replace(layer("loss"), block=len(names))
    return msgspec.structs.replace(TABLE, blocks=len(names), parameter_tensors=tensors, layers=[*rows, end])


def test_equal_blocks_in_succession_are_stored_once() -> None:
    table = blocks_of(["0.in", "1.up", "2.up", "3.up", "4.down", "5.up"])
    data = encode_layer_table(table)
    assert data.count(b".up") == 4, "blocks 1 and 5, a row and a tensor each"
    assert b'"repeated_blocks":{"1":3}' in data
    assert decode_layer_table(data, "here") == table


def test_a_different_figure_keeps_a_block() -> None:
    table = blocks_of(["0.up", "1.up", "2.up"])
    table.layers[1] = msgspec.structs.replace(table.layers[1], activation_bytes=1)
    data = encode_layer_table(table)
    assert b'"repeated_blocks":{}' in data
    assert decode_layer_table(data, "here") == table


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "here: not a table of layers"),
        (b"\xff", "here: not a table of layers"),
        (encode_layer_table(TABLE).replace(b'"version":2', b'"version":0'), "of another version (0, not 2)"),
        (encode_layer_table(TABLE).replace(b'"kind"', b'"sort"'), "of another version"),
    ],
)
def test_invalid_layer_tables_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_layer_table(data, "here")
    assert said in str(caught.value)


def test_every_pair_has_a_table_and_every_table_a_pair() -> None:
    wanted = {shipped_table_path(model, dataset).name for model, dataset in shipped_model_dataset_pairs()}
    assert len(wanted) > 50
    assert {path.name for path in shipped_table_path("any", "any").parent.iterdir()} == wanted, "make layers"


def test_tables_are_of_the_pair_that_names_them_and_of_this_version() -> None:
    for model, dataset in shipped_model_dataset_pairs():
        table = table_of(model, dataset)
        assert (table.model, table.dataset, table.model_options) == (model, dataset, {})
        blocks = [one.block for one in table.layers]
        assert (blocks[-1], table.layers[-1].name) == (table.blocks, "loss"), (model, dataset)
        assert sorted(set(blocks)) == list(range(table.blocks + 1)), (model, dataset)
        assert blocks == sorted(blocks), "blocks run one after another"


def test_the_package_data_stays_small() -> None:
    assert sum(path.stat().st_size for path in shipped_table_path("any", "any").parent.iterdir()) < 1e6


@pytest.mark.parametrize(
    ("model", "dataset", "size", "options"),
    [
        ("resnet18", "imagenet", 192, {}),
        ("vgg11", "imagenet", None, {"dropout": 0.1}),
        ("mine:build", "imagenet", None, {}),
        ("resnet18", "tokens", None, {}),
    ],
)
def test_only_defaults_are_shipped(model: str, dataset: str, size: int | None, options: dict[str, float]) -> None:
    assert read_shipped_table(model, dataset, size, options) is None


def test_the_own_size_may_be_named() -> None:
    assert read_shipped_table("resnet18", "imagenet", 224) == read_shipped_table("resnet18", "imagenet")
    assert shipped_table_path("resnet18", "imagenet") == Path(shipped_table_path("x", "y")).with_name(
        "resnet18-imagenet.json.gz"
    )


def test_a_model_and_dataset_are_feasible_as_resolve_decides() -> None:
    assert not isinstance(single_device_run("resnet18", "imagenet"), InfeasiblePoint)
    refused = single_device_run("resnet18", "cifar10", 4)
    assert isinstance(refused, InfeasiblePoint)
    assert "needs an input of 8 or more" in refused.reason
