"""The world that is not there behaves as a real one does, as far as payloads go."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hpcbench.strategies.sharded.train import make_shard_mesh
from tests.distributed.fake import fake_world


@pytest.mark.parametrize(
    ("rank", "per_node", "shard_degree", "shard", "replicate"),
    [
        (0, 4, 4, [0, 1, 2, 3], [0, 4, 8, 12]),
        (14, 4, 4, [12, 13, 14, 15], [2, 6, 10, 14]),
        (9, 4, 8, [8, 9, 10, 11, 12, 13, 14, 15], [1, 9]),
        (11, 4, 2, [10, 11], [1, 3, 5, 7, 9, 11, 13, 15]),
    ],
)
def test_hybrid_sharding_over_four_nodes_shards_within_nodes(
    rank: int, per_node: int, shard_degree: int, shard: list[int], replicate: list[int]
) -> None:
    """Shards are gathered within a node where a node holds a whole copy; replicas have the same place in their groups."""
    with fake_world(rank, 4 * per_node) as place:
        mesh = make_shard_mesh(place, shard_degree)
        assert mesh.mesh_dim_names == ("replicate", "shard"), "fully_shard shards over the second"
        groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("shard", "replicate")]
        assert groups == [shard, replicate]
        nodes = {member // per_node for member in shard}
        assert len(nodes) == max(1, shard_degree // per_node)


def test_the_mesh_of_full_sharding_is_the_runs_own_group() -> None:
    with fake_world(5, 8) as place:
        mesh = make_shard_mesh(place, 0)
        assert mesh.get_group() is place.members(), "no further communicator"
