"""The heads of each rank, and infeasible tensor-parallel runs with the largest degree that works."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point
from hpcbench.strategies.tensor.entry import head_feature_ranges

SEQUENCE = {"sequence_parallel": True}


def resolved(**point: Any) -> RunSpec | InfeasiblePoint:
    given = {"model": "gpt", "dataset": "tokens", "strategy": "tensor", "batch_size": 4}
    return resolve_point({**given, **point}, PartitionLimits("any"))


def spec(**point: Any) -> RunSpec:
    found = resolved(**point)
    assert isinstance(found, RunSpec), found
    return found


@pytest.mark.parametrize(
    ("heads", "head_width", "ranks", "expected"),
    [
        (4, 32, 1, [range(128)]),
        (4, 32, 2, [range(64), range(64, 128)]),
        (4, 32, 3, [range(64), range(64, 96), range(96, 128)]),
        (3, 1, 3, [range(1), range(1, 2), range(2, 3)]),
    ],
)
def test_ranks_get_whole_attention_heads(heads: int, head_width: int, ranks: int, expected: list[range]) -> None:
    assert head_feature_ranges(heads, head_width, ranks) == expected


def test_tensor_and_data_degrees_follow_the_devices() -> None:
    assert spec(tasks_per_node=4).tp_degree == 4
    hybrid = spec(strategy="data_tensor", nodes=3, tasks_per_node=2)
    assert (hybrid.strategy, hybrid.tp_degree, hybrid.dp_degree) == ("tensor", 2, 3)
    assert spec(strategy="data_tensor", nodes=4, tp_degree=2).dp_degree == 2
    assert spec(tasks_per_node=3, model="vit", dataset="digits").tp_degree == 3
    assert spec(nodes=4, tp_degree=1, dp_degree=4).devices == 4


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        ({"nodes": 5}, "tensor splits gpt by its 4 heads: tp_degree 5, at most 4 is right"),
        ({"nodes": 32, "model": "gpt_17b"}, "tensor splits gpt_17b by its 28 heads: tp_degree 32, at most 28 is right"),
        ({"nodes": 16, "model": "vit_b16", "dataset": "imagenet"}, "by its 12 heads: tp_degree 16, at most 12"),
        (
            {"nodes": 2, "model": "resnet18", "dataset": "digits"},
            "tensor splits transformer blocks, and resnet18 has none: use filter, channel or spatial",
        ),
        ({"nodes": 4, "input_size": 3, "options": SEQUENCE}, "a sample has 3: tp_degree 4, at most 3 is right"),
        (
            {"nodes": 4, "model": "vit_b16", "dataset": "imagenet", "input_size": 16, "options": SEQUENCE},
            "gives every rank a token, and a sample has 2: tp_degree 4, at most 2 is right",
        ),
        ({"nodes": 2, "precision": "fp16"}, "a loss scale that all ranks of a layer agree on: use bf16"),
        ({"nodes": 2, "sp_degree": 2}, "tensor has no sp_degree"),
    ],
)
def test_infeasible_tensor_points_have_a_reason(point: dict[str, Any], reason: str) -> None:
    found = resolved(**point)
    assert isinstance(found, InfeasiblePoint)
    assert reason in found.reason


def test_the_largest_degrees_are_kept() -> None:
    assert spec(nodes=4, input_size=4, options=SEQUENCE).tp_degree == 4
    assert spec(nodes=28, model="gpt_17b").tp_degree == 28
    assert spec(nodes=3, model="vit", dataset="digits", options=SEQUENCE).tp_degree == 3
    assert spec(nodes=2, model="models:mine", dataset="tokens").tp_degree == 2
