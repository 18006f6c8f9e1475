"""The world that is not there behaves as a real one does, as far as payloads go."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hpcbench.strategies.mesh import RankMesh
from hpcbench.strategies.sharded.train import make_shard_mesh
from hpcbench.strategies.traffic import Traffic
from hpcbench.worker.distributed.point_to_point import Message, exchange
from hpcbench.worker.distributed.process_groups import make_axis_groups
from tests.distributed.fake import fake_world
from tests.distributed.recording import record_traffic


@pytest.mark.parametrize(
    ("rank", "world_size", "dp_ranks", "tp_ranks"),
    [(0, 64, range(0, 64, 4), range(4)), (1022, 1024, range(2, 1024, 4), range(1020, 1024))],
)
def test_a_fake_rank_has_the_groups_of_its_world(rank: int, world_size: int, dp_ranks: range, tp_ranks: range) -> None:
    with fake_world(rank, world_size) as place:
        found = make_axis_groups(RankMesh(dp=world_size // 4, tp=4), place)
        assert [found["dp"].ranks, found["tp"].ranks] == [tuple(dp_ranks), tuple(tp_ranks)]
        part = torch.ones(3)

        def talk() -> None:
            dist.all_gather([torch.empty(3) for _ in range(4)], part, group=found["tp"].members())
            dist.all_reduce(part, group=found["dp"].members())
            peer = (found["tp"].place + 1) % 4
            messages = [Message(part, peer)], [Message(torch.empty(3), peer)]
            for transfers in exchange(*messages, found["tp"].members()):
                for transfer in transfers:
                    transfer.wait()

        assert record_traffic(talk) == [
            Traffic(operation="all_gather", group_size=4, payload_bytes=12),
            Traffic(operation="all_reduce", group_size=world_size // 4, payload_bytes=12),
            Traffic(operation="send", group_size=2, payload_bytes=12),
        ]


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
