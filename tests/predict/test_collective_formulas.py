"""Times of collectives on links whose numbers are easy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcbench.predict.collective_formulas import (
    COLLECTIVE_FORMULAS,
    GroupLinks,
    HockneyLink,
    collective_s,
    ring_all_reduce_s,
    tree_all_reduce_s,
)
from hpcbench.strategies.traffic import COMM_OPERATIONS

FAST, SLOW = HockneyLink(1.0, 0.1), HockneyLink(10.0, 1.0)


def span(ranks: int, nodes: int) -> GroupLinks:
    return GroupLinks(ranks, nodes, FAST, SLOW)


@pytest.mark.parametrize(
    ("operation", "payload_bytes", "ranks", "nodes", "expected_s"),
    [
        ("all_reduce", 40, 1, 1, 0),
        ("all_reduce", 40, 4, 1, min(6 * (1 + 1.0), 2 * (3 + 4.0))),
        ("all_reduce", 40, 4, 4, min(6 * (10 + 10.0), 2 * (20 + 40.0))),
        ("all_gather", 10, 4, 1, 3 * (1 + 1.0)),
        ("reduce_scatter", 40, 4, 1, 3 * (1 + 1.0)),
        ("broadcast", 40, 4, 1, 2 * (1 + 4.0)),
        ("reduce", 40, 4, 1, 2 * (1 + 4.0)),
        ("all_to_all", 40, 4, 2, 3 * (10 + 10.0)),
        ("send", 40, 2, 1, 1 + 4.0),
        ("send", 40, 2, 2, 10 + 40.0),
    ],
)
def test_the_time_of_one_collective_follows_its_formula(
    operation: str, payload_bytes: int, ranks: int, nodes: int, expected_s: float
) -> None:
    assert collective_s(operation, span(ranks, nodes), payload_bytes) == pytest.approx(expected_s)


def test_every_operation_has_a_time() -> None:
    assert set(COLLECTIVE_FORMULAS) == set(COMM_OPERATIONS)


def test_small_messages_of_many_nodes_go_through_a_tree() -> None:
    wide = GroupLinks(1024, 256, HockneyLink(1e-6, 1e-11), HockneyLink(5e-6, 1e-10))
    assert tree_all_reduce_s(wide, 1024) < ring_all_reduce_s(wide, 1024) / 10


@given(st.sampled_from(COMM_OPERATIONS), st.integers(2, 64), st.integers(0, 10**9))
def test_more_bytes_take_no_less(operation: str, ranks: int, payload_bytes: int) -> None:
    times = [collective_s(operation, span(ranks, ranks), size) for size in (payload_bytes, payload_bytes + 1)]
    assert times[0] <= times[1]


def test_ring_latencies_add_up_over_its_links() -> None:
    nodes = GroupLinks(8, 2, HockneyLink(1e-6, 1e-10), HockneyLink(1e-5, 1e-9), trees=False, by_hop=True)
    # Of the ring's eight links two lie between nodes.
    step_s = (6 * 1e-6 + 2 * 1e-5) / 8 + 1e3 * 1e-9
    assert collective_s("all_reduce", nodes, 8e3) == pytest.approx(14 * step_s)
    assert collective_s("reduce_scatter", nodes, 8e3) == pytest.approx(7 * step_s)
    assert collective_s("all_gather", nodes, 1e3) == pytest.approx(7 * step_s)
    inside = nodes._replace(ranks=4, nodes=1)
    assert collective_s("all_reduce", inside, 4e3) == pytest.approx(6 * (1e-6 + 1e3 * 1e-10))


def test_without_trees_a_small_all_reduce_is_a_ring() -> None:
    nodes = GroupLinks(64, 64, HockneyLink(1e-6, 0.0), HockneyLink(1e-5, 0.0))
    assert collective_s("all_reduce", nodes, 8.0) == pytest.approx(2 * 6 * 1e-5)
    assert collective_s("all_reduce", nodes._replace(trees=False), 8.0) == pytest.approx(126 * 1e-5)
