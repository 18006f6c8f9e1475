"""Where groups lie, as literal tables."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.placement import Group, group_of, pair_of, parts_of


def spec(nodes: int, tasks: int, **degrees: Any) -> RunSpec:
    return RunSpec(
        model="m", dataset="d", strategy="ddp", batch_size=8, nodes=nodes, tasks_per_node=tasks, **degrees
    )  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "tasks", "degrees", "axes", "expected"),
    [
        (1, 4, {"dp_degree": 4}, ["dp"], Group(4, 1, 4, 1)),
        (4, 4, {"dp_degree": 16}, ["dp"], Group(16, 4, 4, 1)),
        (4, 4, {"dp_degree": 4, "tp_degree": 4}, ["tp"], Group(4, 1, 4, 1)),
        # Four groups, one rank of each on every node, share its way out.
        (4, 4, {"dp_degree": 4, "tp_degree": 4}, ["dp"], Group(4, 4, 1, 4)),
        (4, 4, {"dp_degree": 4, "sp_degree": 4}, ["dp", "sp"], Group(16, 4, 4, 1)),
        (4, 4, {"dp_degree": 2, "pp_degree": 4, "tp_degree": 2}, ["pp"], Group(4, 2, 2, 2)),
        (2, 4, {"tp_degree": 8}, ["tp"], Group(8, 2, 4, 1)),
        (4, 1, {"dp_degree": 4}, ["dp"], Group(4, 4, 1, 1)),
        (2, 3, {"dp_degree": 6}, ["dp"], Group(6, 2, 3, 1)),
        (1, 1, {}, ["dp"], Group(1, 1, 1, 1)),
        (25_000, 4, {"dp_degree": 25_000, "tp_degree": 4}, ["dp"], Group(25_000, 25_000, 1, 4)),
    ],
)
def test_groups(nodes: int, tasks: int, degrees: dict[str, int], axes: list[str], expected: Group) -> None:
    assert group_of(spec(nodes, tasks, **degrees), *axes) == expected


def test_an_axis_in_two_parts() -> None:
    assert parts_of(spec(4, 4, dp_degree=16), "dp", 4) == (Group(4, 1, 4, 1), Group(4, 4, 1, 4))


@pytest.mark.parametrize(
    ("nodes", "tasks", "degrees", "expected"),
    [
        (1, 4, {"pp_degree": 4}, Group(2, 1, 2, 1)),
        (4, 1, {"pp_degree": 4}, Group(2, 2, 1, 1)),
        (4, 2, {"pp_degree": 4, "tp_degree": 2}, Group(2, 2, 1, 2)),
    ],
)
def test_neighbours(nodes: int, tasks: int, degrees: dict[str, int], expected: Group) -> None:
    assert pair_of(spec(nodes, tasks, **degrees), "pp") == expected
