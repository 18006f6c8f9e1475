from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    torch.set_num_threads(1)
    ranks = Pool()
    yield ranks
    ranks.close()
