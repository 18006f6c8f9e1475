from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed import cases
from tests.distributed.pool import Pool, return_freed_memory


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Use one thread, as the ranks do: threads that wait for each other keep cores from other processes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """New ranks for each module: torch keeps some of what a wrapped model held for as long as a process lives."""
    ranks = Pool()
    yield ranks
    ranks.close()
    cases.forget()
    return_freed_memory()
