"""What a rank holds falls with the world size as the stages of ZeRO promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from hpcbench.errors import WorkerError
from hpcbench.worker.strategies.fairscale import fairscale
from tests.conftest import absent
from tests.distributed.memory import BLOCKS, STRATEGIES, P, measure, promised, row, spec_of
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

BLOCK = P // BLOCKS


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Processes of its own: every tensor that Python knows is counted, and what other tests left is among them."""
    torch.set_num_threads(1)
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True, scope="module")
def _fairscale() -> None:
    try:
        fairscale("nn.data_parallel")
    except WorkerError as error:
        absent("fairscale", str(error))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("key", STRATEGIES)
def test_state_is_as_small_as_promised(pool: Pool, key: str, ranks: int) -> None:
    """Before the update and after it; every tensor is counted, so nothing is kept elsewhere."""
    for one in pool.call(ranks, measure, spec_of(key, ranks)):
        print(row(key, ranks, one))
        expected = promised(STRATEGIES[key], ranks)
        assert one.parameters + one.gradients + one.optimizer == pytest.approx(expected, rel=0.1)
        assert one.all_before == pytest.approx(expected, rel=0.1)
        assert one.all_after == pytest.approx(expected, rel=0.1)
        if STRATEGIES[key] == 3:
            assert BLOCK <= one.gathered <= 2 * BLOCK
        else:
            assert one.gathered == P


def test_fairscales_buckets_keep_all_gradients(pool: Pool) -> None:
    """With them, ShardedDataParallel's gradients are not sharded: they are views of buckets that stay."""
    options: dict[str, Any] = {"reduce_buffer_mb": 32.0}
    for one in pool.call(4, measure, msgspec.structs.replace(spec_of("fairscale_sddp", 4), options=options)):
        assert one.gradients == pytest.approx(P, rel=0.1)
        assert one.all_before == pytest.approx(promised(1, 4), rel=0.1)
