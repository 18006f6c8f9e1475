"""The world that is not there behaves as a real one does, as far as payloads go."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hpcbench.parallel.mesh import RankMesh
from hpcbench.parallel.traffic import Traffic
from hpcbench.worker.distributed.process_groups import make_axis_groups
from tests.distributed.fake import fake_world
from tests.distributed.recording import record_traffic


@pytest.mark.parametrize(
    ("rank", "world_size", "dp_ranks", "tp_ranks"),
    [(0, 64, range(0, 64, 4), range(4)), (1022, 1024, range(2, 1024, 4), range(1020, 1024))],
)
def test_a_rank_of_a_large_world(rank: int, world_size: int, dp_ranks: range, tp_ranks: range) -> None:
    with fake_world(rank, world_size) as place:
        found = make_axis_groups(RankMesh(dp=world_size // 4, tp=4), place)
        assert [found["dp"].ranks, found["tp"].ranks] == [tuple(dp_ranks), tuple(tp_ranks)]
        part = torch.ones(3)

        def talk() -> None:
            dist.all_gather([torch.empty(3) for _ in range(4)], part, group=found["tp"].members())
            dist.all_reduce(part, group=found["dp"].members())
            peer = found["tp"].global_rank((found["tp"].place + 1) % 4)
            operations = [dist.P2POp(dist.isend, part, peer), dist.P2POp(dist.irecv, torch.empty(3), peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        assert record_traffic(talk) == [
            Traffic(operation="all_gather", group_size=4, payload_bytes=12),
            Traffic(operation="all_reduce", group_size=world_size // 4, payload_bytes=12),
            Traffic(operation="send", group_size=2, payload_bytes=12),
        ]
