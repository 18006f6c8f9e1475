"""Layers cut along all three dims of a volume: eight ranks, each a thread, whose messages go through queues."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
from torch import Tensor

from hpcbench.strategies.spatial.halo import Box, HaloMessage
from hpcbench.strategies.spatial.train import layers as spatial_layers
from hpcbench.strategies.spatial.train.halo_exchange import SpatialGrid, box_view
from hpcbench.worker.distributed.process_groups import RankGroup
from tests.distributed.spatial_layers import LayerCase, Whole, differences, run_whole

pytestmark = pytest.mark.strategy("spatial")

RANKS, GRID = 8, (2, 2, 2)
BOUND = 1e-12
_WAIT_S = 60

Mail = defaultdict[tuple[int, int], "SimpleQueue[Tensor]"]


class ByQueues:
    """A ``HaloExchange`` through queues; messages to a rank that does not receive stay queued."""

    mail: Mail

    def __init__(
        self, cut: SpatialGrid, source: Tensor, origin: Box, sent: Sequence[HaloMessage], wanted: Sequence[HaloMessage]
    ) -> None:
        self._cut, self._wanted, self._received = cut, wanted, list[Tensor]()
        for rank, box in sent:
            self.mail[cut.group.place, rank].put(box_view(source, box, origin).clone())

    def wait(self) -> list[Tensor]:
        self._received += [self.mail[one.rank, self._cut.group.place].get(timeout=_WAIT_S) for one in self._wanted]
        self._wanted = []
        return self._received


def add_up(mail: Mail, place: int, tensor: Tensor) -> None:
    others = [other for other in range(RANKS) if other != place]
    for other in others:
        mail[place, other].put(tensor.clone())
    for other in others:
        tensor += mail[other, place].get(timeout=_WAIT_S)


def conv(kernel: int, **more: Any) -> LayerCase:
    overlap = more.pop("overlap", True)
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": kernel, "padding": kernel // 2, **more}
    return LayerCase("Conv3d", arguments, (7, 6, 9), GRID, overlap=overlap)


@pytest.mark.parametrize(
    "case",
    [
        *(conv(kernel, stride=stride) for kernel in (1, 3, 5, 7) for stride in (1, 2)),
        conv(3, overlap=False),
        conv(3, padding=2, dilation=2, groups=2),
        LayerCase("MaxPool3d", {"kernel_size": 3, "stride": 2, "padding": 1}, (7, 6, 9), GRID),
        LayerCase("AvgPool3d", {"kernel_size": 3, "stride": 2, "padding": 1}, (7, 8, 9), GRID),
    ],
    ids=lambda case: f"{case.kind} {case.arguments}",
)
def test_a_volume_split_along_all_dims_equals_the_whole(monkeypatch: pytest.MonkeyPatch, case: LayerCase) -> None:
    mail: Mail = defaultdict(SimpleQueue)
    monkeypatch.setattr(spatial_layers, "HaloExchange", type("ByQueues", (ByQueues,), {"mail": mail}))
    whole = run_whole(case)
    with ThreadPoolExecutor(RANKS) as threads:
        of_ranks = list(threads.map(partial(of_rank, case, whole, mail), range(RANKS)))
    for place, found in enumerate(of_ranks):
        assert max(found.values()) <= BOUND, (place, found)
    assert all(queue.empty() for queue in mail.values()), "a message that nobody wanted"


def of_rank(case: LayerCase, whole: Whole, mail: Mail, place: int) -> dict[str, float]:
    cut = SpatialGrid(RankGroup(tuple(range(RANKS)), place, None), GRID)
    return differences(case, whole, cut, partial(add_up, mail, place))
