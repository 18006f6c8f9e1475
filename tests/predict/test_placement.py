"""The placement of groups, as literal tables."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.placement import GroupPlacement, place_group, place_neighbour_pair, place_subgroups


def spec(nodes: int, tasks: int, **degrees: Any) -> RunSpec:
    return RunSpec(
        model="m", dataset="d", strategy="ddp", batch_size=8, nodes=nodes, tasks_per_node=tasks, **degrees
    )  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "tasks", "degrees", "axes", "expected"),
    [
        (1, 4, {"dp_degree": 4}, ["dp"], GroupPlacement(4, 1, 4, 1)),
        (4, 4, {"dp_degree": 16}, ["dp"], GroupPlacement(16, 4, 4, 1)),
        (4, 4, {"dp_degree": 4, "tp_degree": 4}, ["tp"], GroupPlacement(4, 1, 4, 1)),
        # Four groups, one rank of each on every node, share its way out.
        (4, 4, {"dp_degree": 4, "tp_degree": 4}, ["dp"], GroupPlacement(4, 4, 1, 4)),
        (4, 4, {"dp_degree": 4, "sp_degree": 4}, ["dp", "sp"], GroupPlacement(16, 4, 4, 1)),
        (4, 4, {"dp_degree": 2, "pp_degree": 4, "tp_degree": 2}, ["pp"], GroupPlacement(4, 2, 2, 2)),
        (2, 4, {"tp_degree": 8}, ["tp"], GroupPlacement(8, 2, 4, 1)),
        (4, 1, {"dp_degree": 4}, ["dp"], GroupPlacement(4, 4, 1, 1)),
        (2, 3, {"dp_degree": 6}, ["dp"], GroupPlacement(6, 2, 3, 1)),
        (1, 1, {}, ["dp"], GroupPlacement(1, 1, 1, 1)),
        (25_000, 4, {"dp_degree": 25_000, "tp_degree": 4}, ["dp"], GroupPlacement(25_000, 25_000, 1, 4)),
    ],
)
def test_a_group_is_placed_by_degrees_and_tasks_per_node(
    nodes: int, tasks: int, degrees: dict[str, int], axes: list[str], expected: GroupPlacement
) -> None:
    assert place_group(spec(nodes, tasks, **degrees), *axes) == expected


def test_an_axis_of_two_parts_is_placed_part_by_part() -> None:
    assert place_subgroups(spec(4, 4, dp_degree=16), "dp", 4) == (
        GroupPlacement(4, 1, 4, 1),
        GroupPlacement(4, 4, 1, 4),
    )


@pytest.mark.parametrize(
    ("nodes", "tasks", "degrees", "expected"),
    [
        (1, 4, {"pp_degree": 4}, GroupPlacement(2, 1, 2, 1)),
        (4, 1, {"pp_degree": 4}, GroupPlacement(2, 2, 1, 1)),
        (4, 2, {"pp_degree": 4, "tp_degree": 2}, GroupPlacement(2, 2, 1, 2)),
    ],
)
def test_a_pair_of_neighbours_is_placed_by_tasks_per_node(
    nodes: int, tasks: int, degrees: dict[str, int], expected: GroupPlacement
) -> None:
    assert place_neighbour_pair(spec(nodes, tasks, **degrees), "pp") == expected
