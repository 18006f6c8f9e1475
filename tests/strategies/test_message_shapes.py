"""Sizes and bandwidths of collectives, as nccl-tests counts them."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.traffic import bus_bandwidth, message_shapes


@pytest.mark.parametrize(
    ("operation", "ranks", "payload_bytes", "algorithm", "bus"),
    # A call of 2 s. The size of all_gather counts the bytes that a rank receives.
    [
        ("all_reduce", 4, 800, 400, 600),
        ("all_reduce", 2, 800, 400, 400),
        ("reduce_scatter", 4, 800, 400, 300),
        ("all_gather", 4, 200, 400, 300),
        ("all_to_all", 4, 800, 400, 300),
        ("broadcast", 4, 800, 400, 400),
        ("reduce", 4, 800, 400, 400),
        ("send", 2, 800, 400, 400),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(
    operation: str, ranks: int, payload_bytes: int, algorithm: float, bus: float
) -> None:
    assert bus_bandwidth(operation, ranks, payload_bytes, 2.0) == pytest.approx((algorithm, bus))


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ({"operation": "all_reduce", "nodes": 2, "tasks_per_node": 2}, ("all_reduce", 4, 2, 1, 1008)),
        ({"operation": "all_gather", "nodes": 2, "tasks_per_node": 2}, ("all_gather", 4, 2, 1, 252)),
        ({"operation": "reduce", "nodes": 2, "tasks_per_node": 4, "group_tasks": 1}, ("reduce", 2, 1, 4, 1000)),
        ({"operation": "reduce", "tasks_per_node": 4, "group_tasks": 2}, ("reduce", 2, 2, 1, 1000)),
        ({"operation": "pairs", "nodes": 4, "tasks_per_node": 2}, ("send", 2, 1, 1, 1000)),
        ({"operation": "pairs", "tasks_per_node": 4}, ("send", 2, 2, 1, 1000)),
        ({"options": {"messages": "send:2:1:3:64"}, "nodes": 2}, ("send", 2, 1, 3, 64)),
    ],
)
def test_a_run_has_the_messages_of_its_parameters(given: dict[str, Any], shape: tuple[Any, ...]) -> None:
    spec = RunSpec(workload="collectives", strategy="collectives", message_bytes=1000, **given)
    assert message_shapes(spec) == [shape]
