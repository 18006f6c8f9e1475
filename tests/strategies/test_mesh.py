"""The ranks of a run as a grid."""

from __future__ import annotations

import pytest

from hpcbench.strategies.gradient_buckets import bucket_payload_bytes, fill_buckets
from hpcbench.strategies.mesh import RankMesh

MIB = 2**20


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        (RankMesh(tp=4), ("tp",), [[0, 1, 2, 3]]),
        (RankMesh(dp=4), ("tp",), [[0], [1], [2], [3]]),
        (RankMesh(dp=2, tp=2), ("tp",), [[0, 1], [2, 3]]),
        (RankMesh(dp=2, tp=2), ("dp",), [[0, 2], [1, 3]]),
        (RankMesh(dp=2, pp=2, tp=2), ("pp",), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (RankMesh(dp=2, pp=2, tp=2), ("dp", "tp"), [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_the_groups_of_an_axis_are_those_of_the_table(
    mesh: RankMesh, axes: tuple[str, ...], expected: list[list[int]]
) -> None:
    assert mesh.groups(*axes) == expected
    assert all(mesh.group(rank, *axes) == group for group in expected for rank in group)


def test_a_rank_is_where_its_coordinates_are() -> None:
    mesh = RankMesh(dp=2, pp=3, sp=2, tp=2)
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.size)] == list(range(24))
    assert mesh.coordinates(13) == RankMesh(dp=1, pp=0, sp=0, tp=1)


@pytest.mark.parametrize(
    ("tensor_bytes", "cap_bytes", "expected"),
    [
        ([], 8, []),
        ([4], 8, [[0]]),
        ([4, 4, 4, 4], 8, [[3, 2], [1, 0]]),
        ([1, 1, 100], 8, [[2], [1, 0]]),
        ([MIB, MIB, MIB, MIB], 2 * MIB, [[3], [2, 1], [0]]),
    ],
)
def test_gradient_buckets_are_filled_from_the_last_tensor(
    tensor_bytes: list[int], cap_bytes: int, expected: list[list[int]]
) -> None:
    assert fill_buckets(tensor_bytes, cap_bytes) == expected
    assert sum(bucket_payload_bytes(tensor_bytes, cap_bytes)) == sum(tensor_bytes)
