"""Messages that pass through host memory, as those of ranks that share a GPU do."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.worker.distributed.point_to_point import stage_messages
from tests.distributed.cases import EXACT, Case, OfRank, check, run_parallel, run_reference
from tests.distributed.pool import Pool
from tests.distributed.test_registry import training
from tests.parity_cases import ParityCase, parity_cases

SENDING = [
    pytest.param(key, case, id=f"{key}-{case.model}-{number}")
    for key, entry in STRATEGIES.items()
    if (entry.own_degree in ("pp_degree", "sp_degree")) and not entry.drives_several_devices
    for number, case in enumerate(parity_cases(key))
]


def run_staged(case: Case, group: dist.ProcessGroup) -> OfRank:
    """Train with staged messages."""
    stage_messages(True)
    try:
        return run_parallel(case, group)
    finally:
        stage_messages(False)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "parity"), SENDING)
def test_a_strategy_with_staged_messages_trains_what_its_reference_does(
    pool: Pool, key: str, parity: ParityCase
) -> None:
    case = training(key, parity, precision="fp64", steps=2, narrow=parity.model in ("vgg11", "resnet18"))
    check(pool.call(parity.ranks, run_staged, case), run_reference(case), EXACT)
