"""The family's formulas on a small table: every call as a literal."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.strategies.data.buckets import powersgd_bytes
from hpcbench.strategies.layer_table import LayerTable, TensorShape
from hpcbench.strategies.traffic import Traffic
from tests.layer_tables import layer

TABLE = LayerTable(
    model="m", dataset="digits", input_size=8, blocks=2,
    parameter_tensors=[TensorShape("0.weight", [6, 5]), TensorShape("0.bias", [6]), TensorShape("1.weight", [3, 6])],
    buffers=[TensorShape("0.mean", [6]), TensorShape("0.count", [], 8)],
    layers=[layer(str(block), block, parameters=1, activation_bytes=100, output_bytes=16) for block in (0, 1)],
)  # fmt: skip


def spec_of(strategy: str, dp_degree: int = 2, **more: Any) -> RunSpec:
    return RunSpec(
        model="m", dataset="digits", strategy=strategy, batch_size=4, tasks_per_node=dp_degree, dp_degree=dp_degree,
        **more,
    )  # fmt: skip


def calls(strategy: str, dp_degree: int = 2, **more: Any) -> list[str]:
    """Operation, bytes, count where it is not 1, and ranks where they are not all."""
    found: list[Traffic] = resolve_cost(strategy).traffic(spec_of(strategy, dp_degree, **more), TABLE, 0)
    return sorted(
        f"{one.operation} {one.payload_bytes}"
        + (f" x{one.count}" if one.count > 1 else "")
        + (f" of {one.group_size}" if one.group_size != dp_degree else "")
        for one in found
    )


GROUPS = {"shard_degree": 2, "mixed_precision": True, "reshard_after_forward": False}
HALVES = "all_gather 24 of 2, all_gather 36 of 2, all_reduce 48 of 2, all_reduce 72 of 2"
REDUCED = "reduce_scatter 96, reduce_scatter 144"


@pytest.mark.parametrize(
    ("strategy", "more", "expected"),
    [
        ("single", {"dp_degree": 1}, ""),
        ("ddp", {}, "all_reduce 216, broadcast 8, broadcast 24"),
        # 96 bytes are the cap: the output layer's 72 are filled up by the bias; the weight is alone.
        ("ddp", {"options": {"bucket_cap_mb": 96 / 2**20}}, "all_reduce 96, all_reduce 120, broadcast 8, broadcast 24"),
        ("ddp", {"options": {"compression": "fp16"}}, "all_reduce 108, broadcast 8, broadcast 24"),
        ("ddp", {"precision": "fp64"}, "all_reduce 432, broadcast 8, broadcast 48"),
        ("zero1", {}, "all_reduce 216, broadcast 8, broadcast 24 x2, broadcast 72, broadcast 120"),
        ("fairscale_oss", {}, "all_reduce 216, broadcast 8, broadcast 24, broadcast 96, broadcast 120"),
        ("fairscale_sddp", {}, "broadcast 8, broadcast 24, broadcast 96, broadcast 120, reduce 96, reduce 120"),
        # Of six rows each takes three, of three one takes two and the other one: two are sent.
        ("fsdp", {"micro_batches": 2}, f"all_gather 48 x4, all_gather 72 x4, {REDUCED}"),
        ("fsdp", {"dp_degree": 4, "options": GROUPS}, f"{HALVES}, reduce_scatter 96 of 2, reduce_scatter 144 of 2"),
        (
            "fairscale_fsdp",
            {"dp_degree": 4},
            "all_gather 20 x2, all_gather 36 x2, reduce_scatter 80, reduce_scatter 144",
        ),
        ("horovod", {"options": {"compression": "fp16"}}, "all_reduce 108"),
    ],
)
def test_the_predicted_calls_of_a_step_are_literal(strategy: str, more: dict[str, Any], expected: str) -> None:
    assert calls(strategy, **more) == sorted(filter(None, expected.split(", ")))


def test_powersgd_sends_what_is_smaller() -> None:
    """A vector and a matrix that its factors would not shrink go as they are."""
    assert powersgd_bytes([[6], [3, 2], [10, 4, 5]], 2, 4) == [4 * 12, 4 * 20, 4 * 40]
