"""The ranks that other tests use."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from tests.distributed.pool import Pool


def die(rank: int, group: dist.ProcessGroup) -> int:
    if dist.get_rank(group) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_world_size(group)


@pytest.mark.slow
def test_a_rank_that_ends_is_named() -> None:
    """The call in which it ends names it, so does the next one, and the end: the kernel may kill any rank at any time."""
    pool = Pool(2)
    assert pool.call(2, die, 2) == [2, 2]
    for _ in range(2):
        with pytest.raises(AssertionError, match="rank 1 of the pool has ended with -9"):
            pool.call(2, die, 1)
    with pytest.raises(AssertionError, match="rank 1 of the pool has ended with -9"):
        pool.close()
