"""The family's formulas on a small table: every call as a literal."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.data.buckets import powersgd_bytes
from hpcbench.strategies.layer_table import LayerRow, LayerTable, TensorShape
from hpcbench.strategies.traffic import Traffic


def layer(name: str, block: int, kind: str) -> LayerRow:
    return LayerRow(
        name=name, block=block, kind=kind, input_shape=[4], output_shape=[4], parameters=1, forward_flops=0,
        backward_flops=0, activation_bytes=100, activation_fixed_bytes=0, output_bytes=16, forward_moved_bytes=0,
        backward_moved_bytes=0,
    )  # fmt: skip


TABLE = LayerTable(
    model="m", dataset="digits", input_size=8, blocks=2,
    parameter_tensors=[TensorShape("0.weight", [6, 5]), TensorShape("0.bias", [6]), TensorShape("1.weight", [3, 6])],
    buffers=[TensorShape("0.mean", [6]), TensorShape("0.count", [], 8)],
    layers=[layer("0", 0, "Linear"), layer("1", 1, "Linear")],
)  # fmt: skip


def spec_of(strategy: str, dp_degree: int = 2, **more: Any) -> RunSpec:
    return RunSpec(
        model="m", dataset="digits", strategy=strategy, batch_size=4, tasks_per_node=dp_degree, dp_degree=dp_degree,
        **more,
    )  # fmt: skip


def calls(strategy: str, dp_degree: int = 2, **more: Any) -> list[tuple[str, int, int, int]]:
    found: list[Traffic] = resolve_cost(strategy).traffic(spec_of(strategy, dp_degree, **more), TABLE, 0)
    return [(one.operation, one.group_size, one.payload_bytes, one.count) for one in found]


BUFFERS = [("broadcast", 2, 8, 1), ("broadcast", 2, 24, 1)]


@pytest.mark.parametrize(
    ("strategy", "more", "expected"),
    [
        ("single", {"dp_degree": 1}, []),
        ("ddp", {}, [("all_reduce", 2, 216, 1), *BUFFERS]),
        # 96 bytes are the cap: the output layer's 72 are filled up by the bias; the weight is alone.
        (
            "ddp",
            {"options": {"bucket_cap_mb": 96 / 2**20}},
            [("all_reduce", 2, 96, 1), ("all_reduce", 2, 120, 1), *BUFFERS],
        ),
        ("ddp", {"options": {"compression": "fp16"}}, [("all_reduce", 2, 108, 1), *BUFFERS]),
        ("ddp", {"precision": "fp64"}, [("all_reduce", 2, 432, 1), ("broadcast", 2, 8, 1), ("broadcast", 2, 48, 1)]),
        (
            "zero1",
            {},
            [
                ("all_reduce", 2, 216, 1),
                BUFFERS[0],
                *(("broadcast", 2, size, n) for size, n in ((24, 2), (72, 1), (120, 1))),
            ],
        ),
        ("fairscale_oss", {}, [("all_reduce", 2, 216, 1), *BUFFERS, ("broadcast", 2, 96, 1), ("broadcast", 2, 120, 1)]),
        (
            "fairscale_sddp",
            {},
            [*BUFFERS, ("broadcast", 2, 96, 1), ("broadcast", 2, 120, 1), ("reduce", 2, 96, 1), ("reduce", 2, 120, 1)],
        ),
        # Of six rows each takes three, of three one takes two and the other one: two are sent.
        (
            "fsdp",
            {"micro_batches": 2},
            [
                ("all_gather", 2, 48, 4),
                ("all_gather", 2, 72, 4),
                ("reduce_scatter", 2, 96, 1),
                ("reduce_scatter", 2, 144, 1),
            ],
        ),
        (
            "fsdp",
            {"dp_degree": 4, "options": {"shard_degree": 2, "mixed_precision": True, "reshard_after_forward": False}},
            [
                ("all_gather", 2, 24, 1),
                ("all_gather", 2, 36, 1),
                ("all_reduce", 2, 48, 1),
                ("all_reduce", 2, 72, 1),
                ("reduce_scatter", 2, 96, 1),
                ("reduce_scatter", 2, 144, 1),
            ],
        ),
        (
            "fairscale_fsdp",
            {"dp_degree": 4},
            [
                ("all_gather", 4, 20, 2),
                ("all_gather", 4, 36, 2),
                ("reduce_scatter", 4, 80, 1),
                ("reduce_scatter", 4, 144, 1),
            ],
        ),
        ("horovod", {"options": {"compression": "fp16"}}, [("all_reduce", 2, 108, 1)]),
    ],
)
def test_the_predicted_calls_of_a_step_are_literal(
    strategy: str, more: dict[str, Any], expected: list[tuple[str, int, int, int]]
) -> None:
    assert sorted(calls(strategy, **more)) == sorted(expected)


def test_powersgd_sends_what_is_smaller() -> None:
    """A vector and a matrix that its factors would not shrink go as they are."""
    assert powersgd_bytes([[6], [3, 2], [10, 4, 5]], 2, 4) == [4 * 12, 4 * 20, 4 * 40]
