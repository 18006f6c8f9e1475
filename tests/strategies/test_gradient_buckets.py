"""The order of gradients, their owners, and what is gathered together: as literal tables."""

from __future__ import annotations

import pytest

from hpcbench.strategies.gradient_buckets import assign_owners, fsdp_units, gradient_ready_order
from hpcbench.strategies.layer_table import LayerRow, LayerTable, TensorShape
from tests.layer_tables import layer


def table(layers: list[LayerRow], tensors: dict[str, list[int]]) -> LayerTable:
    return LayerTable(
        model="m", dataset="digits", input_size=8, blocks=3, buffers=[], layers=layers,
        parameter_tensors=[TensorShape(name, shape) for name, shape in tensors.items()],
    )  # fmt: skip


CNN = table(
    # The shortcut runs after the convolutions, but stands before them in the model.
    [layer("0.conv", 0, "Conv2d", parameters=1), layer("0.norm", 0, "BatchNorm2d", parameters=1), layer("0.short", 0, "Conv2d", parameters=1),
     layer("0", 0, "Block.other", parameters=1), layer("1", 1, "Linear", parameters=1)],
    {"0.scale": [1], "0.short.weight": [4, 1], "0.conv.weight": [4, 1], "0.conv.bias": [4], "0.norm.weight": [4],
     "0.norm.bias": [4], "1.weight": [2, 4], "1.bias": [2]},
)  # fmt: skip
TIED = table(
    [layer("0.tokens", 0, "Embedding", parameters=1), layer("1.up", 1, "Linear", parameters=1), layer("2.norm", 2, "LayerNorm", parameters=1),
     layer("2.output", 2, "Linear", attributes={"in_features": 4, "out_features": 9})],
    {"0.tokens.weight": [9, 4], "1.up.weight": [4, 4], "1.up.bias": [4], "2.norm.weight": [4]},
)  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "order"),
    [("fp32", [7, 6, 0, 1, 4, 5, 2, 3]), ("fp64", [7, 6, 0, 1, 4, 5, 2, 3]), ("bf16", [6, 7, 0, 1, 4, 5, 2, 3])],
)
def test_gradients_are_ready_from_the_last_layer_on(precision: str, order: list[int]) -> None:
    assert gradient_ready_order(CNN, precision) == order


def test_a_tied_gradient_is_ready_with_the_layer_that_uses_it_first() -> None:
    assert gradient_ready_order(TIED) == [3, 2, 1, 0]


def test_blocks_that_share_a_weight_are_gathered_by_the_root() -> None:
    assert fsdp_units(CNN) == [[0, 1, 2, 3, 4, 5], [6, 7], []]
    assert fsdp_units(TIED) == [[1, 2], [0, 3]]


@pytest.mark.parametrize(
    ("elements", "ranks", "largest_first", "owned"),
    [
        ([4, 1, 3, 2], 2, True, [[0, 1], [2, 3]]),
        ([4, 1, 3, 2], 2, False, [[0, 3], [1, 2]]),
        ([2, 2, 2], 2, True, [[0, 2], [1]]),
        ([5], 3, True, [[0], [], []]),
    ],
)
def test_tensors_go_to_who_has_least(
    elements: list[int], ranks: int, largest_first: bool, owned: list[list[int]]
) -> None:
    assert assign_owners(elements, ranks, largest_first) == owned
