"""The ranks that other tests use."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from tests.distributed.pool import Pool


def die(rank: int, number: int, group: dist.ProcessGroup) -> int:
    if dist.get_rank(group) == rank:
        os.kill(os.getpid(), number)
    return dist.get_world_size(group)


@pytest.mark.slow
def test_a_rank_that_ends_is_named() -> None:
    """The call in which it ends names it, so does the next one, and the end: the kernel may kill any rank at any time."""
    pool = Pool(2)
    assert pool.call(2, die, 2, signal.SIGKILL) == [2, 2]
    for _ in range(2):
        with pytest.raises(AssertionError, match="rank 1 of the pool has ended with -9"):
            pool.call(2, die, 1, signal.SIGKILL)
    with pytest.raises(AssertionError, match="rank 1 of the pool has ended with -9"):
        pool.close()


@pytest.mark.slow
def test_the_stacks_of_a_rank_that_a_signal_ends_are_shown() -> None:
    pool = Pool(2)
    with pytest.raises(AssertionError, match=r"rank 1 of the pool has ended with -11\n(?s:.*)test_pool.py.* in die"):
        pool.call(2, die, 1, signal.SIGSEGV)
    with pytest.raises(AssertionError):
        pool.close()
